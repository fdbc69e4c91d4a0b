# SPDX-License-Identifier: Apache-2.0
"""`nvidia-container-cli configure`: the driver into a container that is described by options, not by a bundle.

With --pid the container is a process in a mount namespace of its own, and ROOTFS is below its root: what a hook on the
host gives. Without, ROOTFS is in the caller's own mount namespace: LXC's mount hook and enroot have made one.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from cdi.host import store
from hook import injection, mounts, namespace, request
from hook.state import Container
from ldcache import kernel, root
from ldcache.errors import NvhookError

CAPABILITIES = {
    "compute": "-c",
    "utility": "-u",
    "video": "-v",
    "graphics": "-g",
    "display": "-D",
    "ngx": "-n",
    "compat32": None,
}
REQUIREMENTS_MAX = 32


class OwnNamespace(namespace.Namespace):
    """The mount namespace that we are in, which somebody made for the container; nothing has to be entered."""

    def open(self, container: Container) -> None:
        """Raises NvhookError where it is the machine's: a mount below ROOTFS would stay there."""
        if not mounts.is_separate():
            what = "this is the host's own mount namespace, and there is no --pid; the mounts would be the host's"
            raise NvhookError(what, "name the container's process by --pid, or run this below `unshare --mount`")

    def outside(self, container: Container) -> int:
        """ROOTFS."""
        try:
            return root.open_root(container.root_path)
        except OSError as error:
            what = f"cannot open the container's root {container.root_path}: {error.strerror}"
            raise NvhookError(what, "see whether the image is mounted there") from error

    def enter(self, root_path: str) -> None:
        """The root, which must not hand on to the host what is mounted in it."""
        self.open_base(root_path)
        if self._mounts().is_shared(self.base_mount):
            what = f"{root_path} is a shared mount; what is mounted in it would be the host's too"
            raise NvhookError(what, "make it private first: mount --make-rprivate")


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """The options of `configure`."""
    add = verb.add_argument
    add("rootfs", metavar="ROOTFS", help="the container's root, absolute")
    add("-p", "--pid", type=int, default=0, metavar="PID", help="a process in the container's namespaces")
    add("-d", "--device", action="append", default=[], metavar="ID", help="a GPU or MIG device, or all; repeatable")
    add("-r", "--require", action="append", default=[], metavar="EXPR", help="a requirement; repeatable")
    add("-l", "--ldconfig", metavar="FILE", help="has no effect: the loader cache is written without it")
    for name, short in CAPABILITIES.items():
        names = [f"--{name}"] if short is None else [short, f"--{name}"]
        verb.add_argument(*names, action="store_true", help=f"the driver capability {name}")
    add("--imex-channel", action="append", default=[], metavar="ID", help="an IMEX channel; repeatable")
    add("--mig-config", choices=("all",), help="let it divide GPUs")
    add("--mig-monitor", choices=("all",), help="let it watch all MIG devices")
    add("--no-cgroups", action="store_true", help="leave the device rules alone")
    add("--no-devbind", action="store_true", help="leave /dev alone: something else brings the nodes")
    add("--cuda-compat-mode", choices=("disabled", "mount", "ldconfig"), help="whether the image's libcuda may be used")
    for name in ("persistenced", "fabricmanager", "gsp-firmware"):
        add(f"--no-{name}", action="store_true", help=f"leave {name} out")


def run(arguments: argparse.Namespace) -> int:
    """The command. Raises NvhookError, with nothing left behind."""
    wanted = request_of(arguments)
    container = container_of(arguments)
    host = root.open_host(arguments.host_root)
    known = store.inventory(host, arguments.host_root)
    check_root(arguments.root, known)
    judged = injection.judge(host, arguments.host_root, wanted, known)
    judged.settings = settings_of(judged.settings, arguments)
    leave_out(judged.selection, arguments)
    place = namespace.Namespace() if arguments.pid else OwnNamespace()
    kernel.set_no_new_privs()
    for warning in injection.apply(container, host, judged, place, []):
        print(f"nvidia-container-cli: warning: {warning}", file=sys.stderr)
    return 0


def request_of(arguments: argparse.Namespace) -> request.Request:
    """What is asked for. Raises NvhookError."""
    capabilities = tuple(sorted(name for name in CAPABILITIES if getattr(arguments, name)))
    if len(arguments.require) > REQUIREMENTS_MAX:
        raise NvhookError(f"there are more than {REQUIREMENTS_MAX} requirements", "drop some")
    wanted = request.Request(ids_of(arguments.device), capabilities)
    wanted.requirements = [("--require", text) for text in arguments.require]
    wanted.imex = tuple(channel(item) for text in arguments.imex_channel for item in request.split(text))
    control = (("config", arguments.mig_config), ("monitor", arguments.mig_monitor))
    wanted.mig_control = tuple(name for name, value in control if value)
    return wanted


def ids_of(texts: list[str]) -> tuple[str, ...] | None:
    """Ids between commas, each once; None for all. What stands behind `all` is not read, as with NVIDIA's."""
    items = [item for text in texts for item in request.split(text)]
    return None if any(item.lower() == "all" for item in items) else tuple(dict.fromkeys(items))


def channel(item: str) -> int:
    """An IMEX channel's number. Raises NvhookError."""
    if item.isascii() and item.isdigit() and len(item) < 8 and int(item) < request.IMEX_MAX:
        return int(item)
    raise NvhookError(f"{item!a} is no IMEX channel", f"name channels from 0 to {request.IMEX_MAX - 1}")


def container_of(arguments: argparse.Namespace) -> Container:
    """The container that the options describe. Raises NvhookError."""
    if not arguments.rootfs.startswith("/") or not arguments.rootfs.strip("/"):
        raise NvhookError(f"ROOTFS is {arguments.rootfs!a}", "name the container's root by an absolute path, not /")
    container = Container("", pid=arguments.pid)
    container.root_path = arguments.rootfs
    # Without a config.json nothing tells what below /proc is masked; NVIDIA's command always puts its mask there.
    container.masked_paths = ["/proc/driver"]
    return container


def settings_of(configured: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration with what the options say over it."""
    changes: dict[str, Any] = {}
    if arguments.no_cgroups:
        changes["prestart.no-cgroups"] = True
    if arguments.no_devbind:
        changes["prestart.no-devbind"] = True
    if arguments.cuda_compat_mode:
        changes["compat.forward-compatibility"] = arguments.cuda_compat_mode != "disabled"
    return configured | changes


def leave_out(chosen: Any, arguments: argparse.Namespace) -> None:
    """Take out of a Selection what the options don't want."""
    for name in ("persistenced", "fabricmanager"):
        if getattr(arguments, f"no_{name}"):
            chosen.sockets = [item for item in chosen.sockets if name not in item["path"]]
    if arguments.no_gsp_firmware:
        chosen.firmware = []


def check_root(wanted: str | None, known: dict[str, Any]) -> None:
    """The driver root is the configuration's, since an inventory is the host's. Raises NvhookError for another."""
    have = known["options"]["driver_root"]
    if wanted is not None and "/" + wanted.strip("/") != "/" + have.strip("/"):
        what = f"--root is {wanted}, and the configured driver root is {have}"
        raise NvhookError(what, f"nvhook config --set driver.root={wanted} --in-place")

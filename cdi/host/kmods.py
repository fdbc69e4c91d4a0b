# SPDX-License-Identifier: Apache-2.0
"""Loading nvidia-uvm and nvidia-modeset, and making nodes of theirs and of MIG devices, before they count as missing.

Nothing loads these modules at boot: CUDA and X do it by nvidia-modprobe, a set-uid program, at their first use on the
host. A host that only runs containers has no first use, and a container can't load modules. So the renewal of the
inventory does what nvidia-modprobe would, with the owner and mode that the driver's parameters ask for, and leaves
nodes alone where they say `ModifyDeviceFiles: 0`. What fails here is reported, and then the node is missing.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cdi.host import driver, fingerprint, mig, nodes
from ldcache import root

# The program that the kernel itself runs to load a module; empty where loading is turned off.
MODPROBE_FILE = "/proc/sys/kernel/modprobe"
MODPROBE = "/sbin/modprobe"
DEADLINE = 10.0
# How long a killed modprobe may take to be gone.
REAP = 0.2
SAID_MAX = 65536
WHOLE_USER_NAMESPACE = ["0", "0", "4294967295"]


@dataclass(frozen=True, slots=True)
class Module:
    """`majors` are the names in /proc/devices that it may stand under, `nodes` the minors by the node's name."""

    name: str
    majors: tuple[str, ...]
    nodes: dict[str, int]
    needed: bool

    @property
    def folder(self) -> str:
        """Its folder in sysfs, there while it is loaded."""
        return f"{fingerprint.MODULE_FOLDER}/{self.name.replace('-', '_')}"


MODULES = (
    Module("nvidia-uvm", ("nvidia-uvm",), {"nvidia-uvm": 0, "nvidia-uvm-tools": 1}, needed=True),
    Module("nvidia-modeset", nodes.MAJOR_NAMES, {"nvidia-modeset": nodes.MODESET_MINOR}, needed=False),
)


def may_load(host_root: str, settings: dict[str, Any]) -> bool:
    """Whether this process is to load modules: as root of the whole machine, and for this machine's own root only."""
    if host_root.rstrip("/") or not settings["driver.load-kmods"] or os.geteuid() != 0:
        return False
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            return file.read().split() == WHOLE_USER_NAMESPACE
    except OSError:
        return False


def load(root_fd: int, made: dict[str, Any], program: str | None = None, deadline: float = DEADLINE) -> bool:
    """Load what an inventory has no nodes of, and make these. True where anything is another now: look again.

    `program` stands for modprobe, `deadline` is seconds for each module. A module that does not load adds to the
    inventory's warnings if CUDA needs it.
    """
    there = {node["path"] for node in made["nodes"]}
    changed = False
    for module in MODULES:
        missing = [name for name in module.nodes if f"/dev/{name}" not in there]
        if not missing:
            continue
        if not root.exists(root_fd, module.folder):
            reason = run(program or modprobe(root_fd), module.name, deadline)
            if reason is not None:
                made["warnings"] += [f"the module {module.name} does not load: {reason}"] * module.needed
                continue
            changed = True
        try:
            changed |= _module_nodes(root_fd, made, module, missing)
        except OSError as error:
            made["warnings"].append(f"cannot make /dev/{missing[0]}: {error.strerror}")
    try:
        return _capability_nodes(root_fd, made) or changed
    except OSError as error:
        made["warnings"].append(f"cannot make nodes in {mig.NODES}: {error.strerror}")
    return changed


def modprobe(root_fd: int) -> str:
    """The path of modprobe; empty where the machine must not load modules."""
    try:
        return root.read_file(root_fd, MODPROBE_FILE, fingerprint.TEXT_MAX).decode("utf-8", "surrogateescape").strip()
    except OSError:
        return MODPROBE


def run(program: str, module: str, deadline: float) -> str | None:
    """Why a module could not be loaded, or None. A modprobe that hangs in the kernel is killed and not waited for."""
    if not program:
        return f"{MODPROBE_FILE} is empty"
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
    null = subprocess.DEVNULL
    # A file and no pipe, which whatever modprobe leaves running would hold open.
    with open(os.memfd_create("said"), "w+b") as said:
        try:
            child = subprocess.Popen([program, "--", module], env=environment, stdin=null, stdout=null, stderr=said)
        except OSError as error:
            return f"{program}: {error.strerror}"
        try:
            status = child.wait(deadline)
        except subprocess.TimeoutExpired:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(REAP)
            return f"{program} did not end within {deadline:g} s"
        said.seek(0)
        last = said.read(SAID_MAX).decode("utf-8", "replace").strip().rpartition("\n")[2]
    if status == 0:
        return None
    return last if last and last.isprintable() else f"{program} ended with status {status}"


def _module_nodes(root_fd: int, made: dict[str, Any], module: Module, missing: list[str]) -> bool:
    """Whether a node was made. One with other numbers is replaced: it is of an earlier load of the module."""
    params: dict[str, int] = made["driver"]["params"]
    majors = nodes.character_majors(root_fd)
    major = next((majors[name] for name in module.majors if name in majors), None)
    if major is None or not params.get("ModifyDeviceFiles", 1):
        return False
    owner = params.get("DeviceFileUID", 0), params.get("DeviceFileGID", 0)
    mode = params.get("DeviceFileMode", 0o666)
    with _folder(root_fd, made, "/dev") as folder:
        wanted = [(name, os.makedev(major, module.nodes[name])) for name in missing]
        return any([_make(folder, name, device, mode, owner) for name, device in wanted])


def _capability_nodes(root_fd: int, made: dict[str, Any]) -> bool:
    """Both nodes of each MIG device that lacks one: after a reload of the driver nobody makes them but nvidia-smi."""
    major = nodes.character_majors(root_fd).get(mig.CAPS_DEVICE)
    access = [path for entry in made["mig"] if not entry["nodes"] for path in entry["access"]]
    found = [mig.capability(root_fd, path) for path in access]
    wanted = [one for one in found if "DeviceFileMinor" in one and one.get("DeviceFileModify")]
    if major is None or not wanted or not made["driver"]["params"].get("ModifyDeviceFiles", 1):
        return False
    parent, _, name = mig.NODES.rpartition("/")
    with _folder(root_fd, made, parent) as folder, contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=folder)
        os.chmod(name, 0o755, dir_fd=folder)
    with _folder(root_fd, made, mig.NODES) as folder:
        minors = {one["DeviceFileMinor"]: one.get("DeviceFileMode", 0o444) for one in wanted}
        return any(
            [_make(folder, f"nvidia-cap{minor}", os.makedev(major, minor), mode) for minor, mode in minors.items()]
        )


@contextlib.contextmanager
def _folder(root_fd: int, made: dict[str, Any], path: str) -> Iterator[int]:
    """A folder inside the dev root. Raises OSError where there is none."""
    base = driver.open_root(root_fd, made["options"]["dev_root"] or "/", "dev root")
    try:
        folder = root.open_path(base.fd, path)
    finally:
        os.close(base.fd)
    try:
        yield folder
    finally:
        os.close(folder)


def _make(folder: int, name: str, device: int, mode: int, owner: tuple[int, int] = (0, 0)) -> bool:
    try:
        there = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        pass
    else:
        # udev was faster; or somebody put something else there, and knows why.
        if not stat.S_ISCHR(there.st_mode) or there.st_rdev == device:
            return False
    temporary = f".{name}.nvhook-{os.getpid()}"
    # Whole before it has its name: no one opens it with another owner or mode.
    os.mknod(temporary, stat.S_IFCHR, device, dir_fd=folder)
    try:
        os.chown(temporary, *owner, dir_fd=folder, follow_symlinks=False)
        os.chmod(temporary, mode, dir_fd=folder)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(temporary, dir_fd=folder)
        raise
    return True

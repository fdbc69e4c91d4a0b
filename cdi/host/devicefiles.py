# SPDX-License-Identifier: Apache-2.0
"""`nvhook nodes`: makes the driver's device nodes, and the links in /dev/char that lead to them.

nvidia.ko registers plain character majors and no device objects, so that neither devtmpfs makes the nodes nor udev
their links. Programs of NVIDIA's make the nodes when they first run as root; a container that starts before has none.
The links are what some versions of runc and systemd look the number of a device rule up by.
"""

from __future__ import annotations

import argparse
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cdi.host import driver, fingerprint, gpus, mig, modules, nodes, platform
from ldcache import root
from ldcache.errors import NvhookError

CAPS_FOLDER = "/dev/nvidia-caps"
LINKS = "/dev/char"
LINK_NAME = re.compile(r"(\d{1,10}):(\d{1,10})")
# Folders of /dev and how the driver's nodes in them begin: nvidia0, nvidia-uvm, nvidia-caps/nvidia-cap1, …
FOLDERS = {"": "nvidia", "nvidia-caps/": "", "nvidia-caps-imex-channels/": ""}

# /capabilities, gpuN, mig, giN, ciN, access
CAPABILITY_DEPTH = 6


@dataclass(frozen=True, slots=True)
class Node:
    """A node as the kernel says it should be. `mode` has the permission bits alone."""

    path: str
    major: int
    minor: int
    mode: int
    uid: int
    gid: int

    @property
    def device(self) -> int:
        """st_rdev."""
        return os.makedev(self.major, self.minor)


class Work:
    """What is to be done below one dev root: `report` gets a line for each change, `dry` makes none."""

    def __init__(self, dev: fingerprint.Base, dry: bool, report: Callable[[str], None]) -> None:
        self.dev = dev
        self.dry = dry
        self.report = report


def create(root_fd: int, work: Work) -> list[str]:
    """Make the nodes that are missing or another device's; what is right stays untouched. Warnings come back.

    Raises NvhookError, where no driver is loaded too.
    """
    platform.refuse_moduleless(root_fd)
    loaded = driver.read(root_fd)
    if loaded.params.get("ModifyDeviceFiles", 1) == 0:
        # The administrator's word to all of NVIDIA's programs (nv.h, NV_REG_MODIFY_DEVICE_FILES).
        return [f"no node is made: {driver.PARAMS} says ModifyDeviceFiles: 0"]
    found, faults = gpus.read(root_fd)
    for node in (*driver_nodes(root_fd, loaded.params, found), *capability_nodes(root_fd)):
        put(work, node)
    return [f"GPU {fault.bus_id} gets no node: {fault.reason}" for fault in faults if not fault.lasting]


def driver_nodes(root_fd: int, params: dict[str, int], found: list[gpus.Gpu]) -> Iterator[Node]:
    """The driver's own nodes and one for each GPU, for the modules that are loaded.

    Mode and owner are the module's parameters, 0666 and root by default. Those of DRM are the kernel's to make.
    """
    modeset = "nvidia-modeset" in nodes.character_majors(root_fd)
    mode = params.get("DeviceFileMode", 0o666) & 0o777
    uid, gid = params.get("DeviceFileUID", 0), params.get("DeviceFileGID", 0)
    for wanted in nodes.expected(root_fd, found):
        if wanted.role == "drm" or (wanted.role == "modeset" and not modeset):
            continue
        if wanted.major is not None and wanted.minor is not None:
            yield Node(wanted.path, wanted.major, wanted.minor, mode, uid, gid)


def capability_nodes(root_fd: int) -> Iterator[Node]:
    """The nodes that stand for capabilities: MIG's for its configuration, monitoring and each instance, and IMEX's.

    Each file of the driver's tree names the minor and the mode of its node (nvidia-caps, nv-caps.c).
    """
    major = nodes.character_majors(root_fd).get("nvidia-caps")
    if major is None:
        return
    for path in capability_files(root_fd, fingerprint.CAPABILITIES, CAPABILITY_DEPTH):
        facts = mig.capability(root_fd, path)
        minor, mode = facts.get("DeviceFileMinor"), facts.get("DeviceFileMode")
        if minor is not None and mode is not None and facts.get("DeviceFileModify", 1):
            yield Node(f"{CAPS_FOLDER}/nvidia-cap{minor}", major, minor, mode & 0o777, 0, 0)


def capability_files(root_fd: int, folder: str, depth: int) -> Iterator[str]:
    """The files of the capabilities' tree; instances that vanish meanwhile are none."""
    try:
        names = root.listdir(root_fd, folder)
    except OSError:
        return
    for name in names:
        path = f"{folder}/{name}"
        try:
            kind = root.file_type(root.stat(root_fd, path, follow=False).st_mode)
        except OSError:
            continue
        if kind == root.S_IFREG:
            yield path
        elif kind == root.S_IFDIR and depth > 1:
            yield from capability_files(root_fd, path, depth - 1)


def put(work: Work, node: Node) -> None:
    """One node in its place. Raises NvhookError."""
    shown = f"{work.dev.prefix}{node.path}"
    folder, name = root.split(node.path)
    try:
        have = look(work.dev.fd, node.path)
        if have is not None and is_right(have, node):
            return
        if have is not None and not stat.S_ISCHR(have.st_mode):
            raise NvhookError(f"{shown} is in the way: it is no device node", "see what it is, and remove it")
        before = "" if have is None else f", {change(have, node)}"
        if not work.dry:
            place = root.open_folder(work.dev.fd, folder, make_folder)
            try:
                make_node(place, name, node)
            finally:
                os.close(place)
        work.report(f"{shown} is device {node.major}:{node.minor}{before}")
    except OSError as error:
        remedy = "run this as root of the host: no node can be made in a user namespace, or where /dev is read-only"
        raise NvhookError(f"cannot make {shown}: {error.strerror}", remedy) from error


def look(dev: int, path: str) -> os.stat_result | None:
    """What lies there, a link itself; None for nothing."""
    try:
        return root.stat(dev, path, follow=False)
    except FileNotFoundError:
        return None


def is_right(have: os.stat_result, node: Node) -> bool:
    """Whether a node needs nothing done."""
    owner = have.st_uid, have.st_gid
    return have.st_mode == stat.S_IFCHR | node.mode and have.st_rdev == node.device and owner == (node.uid, node.gid)


def change(have: os.stat_result, node: Node) -> str:
    """What was wrong with it."""
    if have.st_rdev != node.device:
        return f"it was {os.major(have.st_rdev)}:{os.minor(have.st_rdev)}"
    return f"mode {node.mode:04o}, owner {node.uid}:{node.gid}"


def make_folder(parent: int, name: str) -> None:
    """A folder of /dev, as devtmpfs makes them, whatever the umask."""
    os.mkdir(name, 0o755, dir_fd=parent)
    os.chmod(name, 0o755, dir_fd=parent)


def make_node(place: int, name: str, node: Node) -> None:
    """By rename: nobody finds a node that is half ready, and one that programs have open stays theirs."""
    temporary = f".{name}.{os.getpid()}"
    os.mknod(temporary, stat.S_IFCHR | 0o600, node.device, dir_fd=place)
    try:
        os.chown(temporary, node.uid, node.gid, dir_fd=place)
        os.chmod(temporary, node.mode, dir_fd=place)
        os.rename(temporary, name, src_dir_fd=place, dst_dir_fd=place)
    except OSError:
        os.unlink(temporary, dir_fd=place)
        raise


def link(work: Work) -> list[str]:
    """Make `/dev/char/MAJOR:MINOR` lead to each node of the driver that is there, and take away links to one of them
    under numbers that it no longer has: nvidia-uvm's major is another after each load. That this node is not there
    among others is a warning. Raises NvhookError."""
    try:
        wanted = {f"{os.major(device)}:{os.minor(device)}": f"../{name}" for name, device in present(work.dev.fd)}
        if not wanted and not root.exists(work.dev.fd, LINKS):
            return []
        if work.dry and not root.exists(work.dev.fd, LINKS):
            have: dict[str, str] = {}
        else:
            place = root.open_folder(work.dev.fd, LINKS, make_folder)
            try:
                have = links(place)
                if not work.dry:
                    set_links(place, wanted, have)
            finally:
                os.close(place)
    except OSError as error:
        shown = f"{work.dev.prefix}{LINKS}"
        raise NvhookError(f"cannot write {shown}: {error.strerror}", "run this as root of the host") from error
    for number, target in wanted.items():
        if have.get(number) != target:
            work.report(f"{work.dev.prefix}{LINKS}/{number} leads to {target}")
    for number in stale(wanted, have):
        work.report(f"{work.dev.prefix}{LINKS}/{number} is removed: {have[number]} is another device now")
    if not wanted or "../nvidia-uvm" in wanted.values():
        return []
    shown = f"{work.dev.prefix}/dev/nvidia-uvm"
    return [f"{shown} is missing and gets no link: `nvhook nodes create --load-kmods` makes it"]


def present(dev: int) -> Iterator[tuple[str, int]]:
    """Names below /dev and device numbers of the driver's nodes that are there."""
    for folder, begins in FOLDERS.items():
        try:
            names = root.listdir(dev, f"/dev/{folder}")
        except OSError:
            continue
        for name in filter(lambda name: name.startswith(begins), names):
            have = look(dev, f"/dev/{folder}{name}")
            if have is not None and stat.S_ISCHR(have.st_mode):
                yield f"{folder}{name}", have.st_rdev


def links(place: int) -> dict[str, str]:
    """The links of a folder like /dev/char: number and target."""
    fd = root.reopen(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        names = [name for name in os.listdir(fd) if LINK_NAME.fullmatch(name)]
        return {name: os.readlink(name, dir_fd=fd) for name in names if is_link(fd, name)}
    finally:
        os.close(fd)


def is_link(fd: int, name: str) -> bool:
    """Whether an entry is a symbolic link."""
    return stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)


def stale(wanted: dict[str, str], have: dict[str, str]) -> list[str]:
    """Links to one of our nodes under a number that is not its own."""
    targets = set(wanted.values())
    return sorted(number for number, target in have.items() if number not in wanted and target in targets)


def set_links(place: int, wanted: dict[str, str], have: dict[str, str]) -> None:
    """Each by rename, so that a number never leads nowhere meanwhile."""
    for number, target in wanted.items():
        if have.get(number) != target:
            temporary = f".{number}.{os.getpid()}"
            os.symlink(target, temporary, dir_fd=place)
            os.rename(temporary, number, src_dir_fd=place, dst_dir_fd=place)
    for number in stale(wanted, have):
        os.unlink(number, dir_fd=place)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nvhook nodes`."""
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    make = verbs.add_parser("create", help="make the driver's device nodes that are missing or wrong")
    make.add_argument("--load-kmods", action="store_true", help="first load the kernel modules that are missing")
    for verb in (make, verbs.add_parser("link", help="make the links in /dev/char that lead to the nodes")):
        verb.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
        verb.add_argument("--host-root", default="/", metavar="DIR", help="the folder that stands for the host's /")
        verb.add_argument("--dev-root", default="/", metavar="DIR", help="where the host's device nodes are, below dev")


def run(arguments: argparse.Namespace) -> int:
    """`nvhook nodes`: a line on stdout for each change. Raises NvhookError."""
    create_too = arguments.what == "create"
    load_kmods = create_too and arguments.load_kmods
    return warn(make(arguments.host_root, arguments.dev_root, create_too, load_kmods, arguments.dry_run, print))


def make(
    host_root: str, base: str, create_too: bool, load_kmods: bool, dry: bool, report: Callable[[str], None]
) -> list[str]:
    """Make the nodes below the dev root `base`, or the links to them; warnings come back. Raises NvhookError."""
    root_fd = root.open_host(host_root)
    try:
        warnings: list[str] = []
        if load_kmods:
            warnings += load(root_fd, host_root, dry, report)
            if not modules.has_gpu(root_fd):
                # A package enables this at boot; a machine without a GPU is no failure then.
                return warnings
        host = fingerprint.Base(root_fd, "")
        dev = host if not base.rstrip("/") else driver.open_root(root_fd, base, "dev root")
        try:
            work = Work(dev, dry, report)
            if create_too:
                warnings += create(root_fd, work)
            else:
                warnings += link(work)
        finally:
            if dev is not host:
                os.close(dev.fd)
    finally:
        os.close(root_fd)
    return warnings


def warn(warnings: list[str]) -> int:
    """Warnings on stderr; the exit status of what is done all the same."""
    for warning in warnings:
        print(f"nvhook: warning: {warning}", file=sys.stderr)
    return 0


def load(root_fd: int, host_root: str, dry: bool, report: Callable[[str], None]) -> list[str]:
    """Load missing modules, or with `dry` say which. Raises NvhookError for a root that is not the machine's: its
    kernel is not the one that would load them."""
    if os.path.realpath(host_root) != "/":
        what = f"--load-kmods would load modules into this machine's kernel, and --host-root is {host_root}"
        raise NvhookError(what, "give one of the two")
    if dry:
        for name in modules.missing(root_fd) if modules.has_gpu(root_fd) else ():
            report(f"the kernel module {name} would be loaded")
        return []
    loaded, warnings = modules.load(root_fd)
    for name in loaded:
        report(f"the kernel module {name} is loaded")
    return warnings

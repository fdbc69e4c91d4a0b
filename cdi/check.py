# SPDX-License-Identifier: Apache-2.0
"""`cdi check`: whether the spec files of this host say what the host is now, and which of them engines will use.

Cold, but written as the hot modules are, for a timer may run it every few seconds: nothing is imported that JSON files
of our own do not need. A file is judged by its content, whoever made it, against the kept inventory, whose fingerprint
tells whether it still holds; a stale one is renewed first. Nothing that engines read is changed.
"""

from __future__ import annotations

import posix
import sys

from cdi import registry, source
from cdi.host import fingerprint, store
from ldcache import root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from cdi import validate

FRESH, STALE = 0, 3
CHARACTER = 0o020000
CAPS = "/dev/nvidia-caps/nvidia-cap"
CAP_LINE = "DeviceFileMinor:"
# What follows /dev/ in the names of the driver's nodes, whose major it is in /proc/devices, by the first name that is
# there (up to the 545 branch the driver's own was registered as nvidia-frontend), and the minor, or that it is the
# number behind (nv.h and nv-caps.c of the open kernel module, and uvm_linux.h).
DRIVER = ("nvidia", "nvidia-frontend", "nvidiactl")
NODES: tuple[tuple[str, tuple[str, ...], int | None], ...] = (
    ("nvidiactl", DRIVER, 255),
    ("nvidia-modeset", DRIVER, 254),
    ("nvidia-uvm", ("nvidia-uvm",), 0),
    ("nvidia-uvm-tools", ("nvidia-uvm",), 1),
    ("nvidia-caps/nvidia-cap", ("nvidia-caps",), None),
    ("nvidia-caps-imex-channels/channel", ("nvidia-caps-imex-channels",), None),
    ("nvidia", DRIVER, None),
)
VERSIONED = ("libcuda.so.", "libnvidia-ml.so.")

USAGE = """\
usage: cdi check [--spec-dir DIR]... [--host-root DIR] [--as-user] [--json]

Whether the CDI files say what this host is now: 0 fresh, 3 stale.

  --spec-dir DIR   a folder of specs; may be repeated, a later one has priority; default: /etc/cdi and /var/run/cdi
  --host-root DIR  the folder that stands for the host's /
  --as-user        a file that ordinary users can't read counts as stale: rootless engines don't see it
  --json           all that is known, as one JSON object
"""


class Verdict:
    """What is known of one file: `made_by` whom, the names `used` of it, those `lost` to another file, and why it
    is `stale`."""

    __slots__ = ("lost", "made_by", "path", "stale", "used")

    def __init__(self, path: str, made_by: str) -> None:
        self.path = path
        self.made_by = made_by
        self.used: list[str] = []
        self.lost: dict[str, list[str]] = {}
        self.stale: list[str] = []

    def lines(self) -> list[str]:
        """For people; the first line says whether engines use it."""
        state = "stale" if self.stale else "fresh"
        use = f"used for {_some(self.used)}" if self.used else "used for nothing"
        lines = [f"{self.path}: {state}, made by {self.made_by}, {use}"]
        lines += [f"  {_some(names)}: {other} counts" for other, names in self.lost.items()]
        return lines + [f"  {reason}" for reason in self.stale]

    def to_json(self) -> dict[str, Any]:
        """The object in the list `files` of --json."""
        return {name: getattr(self, name) for name in ("path", "made_by", "used", "lost", "stale")}


def main(words: list[str]) -> int:
    """`cdi check`: the exit status. Raises NvhookError where nothing can be told."""
    folders: list[str] = []
    host_root, as_json, as_user = "/", False, False
    left = list(words)
    while left:
        word, equals, value = left.pop(0).partition("=")
        if word in ("--spec-dir", "--host-root") and (equals or left):
            value = value if equals else left.pop(0)
            if word == "--spec-dir":
                folders.append(value)
            else:
                host_root = value
        elif word == "--json" and not equals:
            as_json = True
        elif word == "--as-user" and not equals:
            as_user = True
        elif word in ("-h", "--help"):
            sys.stdout.write(USAGE)
            return FRESH
        else:
            sys.stderr.write(f"{USAGE}\ncdi check: what is {word!a}?\n")
            return 2
    if not host_root.startswith("/"):
        host_root = f"{posix.getcwd()}/{host_root}"
    top = host_root.rstrip("/")
    verdicts, others = judge(host_root, folders or [f"{top}{one}" for one in registry.FOLDERS], as_user)
    stale = bool(others) or any(verdict.stale for verdict in verdicts)
    if as_json:
        import json

        print(json.dumps({"files": [one.to_json() for one in verdicts], "problems": others}, indent=2))
    else:
        for line in [line for verdict in verdicts for line in verdict.lines()] + others:
            print(_printable(line))
    return STALE if stale else FRESH


def judge(host_root: str, folders: list[str], as_user: bool = False) -> tuple[list[Verdict], list[str]]:
    """A verdict on each file that is about NVIDIA's devices, and what is wrong besides."""
    root_fd = root.open_host(host_root)
    try:
        found = registry.scan(folders, load)
        files = [file for file in found.files if _is_nvidias(file.spec)]
        problems = _problems(found, files)
        inventory, reason = _inventory(root_fd, host_root)
        verdicts = []
        for file in files:
            verdict = Verdict(file.path, maker(file.spec))
            _place(verdict, found, file)
            verdict.stale = [reason] if inventory is None else _compare(root_fd, file.spec, inventory)
            if as_user:
                verdict.stale += _hidden(file.path)
            verdicts.append(verdict)
        if not files:
            problems.append(f"no file in {' or '.join(folders)} has NVIDIA's devices")
        return verdicts, problems
    finally:
        posix.close(root_fd)


def load(path: str) -> validate.Checked:
    """A spec file of whatever kind; the YAML library is loaded for what is no plain JSON."""
    try:
        return registry.load_plain(path)
    except source.NotPlain:
        from cdi import reader

        return reader.load(path)


def maker(spec: dict[str, Any]) -> str:
    """Who made a file, by its hooks and its kind."""
    kind = spec["kind"]
    if kind.startswith("management."):
        return "NVIDIA's GPU operator"
    if kind.startswith("k8s.device-plugin."):
        return "NVIDIA's device plugin"
    for hook in _hooks(spec):
        for word in (hook["path"], *hook.get("args", [])[:1]):
            name = word.rpartition("/")[2]
            if name.startswith("nvhook"):
                return "nvhook"
            if name in ("nvidia-cdi-hook", "nvidia-ctk"):
                return "NVIDIA's toolkit"
    return "something else"


def _inventory(root_fd: int, host_root: str) -> tuple[dict[str, Any] | None, str]:
    """The host's inventory, by the options that the kept one was made with; or None and why there is none."""
    options = store.Options(host_root, nvml="never")
    folder = store.find_folder(root_fd, host_root)
    if folder is not None:
        try:
            kept = (store.load(folder) or {}).get("options")
        finally:
            posix.close(folder)
        if isinstance(kept, dict):
            options.driver_root, options.dev_root = kept.get("driver_root"), kept.get("dev_root")
            options.library_search_path = tuple(kept.get("library_search_path") or ())
    if not fingerprint.text(root_fd, fingerprint.VERSION_FILE):
        return None, f"no NVIDIA driver is loaded: there is no {fingerprint.VERSION_FILE}"
    return store.inventory(root_fd, host_root, options), ""


def _is_nvidias(spec: dict[str, Any]) -> bool:
    return spec["kind"].partition("/")[0].endswith("nvidia.com") or any(
        node["path"].startswith("/dev/nvidia") for edits in _edits(spec) for node in edits.get("deviceNodes", [])
    )


def _edits(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [spec.get("containerEdits") or {}, *(device.get("containerEdits") or {} for device in spec["devices"])]


def _hooks(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [hook for edits in _edits(spec) for hook in edits.get("hooks", [])]


def _problems(found: registry.Registry, files: list[registry.SpecFile]) -> list[str]:
    """Files that engines stumble over, and names that two files of one folder make unresolvable."""
    makers = {file.path: maker(file.spec) for file in files}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, conflict in found.conflicts.items():
        if any(path in makers for path in conflict):
            groups.setdefault(tuple(conflict), []).append(name)
    lines = []
    for paths, names in groups.items():
        shown = " and ".join(f"{path} (made by {makers.get(path, 'something else')})" for path in paths)
        lines.append(f"{_some(names)}: no engine finds it, for it is in each of {shown}; remove one")
    return lines + [f"{path}: not read by any engine: {'; '.join(why)}" for path, why in found.failed.items()]


def _place(verdict: Verdict, found: registry.Registry, file: registry.SpecFile) -> None:
    """Which names engines take from this file."""
    for device in file.spec["devices"]:
        name = f"{file.spec['kind']}={device['name']}"
        if name not in found.devices:
            continue
        counts = found.devices[name][0].path
        if counts == file.path:
            verdict.used.append(name)
        else:
            verdict.lost.setdefault(counts, []).append(name)


def _compare(root_fd: int, spec: dict[str, Any], inventory: dict[str, Any]) -> list[str]:
    """What a file says that is not so, or not so any more."""
    reasons = []
    made_for, loaded = driver_version(spec), inventory["driver"]["version"]
    if made_for not in (None, loaded):
        reasons.append(f"made for driver {made_for}; {loaded} is loaded")
    reasons += _nodes(root_fd, spec, inventory)
    reasons += _gpus(spec, inventory)
    reasons += _mig(root_fd, spec)
    gone = [path for path in _host_paths(spec) if not _exists(root_fd, path)]
    if gone:
        reasons.append(f"{_some(gone)} is gone" if len(gone) == 1 else f"{_some(gone)} are gone")
    return reasons


def driver_version(spec: dict[str, Any]) -> str | None:
    """The driver that a file was made for: our hook's argument, else the end of a library's name."""
    for hook in _hooks(spec):
        words = hook.get("args", [])
        if "--driver" in words[:-1]:
            return str(words[words.index("--driver") + 1])
    for edits in _edits(spec):
        for mount in edits.get("mounts", []):
            name = mount["hostPath"].rpartition("/")[2]
            for start in VERSIONED:
                version = name[len(start) :]
                if name.startswith(start) and "." in version and version.replace(".", "").isdigit():
                    return str(version)
    return None


def _nodes(root_fd: int, spec: dict[str, Any], inventory: dict[str, Any]) -> list[str]:
    """Nodes that are missing, or have other numbers than the file or the kernel gives; and nvidia-uvm, if it came
    later."""
    reasons = []
    seen = set()
    majors = _majors(root_fd)
    for edits in _edits(spec):
        for node in edits.get("deviceNodes", []):
            path = node.get("hostPath") or node["path"]
            if path not in seen:
                seen.add(path)
                reasons += _node(root_fd, path, node, majors)
    uvm = next((node["host_path"] for node in inventory["nodes"] if node["role"] == "uvm"), None)
    if uvm is not None and uvm not in seen and any("libcuda.so" in path for path in _host_paths(spec)):
        reasons.append(f"{uvm} is there now, and not in it: CUDA fails")
    return reasons


def _majors(root_fd: int) -> dict[str, int]:
    """Names and majors of NVIDIA's drivers; a later line of one name does not count."""
    majors: dict[str, int] = {}
    for line in fingerprint.majors(root_fd, fingerprint.DEVICES):
        major, _, name = line.partition(" ")
        if major.isdigit():
            majors.setdefault(name, int(major))
    return majors


def _kernels(path: str, majors: dict[str, int]) -> tuple[int, int] | None:
    """The numbers that the kernel has for one of the driver's nodes, by its path in the container; None for a node that
    is not the driver's, or whose module is not loaded."""
    name = path.removeprefix("/dev/")
    for begin, owners, minor in NODES:
        rest = name.removeprefix(begin)
        if name.startswith(begin) and (not rest if minor is not None else rest.isascii() and rest.isdigit()):
            major = next((majors[owner] for owner in owners if owner in majors), None)
            return None if major is None else (major, int(rest) if minor is None else minor)
    return None


def _node(root_fd: int, path: str, node: dict[str, Any], majors: dict[str, int]) -> list[str]:
    try:
        status = root.stat(root_fd, path, follow=False)
    except OSError:
        return [f"{path} is missing"]
    if root.file_type(status.st_mode) != CHARACTER:
        return [f"{path} is no device node"]
    has = (posix.major(status.st_rdev), posix.minor(status.st_rdev))
    says = (node.get("major", 0), node.get("minor", 0))
    if says[0] and says != has:
        return [f"{path} is device {has[0]}:{has[1]}, and {says[0]}:{says[1]} in it"]
    kernels = _kernels(node["path"], majors)
    if kernels is not None and kernels != has:
        return [f"{path} is device {has[0]}:{has[1]}, the kernel says {kernels[0]}:{kernels[1]}"]
    return []


def _gpus(spec: dict[str, Any], inventory: dict[str, Any]) -> list[str]:
    """GPUs that came, went or have another node than the device of their index or UUID."""
    reasons = []
    prefix = "/dev/nvidia"
    there = {node["gpu"]: node["host_path"] for node in inventory["nodes"] if node["role"] == "gpu"}
    by_name: dict[str, str] = {}
    for gpu in inventory["gpus"]:
        node = there.get(gpu["bus_id"])
        if node is not None:
            by_name[str(gpu["index"])] = node
            by_name[str(gpu["uuid"])] = node
    known = all(gpu["uuid"] is not None for gpu in inventory["gpus"])
    for device in spec["devices"]:
        nodes = (device.get("containerEdits") or {}).get("deviceNodes", [])
        paths = [node.get("hostPath") or node["path"] for node in nodes]
        # The node's own name: a device root may be in front of the path.
        mine = [path for path in paths if path.rpartition(prefix)[2].isdigit()]
        name = device["name"]
        # IMEX channels and the gates have an `all` too.
        if name == "all" and mine:
            for gpu in inventory["gpus"]:
                node = there.get(gpu["bus_id"])
                if node is not None and node not in mine:
                    reasons.append(f"GPU {gpu['index']} ({gpu['bus_id']}) is there now, and not in `all`")
        elif len(mine) == 1 and (name.isdigit() or name.startswith("GPU-")):
            if name in by_name and by_name[name] != mine[0]:
                reasons.append(f"device {name} is {by_name[name]} now, and {mine[0]} in it")
            elif name not in by_name and (known or name.isdigit()):
                reasons.append(f"device {name} is no GPU of this host now")
    return reasons


def _mig(root_fd: int, spec: dict[str, Any]) -> list[str]:
    """Instances that came or went, where the file has any; by the minors of their capability nodes."""
    paths = {node["path"] for edits in _edits(spec) for node in edits.get("deviceNodes", [])}
    mine = {path for path in paths if path.startswith(CAPS)}
    if not mine:
        return []
    every, compute = set(), set()
    for path, _ in fingerprint.mig(root_fd, fingerprint.CAPABILITIES):
        instance = path.rpartition("/")[2]
        if instance.startswith(("gi", "ci")):
            node = _cap(root_fd, f"{path}/access")
            every.add(node)
            if instance.startswith("ci"):
                compute.add(node)
    # config and monitor belong to no instance.
    for name in ("config", "monitor"):
        every.add(_cap(root_fd, f"mig/{name}"))
    reasons = [f"the MIG layout is another one: {path} belongs to no instance now" for path in sorted(mine - every)]
    reasons += [
        f"the MIG layout is another one: the instance of {path} is not in it" for path in sorted(compute - mine)
    ]
    return reasons


def _cap(root_fd: int, path: str) -> str:
    """The node of a file in the folder of capabilities."""
    text = fingerprint.text(root_fd, f"{fingerprint.CAPABILITIES}/{path}")
    return f"{CAPS}{text.partition(CAP_LINE)[2].partition(chr(10))[0].strip()}"


def _host_paths(spec: dict[str, Any]) -> list[str]:
    """All files and folders that a start needs."""
    paths = [mount["hostPath"] for edits in _edits(spec) for mount in edits.get("mounts", [])]
    return list(dict.fromkeys([*paths, *(hook["path"] for hook in _hooks(spec))]))


def _exists(root_fd: int, path: str) -> bool:
    try:
        posix.close(root.open_path(root_fd, path))
    except OSError:
        return False
    return True


def _hidden(path: str) -> list[str]:
    """Why an ordinary user can't read a file, by the modes of it and of the folders above."""
    place = path
    status = posix.stat(place)
    if not status.st_mode & 0o004:
        return [f"ordinary users can't read it: its mode is {status.st_mode & 0o7777:04o}"]
    while place.strip("/"):
        place = place.rpartition("/")[0]
        status = posix.stat(place or "/")
        if not status.st_mode & 0o001:
            return [f"ordinary users can't read it: {place or '/'} has the mode {status.st_mode & 0o7777:04o}"]
    return []


def _some(names: list[str]) -> str:
    """The first names of a list."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)

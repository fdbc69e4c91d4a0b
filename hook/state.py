# SPDX-License-Identifier: Apache-2.0
"""What the runtime tells a hook: the container's state on stdin, and config.json in its bundle.

Hot. OCI runtime specification, "State" and "Configuration". Whoever built the image or wrote the pod chose
much of config.json, so each member that we read is checked for its type, and nothing else is read.
"""

from __future__ import annotations

import posix

from cdi import jsontext
from ldcache import kernel, root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from hook.record import Record

STATE_MAX = 1 << 20
# What containerd takes in one message, by gRPC's limit.
CONFIG_MAX = 16 << 20
# include/linux/threads.h, PID_MAX_LIMIT.
PID_LIMIT = 1 << 22

REPORT = "this is a fault of the engine or runtime that wrote it: report it there, with the file"


class Container:
    """One container, as far as nvhook needs to know it.

    `pid` is its init process in the runtime's pid namespace, 0 where there is none yet. `root_path` is
    absolute on the host. `env` has the last of equal names. `mounts`, `devices`, `device_rules` are
    config.json's lists as they stand there, `create_hooks` the arguments of its createContainer hooks, and `known`
    is False where it could not be read. `privileged` is CAP_SYS_ADMIN in the bounding set, so it holds for an
    ordinary user of a `--privileged` container too. `mount_label` is the SELinux context of file systems that are
    made for the container, "" without one.
    """

    __slots__ = (
        "annotations",
        "bundle",
        "create_hooks",
        "device_rules",
        "devices",
        "env",
        "id",
        "known",
        "masked_paths",
        "mount_label",
        "mounts",
        "namespaces",
        "pid",
        "privileged",
        "root_path",
    )

    def __init__(self, bundle: str, identity: str = "", pid: int = 0) -> None:
        self.bundle = bundle
        self.id = identity
        self.pid = pid
        self.known = True
        self.root_path = ""
        self.privileged = False
        self.mount_label = ""
        self.annotations: dict[str, str] = {}
        self.create_hooks: list[list[str]] = []
        self.env: dict[str, str] = {}
        self.mounts: list[dict[str, Any]] = []
        self.devices: list[dict[str, Any]] = []
        self.device_rules: list[dict[str, Any]] = []
        self.masked_paths: list[str] = []
        self.namespaces: set[str] = set()

    def masks_proc(self) -> bool:
        """Whether something below /proc is masked. Where nothing is (`--privileged`, `procMount: Unmasked`), a mount
        over a part of it would make the kernel refuse proc mounts in nested user namespaces."""
        return any(path.startswith("/proc/") for path in self.masked_paths)


# Where `nvhook metrics` has starts counted.
STARTS = "/run/nvhook/starts"


def start_record(host_root: str, verb: str, doing: str, identity: str, pid: int = 0) -> Record | None:
    """The record of this start. None where nobody counts: then its module is not loaded."""
    try:
        posix.stat(f"{host_root.rstrip('/')}{STARTS}", follow_symlinks=False)
    except OSError:
        return None
    from hook import record

    host = root.open_root(host_root)
    try:
        return record.Record(host, verb, doing, identity, pid)
    finally:
        posix.close(host)


def counted(host_root: str, verb: str, doing: str, container: Container, work: Callable[[Record | None], Any]) -> Any:
    """What `work` comes to; its record is ended, the error of a failure in it."""
    times = start_record(host_root, verb, doing, container.id, container.pid)
    try:
        made = work(times)
    except NvhookError as error:
        if times is not None:
            times.end(error)
        raise
    if times is not None:
        times.end()
    return made


def read_container(stdin: int = 0) -> Container:
    """The container that a hook was started for: its state from `stdin`, its config.json from the bundle."""
    return _of_state(_read_state(stdin))


def _of_state(text: bytes) -> Container:
    state = parse("the container state on stdin", text)
    bundle = state.get("bundle") or state.get("bundlePath")
    pid = state.get("pid", 0)
    if not isinstance(bundle, str) or not bundle.startswith("/") or not _names_file(bundle):
        raise NvhookError("the container state names no absolute `bundle`", REPORT)
    if type(pid) is not int or not 0 <= pid < PID_LIMIT:
        raise NvhookError(f"the container state's pid is {pid!r}", REPORT)
    container = Container(bundle, str(state.get("id", "")), pid)
    read_config(container)
    return container


def read_created(stdin: int = 0) -> Container:
    """The container of a createContainer hook, which may run where the bundle can't be read.

    Under runc a bundle that can't be read is an error: the working directory is the image then, and what it holds by
    the name config.json is the image's. crun tells the root in the state besides (its own field `root`), since
    in some user namespaces the bundle is closed to its hooks or names another folder; that root counts, and what
    config.json would tell is then seen in the namespace itself.
    """
    text = _read_state(stdin)
    place = parse("the container state on stdin", text).get("root")
    told = place.rstrip("/") if isinstance(place, str) and place.startswith("/") else ""
    try:
        container = _of_state(text)
    except NvhookError:
        if not told:
            raise
        return _of_root(told)
    return container if not told or container.root_path.rstrip("/") == told else _of_root(told)


def _of_root(root_path: str) -> Container:
    """A container of which the root is all that is known."""
    from hook import mounts

    container = Container("")
    container.root_path = root_path
    container.known = False
    try:
        container.mounts = [{"destination": place} for place in mounts.read(root_path).inside()]
    except OSError as error:
        raise NvhookError(f"cannot read {mounts.TABLE}: {error.strerror}", REPORT) from error
    if mounts.is_separate():
        container.namespaces.add("mount")
    return container


def _read_state(stdin: int) -> bytes:
    try:
        return root.read(stdin, STATE_MAX, "stdin")
    except OSError as error:
        raise NvhookError(f"cannot read the container state from stdin: {error.strerror}", REPORT) from error


def bundle_container(bundle: str) -> Container:
    """The container that a bundle describes, before anything runs."""
    container = Container(_absolute(bundle, posix.getcwd()))
    read_config(container)
    return container


def read_config(container: Container) -> None:
    """Fill in what config.json says. Raises NvhookError."""
    path = f"{container.bundle}/config.json"
    fill(container, path, parse(path, _read_config(path)))


def fill(container: Container, path: str, spec: dict[str, Any]) -> None:
    """Fill in what a configuration says; `path` names it in errors. Raises NvhookError."""
    base = _member(path, spec, "root", dict)
    root_path = base.get("path")
    if root_path in (None, ""):
        raise NvhookError(f"{path}: root.path is missing", "write `root.path` as the runtime specification asks")
    if not isinstance(root_path, str) or not _names_file(root_path):
        raise NvhookError(f"{path}: root.path is {root_path!a:.200}, which names no file", REPORT)
    container.root_path = _absolute(root_path, container.bundle)
    process = _member(path, spec, "process", dict)
    container.env = _environment(path, _member(path, process, "env", list))
    container.privileged = "CAP_SYS_ADMIN" in _bounding_set(path, spec, process)
    annotations = _member(path, spec, "annotations", dict)
    container.annotations = {name: value for name, value in annotations.items() if isinstance(value, str)}
    hooks = _objects(path, _member(path, spec, "hooks", dict), "createContainer")
    container.create_hooks = [[str(word) for word in _member(path, entry, "args", list)] for entry in hooks]
    linux = _member(path, spec, "linux", dict)
    resources = _member(path, linux, "resources", dict)
    container.mounts = _objects(path, spec, "mounts")
    container.devices = _objects(path, linux, "devices")
    container.device_rules = _objects(path, resources, "devices")
    container.mount_label = _member(path, linux, "mountLabel", str)
    container.namespaces = {str(entry.get("type")) for entry in _objects(path, linux, "namespaces")}
    container.masked_paths = [item for item in _member(path, linux, "maskedPaths", list) if isinstance(item, str)]


def _read_config(path: str) -> bytes:
    try:
        fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC | posix.O_NONBLOCK | posix.O_NOCTTY)
    except OSError as error:
        remedy = "give the bundle's folder, the one that holds config.json"
        raise NvhookError(f"cannot open {path}: {error.strerror}", remedy) from error
    try:
        return read_text(fd, path)
    finally:
        posix.close(fd)


def read_text(fd: int, path: str) -> bytes:
    """The text of the configuration that `fd` is open on. Raises NvhookError."""
    try:
        if root.file_type(posix.fstat(fd).st_mode) != root.S_IFREG:
            raise NvhookError(f"{path} is no regular file", REPORT)
        return root.read(fd, CONFIG_MAX, path)
    except OSError as error:
        remedy = f"nvhook reads configurations of up to {CONFIG_MAX >> 20} MiB"
        raise NvhookError(f"cannot read {path}: {error.strerror}", remedy) from error


def parse(name: str, text: bytes) -> dict[str, Any]:
    """A JSON object. Raises NvhookError naming the document, also where an object in it has a key twice: the runtime's
    parser would merge the two, and see another container than we do."""
    try:
        value = jsontext.loads(text, _unique)
    except jsontext.InvalidJson as error:
        raise NvhookError(f"{name} is no JSON: {error}", REPORT) from error
    if not isinstance(value, dict):
        raise NvhookError(f"{name} is a JSON {type(value).__name__}, not an object", REPORT)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        # A dict's keys keep the order of their first coming.
        twice = next(name for (name, _), first in zip(pairs, [*made, None], strict=False) if name != first)
        raise ValueError(f"the key {twice!a:.200} is there twice in one object")
    return made


def _names_file(path: str) -> bool:
    """Whether it can reach the kernel whole: no NUL, no lone surrogate out of JSON."""
    try:
        return "\0" not in path and bool(kernel.encode(path))
    except OSError:
        return False


def _member(path: str, parent: dict[str, Any], name: str, kind: type) -> Any:
    # null and absent are the same to the runtimes: Go's decoder leaves the field empty for both.
    value = parent.get(name)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise NvhookError(f"{path}: `{name}` is a {type(value).__name__}, not a {kind.__name__}", REPORT)
    return value


def _bounding_set(path: str, spec: dict[str, Any], process: dict[str, Any]) -> list[Any]:
    if _is_flat(str(spec.get("ociVersion"))):
        flat: list[Any] = _member(path, process, "capabilities", list)
        return flat
    bounding: list[Any] = _member(path, _member(path, process, "capabilities", dict), "bounding", list)
    return bounding


def _is_flat(version: str) -> bool:
    """Whether that version of the runtime specification has one list of capabilities for all sets: 1.0.0-rc1 to
    -rc4. Pre-release names are compared as text, as semantic versions ask."""
    core, hyphen, name = version.partition("+")[0].partition("-")
    return core == "1.0.0" and bool(hyphen) and "rc1" <= name.partition(".")[0] < "rc5"


def _objects(path: str, parent: dict[str, Any], name: str) -> list[dict[str, Any]]:
    values: list[dict[str, Any]] = _member(path, parent, name, list)
    for value in values:
        if not isinstance(value, dict):
            raise NvhookError(f"{path}: `{name}` holds a {type(value).__name__}, not an object", REPORT)
    return values


def _environment(path: str, values: list[Any]) -> dict[str, str]:
    env = {}
    for value in values:
        if not isinstance(value, str):
            raise NvhookError(f"{path}: process.env holds a {type(value).__name__}, not a string", REPORT)
        name, equals, text = value.partition("=")
        if equals:
            env[name] = text
    return env


def _absolute(path: str, base: str) -> str:
    return path if path.startswith("/") else f"{base.rstrip('/')}/{path}"

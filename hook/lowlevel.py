# SPDX-License-Identifier: Apache-2.0
"""The low-level runtime that the shim becomes: which one, and how its caller's environment and signals reach it.

Hot. The launcher starts Python in an environment of its own and leaves the caller's in an anonymous file: the
runtime needs it (LISTEN_FDS, NOTIFY_SOCKET, XDG_RUNTIME_DIR, what an engine passes to itself). Descriptors and the
working directory are inherited as they are.
"""

from __future__ import annotations

import posix
import sys

from cdi.host import settings, store
from ldcache import root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Where a bare name is looked for: the environment's PATH is an engine's, or an image builder's.
FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
ENVIRONMENT_MAX = 16 << 20
PATH_MAX = 4096
# signal(7) on every architecture that is served; what Python ignores from its start on.
SIGPIPE = 13
SIGXFSZ = 25
KEY = "runtime.runtimes"


class Caller:
    """What was taken over of whoever called: the environment, and the signals that Python made ignored, but not he."""

    __slots__ = ("environment", "signals", "umask")

    def __init__(self, environment: dict[bytes, bytes], signals: list[int]) -> None:
        self.environment = environment
        self.signals = signals
        self.umask = posix.umask(0)
        posix.umask(self.umask)


def receive(word: str) -> Caller:
    """The caller of `DESCRIPTOR:SIGNALS`, as packaging/launcher.c hands it over. The descriptor is closed."""
    number, _, ignored = word.partition(":")
    fd, bits = int(number), int(ignored)
    posix.lseek(fd, 0, 0)
    text = root.read_open(fd, ENVIRONMENT_MAX, "the environment")
    environment: dict[bytes, bytes] = {}
    for entry in text.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        # Of two with one name libc and Go take the first.
        if equals and name:
            environment.setdefault(name, value)
    return Caller(environment, [number for bit, number in enumerate((SIGPIPE, SIGXFSZ)) if not bits >> bit & 1])


def become(path: str, words: list[str], caller: Caller) -> None:
    """Execute the runtime in the place of this process. Raises NvhookError."""
    # `signal` makes enumerations of it (4 ms).
    import _signal  # type: ignore[import-not-found]

    for number in caller.signals:
        _signal.signal(number, _signal.SIG_DFL)
    posix.umask(caller.umask)
    try:
        posix.execve(path, [path, *words], caller.environment)
    except OSError as error:
        what = f"cannot start the low-level runtime {path}: {error.strerror}"
        raise NvhookError(what, f"install it, or let {KEY} of {settings.OURS} name another") from error


def kept(host: int, name: str) -> str:
    """The path that stands in `/run/nvhook/runtime.NAME`; "" where there is none, or none to be trusted."""
    flags = posix.O_RDONLY | posix.O_NOFOLLOW | posix.O_NONBLOCK | posix.O_CLOEXEC
    try:
        folder = root.open_path(host, store.FOLDER)
        try:
            fd = posix.open(f"runtime.{name}", flags, dir_fd=folder)
        finally:
            posix.close(folder)
    except OSError:
        return ""
    status = posix.fstat(fd)
    sound = root.file_type(status.st_mode) == root.S_IFREG and status.st_uid in (0, posix.geteuid())
    if not sound or status.st_mode & 0o022:
        posix.close(fd)
        return ""
    text = posix.read(fd, PATH_MAX).decode("utf-8", "surrogateescape")
    posix.close(fd)
    path, newline, rest = text.partition("\n")
    return path if path.startswith("/") and newline and not rest and _is_runtime(path) else ""


def keep(host: int, host_root: str, name: str, path: str) -> None:
    """Write down the choice, for the launcher. Where it can't be written, the next call decides anew."""
    try:
        folder = store.make_folder(host, host_root)
    except (NvhookError, OSError):
        return
    try:
        store.write_own(folder, f"runtime.{name}", f"{path}\n".encode("utf-8", "surrogateescape"))
    except OSError:
        pass
    finally:
        posix.close(folder)


def find(names: list[str]) -> str:
    """The first of these, paths or bare names, that can be executed and is not nvhook itself. Raises NvhookError."""
    for name in names:
        for path in [name] if "/" in name else [f"{folder}/{name}" for folder in FOLDERS]:
            if path.startswith("/") and _is_runtime(path):
                return path
    what = f"no low-level runtime: none of {', '.join(names) or 'nothing'} can be executed"
    raise NvhookError(what, f"install runc or crun, or let {KEY} of {settings.OURS} name one by its path")


def launcher() -> str:
    """The installed launcher, beside the entry script that it starts."""
    return f"{sys.argv[0].rpartition('/')[0]}/launch"


def _is_runtime(path: str) -> bool:
    try:
        found = posix.stat(path)
    except OSError:
        return False
    if root.file_type(found.st_mode) != root.S_IFREG or not posix.access(path, posix.X_OK, effective_ids=True):
        return False
    try:
        own = posix.stat(launcher())
    except OSError:
        return True
    # By any name: the shim would start itself, for ever.
    return (own.st_dev, own.st_ino) != (found.st_dev, found.st_ino)


def choose(host: int, host_root: str, name: str, configured: dict[str, Any] | None = None) -> str:
    """The runtime for the shim of that name. `configured` is what the configuration file sets, where it is known
    already. The configuration decides where it names runtimes; else what was chosen before, by `nvhook configure` or
    an earlier call; else runc or crun. Raises NvhookError."""
    before = kept(host, name)
    if configured is None:
        if before:
            return before
        from hook import child

        configured = child.configuration(host, host_root)
    if before and KEY not in configured:
        return before
    names: list[str] = configured.get(KEY, settings.DEFAULTS[KEY])
    path = find(names)
    if path != before:
        keep(host, host_root, name, path)
    return path

# SPDX-License-Identifier: Apache-2.0
"""The record of a start, out of which `nvhook metrics` makes its counters.

Hot. One line of JSON, appended by one write(2) to `/run/nvhook/starts`. `nvhook metrics` makes that file; where it does
not exist nobody counts, and a start does not load this (`state.start_record`). What goes wrong here never ends a start.
"""

from __future__ import annotations

import posix
import time

from cdi import jsontext
from hook.state import STARTS
from ldcache import root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ldcache.errors import NvhookError

# Where nobody comes to read, the file does not grow for ever.
SIZE_MAX = 1 << 20
NAMES_MAX = 64
NAME_MAX = 128
# clock_gettime(2): the clock of a process's start time in /proc/PID/stat.
CLOCK_BOOTTIME = 7


class Record:
    """What a start did and how long each part took. `gpus` is None while the container is not known to ask for any:
    minor numbers of GPUs, and names of what has none. `place` is a path that goes away with the container; where a
    process of it is known, `pid` tells more."""

    __slots__ = ("_doing", "_fd", "_since", "_steps", "gpus", "identity", "pid", "place", "verb")

    def __init__(self, host: int, verb: str, doing: str, identity: str, pid: int = 0) -> None:
        self.verb = verb
        self.identity = identity
        self.pid = pid
        self.place = ""
        self.gpus: list[str] | None = None
        self._steps: dict[str, list[float]] = {}
        self._doing = doing
        self._fd = _open(host)
        self._since = time.monotonic()

    def at(self, doing: str) -> None:
        """What comes next: its time begins, and a failure from here on is counted under its name."""
        if self._fd < 0:
            return
        now = time.monotonic()
        times = self._steps.setdefault(self._doing, [0, 0.0])
        times[0] += 1
        times[1] += now - self._since
        self._doing = doing
        self._since = now

    def use(self, gpus: list[dict[str, Any]], others: list[str]) -> None:
        """What the container gets: GPUs of the inventory, and names of what is none."""
        self.gpus = [str(gpu["minor"]) for gpu in gpus] + others

    def end(self, error: NvhookError | None = None) -> None:
        """Write the line. A start that went well without a GPU is none that counts."""
        if self._fd < 0:
            return
        if error is not None or self.gpus is not None:
            failed = (error.reason or self._doing) if error is not None else ""
            self.at("")
            try:
                posix.write(self._fd, f"\n{self._line(failed)}\n".encode("utf-8", "backslashreplace"))
            except OSError:
                pass
        posix.close(self._fd)
        self._fd = -1

    def _line(self, failed: str) -> str:
        value = {
            "verb": self.verb,
            "id": self.identity[:NAME_MAX],
            "failed": failed,
            "gpus": [name[:NAME_MAX] for name in (self.gpus or ())[:NAMES_MAX]],
            "pid": self.pid,
            "place": self.place[:4096],
            "at": time.clock_gettime(CLOCK_BOOTTIME),
            "ms": {name: [times[0], round(times[1] * 1000, 3)] for name, times in self._steps.items()},
        }
        return jsontext.dumps(value)


def _open(host: int) -> int:
    """The file, -1 where there is none, or none that only who we are can have made."""
    flags = posix.O_WRONLY | posix.O_APPEND | posix.O_NOFOLLOW | posix.O_NONBLOCK | posix.O_CLOEXEC | posix.O_NOCTTY
    try:
        place, name = root.split(STARTS)
        folder = root.open_path(host, place)
        try:
            fd = posix.open(name, flags, dir_fd=folder)
        finally:
            posix.close(folder)
    except OSError:
        return -1
    status = posix.fstat(fd)
    own = root.file_type(status.st_mode) == root.S_IFREG and status.st_uid == posix.geteuid()
    if own and not status.st_mode & 0o022 and status.st_size < SIZE_MAX:
        return fd
    posix.close(fd)
    return -1

# SPDX-License-Identifier: Apache-2.0
"""The log of a start: what was asked for, what was decided and why, each step with its time.

Hot, but imported only where the configuration names a file, or `--debug` stands on the command line. A line
(`cdi.logline`) is written by one write(2), so that lines of starts at the same time stay whole.
What goes wrong with the log itself never ends a start.
"""

from __future__ import annotations

import errno
import posix
import time

from cdi import logline
from ldcache import kernel, root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hook.injection import Judged
    from hook.plan import Plan
    from hook.request import Decision
    from hook.requirements import Compatibility
    from hook.selection import Selection
    from ldcache.errors import NvhookError

STDERR = 2
MODE = 0o640


class Log:
    """Lines for a file, stderr, or both, each with the level up to which it takes them."""

    __slots__ = ("_container", "_sinks", "_started", "_verb")

    def __init__(self, verb: str, container: str) -> None:
        self._verb = verb
        self._container = container
        self._sinks: list[tuple[int, int]] = []
        self._started = time.monotonic()

    def add(self, fd: int, level: str) -> None:
        """Write lines of this level and more serious ones there."""
        self._sinks.append((fd, logline.LEVELS[level]))

    def line(self, level: str, text: str) -> None:
        """One line, which nobody may be able to take: a full disk is no reason to stop."""
        number = logline.LEVELS[level]
        if all(number > most for _, most in self._sinks):
            return
        line = logline.line(level, self._verb, self._container, text)
        for fd, most in self._sinks:
            if number <= most:
                try:
                    posix.write(fd, line)
                except OSError:
                    pass

    def since(self, begin: float) -> str:
        """The time since then, in words."""
        return f"{(time.monotonic() - begin) * 1000:.2f} ms"

    def step(self, text: str, begin: float) -> None:
        """A step that is done, or failed, and the time it took."""
        self.line("debug", f"{text}: {self.since(begin)}")

    def end(self, text: str) -> None:
        """The line of a start that went well."""
        self.line("info", f"{text}; {self.since(self._started)}")

    def decision(self, decision: Decision) -> None:
        """Each source of the request that was seen, and what became of it."""
        self.line("debug", f"configuration: {decision.configuration or 'none'}")
        kinds = [name for name in ("privileged", "legacy_image") if getattr(decision, name)]
        self.line("debug", f"container: {', '.join(kinds).replace('_', ' ') or 'unprivileged'}")
        for source in decision.sources:
            verdict = "used" if source["used"] else "not used"
            text = f"{source['source']} {source['name']}={source['value'][:1000]}: {verdict}: {source['reason']}"
            self.line("debug", text)

    def error(self, error: NvhookError) -> None:
        """The line of a start that failed."""
        self.line("error", f"{error.what}; remedy: {error.remedy}")

    def warn(self, warnings: list[str]) -> None:
        """A line for each warning."""
        for warning in warnings:
            self.line("warning", warning)

    def judged(self, judged: Judged, plan: Plan, fit: Compatibility | None) -> None:
        """What the request comes to on this host and with this image."""
        self.left_out(judged.inventory, judged.selection)
        if fit is not None:
            cuda = f"image's CUDA {fit.image_cuda}, driver's {fit.driver_cuda}: {fit.kind}"
            self.line("debug", f"compatibility: {cuda}")
        if plan.compat_reason:
            self.line("debug", f"forward compatibility: {plan.compat_reason}")

    def left_out(self, inventory: dict[str, Any], selection: Selection) -> None:
        """Libraries that the host has and the container does not get for its capabilities alone."""
        chosen = {item["path"] for item in selection.libraries}
        missing: dict[str, list[str]] = {}
        for item in inventory["libraries"]:
            if item["path"] not in chosen:
                kind = f"{item['capability']}{', 32-bit' if item['class'] == 32 else ''}"
                missing.setdefault(kind, []).append(item["name"])
        for kind, names in missing.items():
            self.line("debug", f"left out for want of a capability ({kind}): {', '.join(names)}")


def begin(verb: str, container: str, host: int, configured: dict[str, Any], debug: bool) -> tuple[Log, list[str]]:
    """The log that the configuration names, and with `debug` stderr; and warnings, for it stops no start."""
    made = Log(verb, container)
    if debug:
        made.add(STDERR, "debug")
    file = configured["log.file"]
    try:
        if file:
            made.add(open_file(host, file), configured["log.level"])
    except OSError as error:
        return made, [f"cannot open the log {file}: {error.strerror}"]
    return made, []


def open_file(host: int, path: str) -> int:
    """The log's file on the host, made where missing. Raises OSError, EPERM for a place where others than root, or
    than who we are, could have put something else."""
    place, name = root.split(path)
    own = (0, posix.geteuid())
    folder = root.open_path(host, place)
    try:
        status = posix.fstat(folder)
        if status.st_uid not in own or status.st_mode & 0o002:
            raise kernel.error("others may write in its folder", errno.EPERM)
        flags = posix.O_WRONLY | posix.O_APPEND | posix.O_CREAT | posix.O_NOFOLLOW
        flags |= posix.O_CLOEXEC | posix.O_NONBLOCK | posix.O_NOCTTY
        fd = posix.open(name, flags, MODE, dir_fd=folder)
    finally:
        posix.close(folder)
    status = posix.fstat(fd)
    if root.file_type(status.st_mode) != root.S_IFREG or status.st_uid not in own or status.st_nlink != 1:
        posix.close(fd)
        raise kernel.error("it is no plain file of root's", errno.EPERM)
    return fd

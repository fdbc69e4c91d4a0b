# SPDX-License-Identifier: Apache-2.0
"""`cdi watch`: a daemon that keeps the CDI file of this host fresh.

Cold. It sleeps until the kernel tells of a module, a GPU, a node or a file, and every ten seconds looks at what changes
without an event. Then, once it has been quiet for a moment, `cdi.refresh` decides. What fails is tried again, less and
less often, so that it may be started at boot before there is any driver.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import time
from pathlib import Path

from cdi import events, logline
from cdi.host import inventory, store
from cdi.refresh import Refresh, clean, default_output
from ldcache.errors import NvhookError

# An installer makes hundreds of files: a look waits until it is quiet, but not longer than this.
QUIET_MAX = 10.0
RETRY_FIRST = 1.0
RETRY_MAX = 60.0


class Clock:
    """When to look next: `due` is the moment for a look that something asked for, None while nothing did."""

    def __init__(self, interval: float, quiet: float) -> None:
        self.interval = interval
        self.quiet = quiet
        self.retry = RETRY_FIRST
        self.asked: float | None = None
        self.due: float | None = None
        self.tick = time.monotonic() + interval

    def ask(self, now: float) -> None:
        """Something happened; wait until it is over."""
        self.asked = now if self.asked is None else self.asked
        self.due = min(now + self.quiet, self.asked + QUIET_MAX)

    def done(self, now: float, right: bool) -> None:
        """A look was taken. One that was not `right` is taken again after a pause, each twice as long."""
        self.asked = None
        self.due = None if right else now + self.retry
        self.retry = RETRY_FIRST if right else min(2 * self.retry, RETRY_MAX)

    def wait(self, now: float) -> float:
        """Seconds until there is something to do."""
        return max(0.0, min(self.tick, self.tick if self.due is None else self.due) - now)


class Watch:
    """The daemon. Raises NvhookError where it can't even begin."""

    def __init__(self, refresh: Refresh, interval: float, quiet: float) -> None:
        self.refresh = refresh
        self.clock = Clock(interval, quiet)
        self.stop = False
        self.folders = events.Folders()
        try:
            self.uevents: events.Uevents | None = events.Uevents()
        except OSError as error:
            say("warning", f"no kernel events: {error.strerror}; a look every {interval:g} s has to do")
            self.uevents = None
        # A signal ends poll by way of this pipe.
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._woken)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(self, "stop", True))
        signal.signal(signal.SIGHUP, lambda *_: self.clock.ask(time.monotonic()))

    def run(self) -> None:
        """Until SIGTERM. SIGHUP asks for a look."""
        poller = select.poll()
        poller.register(self.folders, select.POLLIN)
        if self.uevents is not None:
            poller.register(self.uevents, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        self.look()
        events.tell_systemd("READY=1")
        while not self.stop:
            ready = {fd for fd, _ in poller.poll(1000 * self.clock.wait(time.monotonic()))}
            self.hear(ready)
            now = time.monotonic()
            if now >= self.clock.tick:
                self.clock.tick = now + self.clock.interval
                if self.clock.due is None and self.refresh.reason(silent_only=True) is not None:
                    self.clock.ask(now)
            if self.clock.due is not None and now >= self.clock.due:
                self.look()
        events.tell_systemd("STOPPING=1")

    def hear(self, ready: set[int]) -> None:
        """Read what came, and ask for a look where it may matter."""
        if self._wake in ready:
            os.read(self._wake, 4096)
        if self.uevents is not None and self.uevents.fileno() in ready and self.uevents.read():
            self.clock.ask(time.monotonic())
        if self.folders.fileno() in ready:
            own = f".{self.refresh.output.name}."
            if any(not name.startswith(own) for name in self.folders.read()) and self.refresh.reason() is not None:
                self.clock.ask(time.monotonic())

    def look(self) -> None:
        """Make the file fresh, if it is not."""
        reason = self.refresh.reason()
        self.refresh.say("debug", f"a look: {reason or 'nothing has changed'}")
        right = reason is None or self.refresh.run()
        # One that has to be tried again because nothing can be kept in /run is right as far as it goes.
        self.clock.done(time.monotonic(), right and self.refresh.kept() is not None)
        self.folders.watch(self.refresh.folders())
        # What changed before a folder was watched sends no event.
        if right and self.refresh.reason() is not None:
            self.clock.ask(time.monotonic())
        events.tell_systemd(f"STATUS={self.refresh.output}: {'fresh' if right else 'waiting, see the log'}")


def say(level: str, line: str) -> None:
    """A line of the log."""
    try:
        os.write(2, logline.line(level, "watch", "", line, "JOURNAL_STREAM" in os.environ))
    except OSError:
        # Nobody can read it.
        pass


def say_little(level: str, line: str) -> None:
    """The same without --debug."""
    if level != "debug":
        say(level, line)


def run(arguments: argparse.Namespace, words: list[str]) -> int:
    """`cdi watch`. `words` are the options of `cdi generate` among its arguments. Raises NvhookError."""
    options = inventory.options_of(arguments)
    output: Path = arguments.output or default_output(options.host_root)
    refresh = Refresh(output, words, options, say if arguments.debug else say_little)
    try:
        lock = events.lock(lock_folder(refresh), "watch.lock")
        try:
            clean(output)
            if arguments.once:
                return 0 if refresh.reason() is None or refresh.run() else 3
            Watch(refresh, arguments.interval, arguments.quiet).run()
            return 0
        finally:
            os.close(lock)
    finally:
        refresh.close()


def lock_folder(refresh: Refresh) -> Path:
    """Where the inventory is kept. Raises NvhookError."""
    folder = store.make_folder(refresh.root_fd, refresh.options.host_root)
    try:
        return Path(os.readlink(f"/proc/self/fd/{folder}"))
    except OSError as error:
        raise NvhookError(f"cannot find {store.FOLDER}: {error.strerror}", "mount /proc") from error
    finally:
        os.close(folder)

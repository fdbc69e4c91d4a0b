# SPDX-License-Identifier: Apache-2.0
"""The end of a cold command whose reader has seen enough, as with `| head`.

Python ignores SIGPIPE from its start, and children and low-level runtimes must not inherit that changed, so what comes
is EPIPE on any write.
"""

from __future__ import annotations

import posix
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def until_closed(run: Callable[[], int]) -> int:
    """The exit status of `run`; 1, and not a word, where stdout or stderr is a pipe that nobody reads any more."""
    try:
        try:
            return run()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        closed = [fd for fd in (1, 2) if _unread(fd)]
        if not closed:
            # Some other pipe, and somebody has to know.
            raise
        # Python flushes once more when it ends, and would complain.
        null = posix.open("/dev/null", posix.O_WRONLY | posix.O_CLOEXEC)
        for fd in closed:
            posix.dup2(null, fd)
        posix.close(null)
        return 1


def _unread(fd: int) -> bool:
    """Whether a descriptor is the writing end of a pipe without a reader: poll(2) has POLLERR for it."""
    import select

    asked = select.poll()
    asked.register(fd, 0)
    return any(found & select.POLLERR for _, found in asked.poll(0))

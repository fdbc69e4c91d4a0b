# SPDX-License-Identifier: Apache-2.0
"""Where the launcher's entry script begins: one verb, one import.

Hot. The verb is argv[1]; an import costs more than all the rest of a start, so each is made only for its verb.
"""

from __future__ import annotations

import posix
import sys

from ldcache.errors import NvhookError


def main() -> None:
    """Run the verb and leave by _exit, past the interpreter's clean-up (1 ms)."""
    try:
        status = dispatch(sys.argv[1:])
    except NvhookError as error:
        say(f"nvhook: error: {error.what}\n  remedy: {error.remedy}\n")
        status = 1
    for stream in (sys.stdout, sys.stderr):
        # None where the descriptor was closed before the interpreter started.
        if stream is not None:
            stream.flush()
    posix._exit(status)


def say(text: str) -> None:
    """Write on stderr, if there is one."""
    if sys.stderr is not None:
        sys.stderr.write(text)


def dispatch(argv: list[str]) -> int:
    """The exit status of one verb: 0 done, 1 failed, 2 usage, 3 stale or unhealthy."""
    verb = argv[0] if argv else ""
    if verb == "prestart":
        from hook import prestart

        return prestart.main(argv[1:])
    if verb == "create-container":
        from hook import create_container

        return create_container.main(argv[1:])
    if verb in ("poststart", "poststop"):
        return 0
    say(f"nvhook: error: {verb!a} is no hook\n  remedy: use prestart or create-container\n")
    return 2

# SPDX-License-Identifier: Apache-2.0
"""Where the launcher's entry script begins: one verb, one import.

Hot. The verb is argv[1]; an import costs more than all the rest of a start, so each is made only for its verb.
"""

from __future__ import annotations

import gc
import posix
import sys

from ldcache.errors import NvhookError


def main() -> None:
    """Run the verb and leave by _exit, past the interpreter's clean-up (1 ms)."""
    # A process of milliseconds, whose inputs are bounded: the collector would only walk what is all in use (0.7 ms).
    gc.disable()
    try:
        status = dispatch(sys.argv[1:])
    except NvhookError as error:
        say(f"nvhook: error: {one_line(error.what)}\n  remedy: {one_line(error.remedy)}\n")
        status = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            pass
    posix._exit(status)


def open_streams() -> None:
    """Python has None for a stream whose descriptor was closed before it started."""
    if sys.stdout is None:
        sys.stdout = open("/dev/null", "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open("/dev/null", "w", encoding="utf-8")


def say(text: str) -> None:
    """Write on stderr. Where nobody can read it, a full disk or a closed pipe, the exit status has to do."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        pass


def one_line(text: str) -> str:
    """A message in which an image's names may stand: a newline in one would forge a line of ours in an engine's log, an
    escape sequence do as it likes on a terminal."""
    if text.isprintable():
        return text
    return "".join([letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text])


def dispatch(argv: list[str]) -> int:
    """The exit status of one verb: 0 done, 1 failed, 2 usage, 3 stale or unhealthy."""
    open_streams()
    verb = argv[0] if argv else ""
    if verb == "runtime":
        from hook import runtime

        return runtime.main(argv[1:])
    if verb == "prestart":
        from hook import prestart

        return prestart.main(argv[1:])
    if verb == "create-container":
        from hook import create_container

        return create_container.main(argv[1:])
    if verb == "nvidia-cdi-hook" or argv[:2] == ["nvidia-ctk", "hook"]:
        from hook import cdihook

        return cdihook.main(argv[1:] if verb == "nvidia-cdi-hook" else argv[2:])
    if verb in ("nvidia-container-runtime-hook", "nvidia-container-toolkit"):
        from hook import runtimehook

        return runtimehook.main(argv[1:])
    if verb in ("poststart", "poststop"):
        return 0
    say(f"nvhook: error: {verb!a} is no hook\n  remedy: use prestart or create-container\n")
    return 2

# SPDX-License-Identifier: Apache-2.0
"""The form of a line of a log, the same for hooks, runtime and daemon: `TIME LEVEL nvhook[VERB] CONTAINER: TEXT`.

Hot, but only where something is logged. For the journal, which has time and level of its own, they are left out and the
level's number stands in front, by which it knows it (sd-daemon(3)).
"""

from __future__ import annotations

import time

LEVELS = {"error": 0, "warning": 1, "info": 2, "debug": 3}
# Those of syslog(3).
NUMBERS = {"error": 3, "warning": 4, "info": 6, "debug": 7}
# Of one line: an environment may be long.
TEXT_MAX = 8000
NAME_MAX = 128


def line(level: str, verb: str, container: str, text: str, journal: bool = False) -> bytes:
    """One line with its end. `container` is "" where it is about none."""
    said = f"nvhook[{verb}] {printable(container[:NAME_MAX]) or '-'}: {printable(text[:TEXT_MAX])}\n"
    if journal:
        return f"<{NUMBERS[level]}>{said}".encode("utf-8", "backslashreplace")
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
    return f"{stamp}.{int(now * 1000) % 1000:03d}Z {level} {said}".encode("utf-8", "backslashreplace")


def printable(text: str) -> str:
    """The text on one line: what a container chose must not look like a line of its own, or move a cursor."""
    if text.isprintable():
        return text
    return "".join([sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text])

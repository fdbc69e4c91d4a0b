# SPDX-License-Identifier: Apache-2.0
"""A program of Python's that is killed just before one of its calls into the kernel. A script, started by path.

Arguments: the number of the call, 0 for none; a file that gets the number of all calls, if it comes to its end; then
what `python` would take: `-c`, the program, its arguments. What counts is each call of a function of `posix`, `fcntl`
or our syscall module, so that nothing the program does to the machine lies between two places where it may die.
"""

from __future__ import annotations

import os
import posix
import signal
import sys
from types import FrameType
from typing import Any

MODULES = ("posix", "fcntl", "ldcache._sys.lib")


def main() -> None:
    """Run the program."""
    place, report, option, text = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    assert option == "-c"
    count = 0

    def look(frame: FrameType, event: str, function: Any) -> None:
        nonlocal count
        if event != "c_call" or getattr(function, "__module__", None) not in MODULES:
            return
        count += 1
        if count == place:
            os.kill(os.getpid(), signal.SIGKILL)
        if function is posix._exit:
            tell()

    def tell() -> None:
        sys.setprofile(None)
        with open(report, "w", encoding="ascii") as file:
            file.write(str(count))

    sys.argv[:] = ["-c", *sys.argv[5:]]
    program = compile(text, "program", "exec")
    sys.setprofile(look)
    try:
        exec(program, {"__name__": "__main__"})
    finally:
        tell()


if __name__ == "__main__":
    main()

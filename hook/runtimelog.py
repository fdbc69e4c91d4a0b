# SPDX-License-Identifier: Apache-2.0
"""What the shim has to say, in the form and the place where engines look for a runtime's words.

Hot, but silent on a good start. containerd, docker and podman read the last error out of the file that they name by
`--log`, a line of JSON each or logrus's text; crun takes `file:PATH` too, and `journald:` and `syslog:`, which are
left alone.
"""

from __future__ import annotations

import posix
import time

from cdi import jsontext
from hook.start import one_line, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hook.arguments import Arguments


def write(arguments: Arguments, level: str, text: str) -> bool:
    """One entry in the caller's log; whether it has one."""
    path = (arguments.log or "").removeprefix("file:")
    if not path or path.startswith(("journald:", "syslog:")):
        return False
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if arguments.log_format == "json":
        line = jsontext.dumps({"level": level, "msg": text, "time": now})
    else:
        line = f'time="{now}" level={level} msg={jsontext.dumps(text)}'
    flags = posix.O_WRONLY | posix.O_CREAT | posix.O_APPEND | posix.O_CLOEXEC | posix.O_NONBLOCK | posix.O_NOCTTY
    try:
        fd = posix.open(path, flags, 0o644)
        try:
            posix.write(fd, f"{line}\n".encode())
        finally:
            posix.close(fd)
    except OSError:
        return False
    return True


def warn(arguments: Arguments, text: str) -> None:
    """A warning: in the log, or, where there is none, on stderr."""
    if not write(arguments, "warning", f"nvhook: {text}"):
        say(f"nvhook: warning: {one_line(text)}\n")

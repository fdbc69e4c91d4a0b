# SPDX-License-Identifier: Apache-2.0
"""Questions that only cold code can answer, put to a child: the configuration, and CDI files in YAML.

Hot, but needed where nothing else knows: once per boot for the runtime's name, and where CDI files are no plain
JSON. The child runs `cdi.answers`, with a deadline.
"""

from __future__ import annotations

import posix
import sys
import time

from cdi import jsontext
from cdi.host import settings
from ldcache import root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DEADLINE = 30.0
ANSWER_MAX = 16 << 20
# Its sys.path comes as an argument, for -S leaves it none.
PROGRAM = "import sys; sys.path[:0] = sys.argv.pop(1).split('\\n'); from cdi.answers import main; sys.exit(main())"
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


def configuration(host: int, host_root: str) -> dict[str, Any]:
    """What the configuration file in force sets; nothing where there is none. Raises NvhookError."""
    if not any(root.exists(host, path) for path in (settings.OURS, settings.NVIDIAS)):
        return {}
    values: dict[str, Any] = ask(["configuration", host_root])
    return values


def ask(words: list[str], deadline: float = DEADLINE) -> Any:
    """The child's answer, a JSON value. Raises NvhookError: its own, or that it gave none."""
    places = "\n".join(folder for folder in sys.path if folder.startswith("/"))
    command = [sys.executable, "-I", "-S", "-B", "-c", PROGRAM, places, *words]
    reading, writing = posix.pipe2(posix.O_CLOEXEC)
    null = posix.open("/dev/null", posix.O_RDWR | posix.O_CLOEXEC)
    copies = [(posix.POSIX_SPAWN_DUP2, null, 0), (posix.POSIX_SPAWN_DUP2, writing, 1)]
    try:
        copies.append((posix.POSIX_SPAWN_DUP2, null, 2))
        pid = posix.posix_spawn(command[0], command, ENVIRONMENT, file_actions=copies, setpgroup=0)
    except OSError as error:
        posix.close(reading)
        raise NvhookError(f"cannot start {command[0]}: {error.strerror}", "install nvhook again") from error
    finally:
        posix.close(writing)
        posix.close(null)
    try:
        text = _read(reading, pid, time.monotonic() + deadline)
    finally:
        posix.close(reading)
        _reap(pid)
    try:
        answer = jsontext.loads(text)
        refused = answer.get("error")
        if refused is not None:
            raise NvhookError(refused[0], refused[1])
        return answer["answer"]
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        what = f"the command behind `{words[0]}` gave no answer"
        raise NvhookError(what, "run `nvhook inventory` on the host and see what it says") from error


def _read(fd: int, pid: int, end: float) -> bytes:
    """All that the child writes. At the deadline it is killed, with what it started."""
    posix.set_blocking(fd, False)
    said: list[bytes] = []
    size = 0
    while size <= ANSWER_MAX:
        try:
            part = posix.read(fd, 65536)
        except BlockingIOError:
            if time.monotonic() >= end:
                break
            time.sleep(0.001)
            continue
        if not part:
            return b"".join(said)
        said.append(part)
        size += len(part)
    posix.kill(-pid, 9)
    return b""


def _reap(pid: int) -> None:
    try:
        posix.waitpid(pid, 0)
    except ChildProcessError:
        # SIGCHLD is ignored, so the kernel did it.
        pass

# SPDX-License-Identifier: Apache-2.0
"""Containers with nvhook as their prestart hook on the simulated host: what several test files say of them."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from tests.containers import Bundle, Hook, hook
from tests.simhost import SimulatedHost

PROC_HOOK = Path(__file__).parents[1] / "simhost/prochook.py"
MULTIARCH = "/usr/lib/x86_64-linux-gnu"


def proc_hook(*source: str) -> Hook:
    """Gives the container's proc the folder that a driver would: an empty one, or `source` of the host."""
    return hook(sys.executable, "-I", "-S", str(PROC_HOOK), *source)


def nvhook(prefix: Path, host: SimulatedHost) -> list[Hook]:
    """The prestart hooks of a container on the simulated host."""
    return [proc_hook(), hook(prefix / "bin/nvhook-prestart", "--host-root", str(host.root))]


def reported(hooks: list[Hook], report: Path) -> list[Hook]:
    """The same hooks, what the last says on stderr kept in a file: runc shows a hook's words only where it failed."""
    program = 'report=$1; shift; exec "$@" 2>"$report"'
    last = hooks[-1]
    return [*hooks[:-1], hook("/bin/sh", "-c", program, "sh", str(report), *last["args"])]


def visible(devices: str, capabilities: str | None = None) -> dict[str, str]:
    """The variables of a request."""
    env = {"NVIDIA_VISIBLE_DEVICES": devices}
    return env if capabilities is None else env | {"NVIDIA_DRIVER_CAPABILITIES": capabilities}


def output(bundle: Bundle, **others: Any) -> str:
    """What the container printed; it must succeed."""
    done = bundle.run(**others)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def allowed(lines: list[str], minor: int) -> bool:
    """Whether the device cgroup lets the container open a GPU's node: what TRY_NODES printed about it.

    A missing rule gives EPERM. With the rule the answer is the driver's: ENXIO where none is loaded.
    """
    (line,) = [line for line in lines if line.startswith(f"nvidia{minor}: ")]
    return "Operation not permitted" not in line


def tree_of(folder: Path) -> dict[str, str]:
    """Every path below a folder, with what it is; for comparing before and after."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "folder"
    return found


class HostMounts:
    """This namespace's mounts, to be looked at again. Engines that run on the machine mount and unmount as well, below
    their own folders or for a while, and so do tests of another run; what one of our starts left would be elsewhere,
    and stay. `ours` is a path below this run's temporary folder."""

    PATIENCE = 10.0
    OTHERS = (
        *("/pytest-of-", "/docker/", "/containers/", "/containerd/", "/netns/", "/io.containerd.", "/overlay2/"),
        # systemd's for who logs in and for services, and snapd's.
        *(" /run/user/", " /run/credentials/", " /snap/"),
    )

    def __init__(self, ours: Path) -> None:
        run = re.match(r"/.*/pytest-of-[^/]+/pytest-\d+/", str(ours))
        self.ours = run[0] if run else str(ours)
        self.before = self._now()

    def changed(self) -> list[str]:
        """Mounts that came, and `-` with those that went, if they stay so."""
        end = time.monotonic() + self.PATIENCE
        while True:
            now = self._now()
            found = [*sorted(now - self.before), *(f"- {mount}" for mount in sorted(self.before - now))]
            if not found or time.monotonic() >= end:
                return found
            time.sleep(0.1)

    def _now(self) -> set[str]:
        """Without the ids, which tell nothing."""
        lines = [line.split(" ", 2)[2] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        return {line for line in lines if self.ours in line or not any(place in line for place in self.OTHERS)}


def naming(folder: Path) -> list[int]:
    """Processes whose command line names a folder, or something in it."""
    # Not bundle-12 where bundle-1 is meant: another start's, and that one may be running.
    name = re.compile(re.escape(os.fsencode(folder)) + rb"(?![\w.-])")
    found = []
    # Not by glob, which looks whether each file is there: of a process that ends meanwhile that may fail with ESRCH.
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if name.search(Path(f"/proc/{pid}/cmdline").read_bytes()):
                found.append(int(pid))
        except OSError:
            continue
    return found

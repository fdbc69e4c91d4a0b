# SPDX-License-Identifier: Apache-2.0
"""Real containers for tests: a bundle as an engine would write it, and a low-level runtime that runs it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cdi import inject

# Where a plain user's PATH does not look, and Debian puts runc and debootstrap.
SYSTEM_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NUMBERS = itertools.count(1)

# What docker and containerd write, in their order; the runtimes add their own defaults behind it.
DEVICE_RULES: list[dict[str, Any]] = [{"allow": False, "access": "rwm"}]

Hook = dict[str, Any]

CGROUP = Path("/sys/fs/cgroup")
# In a mount namespace of its own, because the machine's other programs go on using what is mounted there.
UNIFIED = 'umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup && exec "$@"'


def cgroup_versions() -> list[str]:
    """The cgroup versions that containers can be run on here: v1 where its devices controller is mounted."""
    return ["v1", "v2"] if (CGROUP / "devices").is_dir() else ["v2"]


def on_cgroup(version: str | None, command: list[str]) -> list[str]:
    """The command, so that it sees this cgroup version; None means what the machine has."""
    if version == "v2" and not (CGROUP / "cgroup.controllers").exists():
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", UNIFIED, "sh", *command]
    return command


def find_program(name: str) -> str | None:
    """The path of an installed program, system folders included."""
    return shutil.which(name, path=SYSTEM_PATH)


def hook(path: Path | str, *arguments: str) -> Hook:
    """A hook entry of config.json. args[0] is the whole path: Python finds its own library by it."""
    return {"path": str(path), "args": [str(path), *arguments]}


@dataclass
class Bundle:
    """A container to be: its bundle folder, which must not exist, and what differs from the ordinary."""

    folder: Path
    root: Path
    arguments: list[str]
    env: dict[str, str] = field(default_factory=dict)
    prestart: list[Hook] = field(default_factory=list)
    create_container: list[Hook] = field(default_factory=list)
    device_rules: list[dict[str, Any]] = field(default_factory=lambda: list(DEVICE_RULES))
    mounts: list[dict[str, Any]] = field(default_factory=list)
    namespaces: tuple[str, ...] = ("pid", "mount", "ipc", "uts")
    masked_paths: tuple[str, ...] = ("/proc/kcore", "/proc/keys", "/proc/timer_list")
    linux: dict[str, Any] = field(default_factory=dict)
    readonly: bool = False
    # CDI's containerEdits, as an engine would have applied them.
    edits: list[dict[str, Any]] = field(default_factory=list)
    cgroups_path: str | None = None
    cgroup: str | None = None
    more_capabilities: tuple[str, ...] = ()
    # A command that takes the runtime's command line as its last arguments.
    wrapper: list[str] = field(default_factory=list)
    # Of the runtime's own, in front of all others.
    options: list[str] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = f"nvhook-test-{os.getpid()}-{next(NUMBERS)}"
        self.folder.mkdir(parents=True)

    def config(self) -> dict[str, Any]:
        """The OCI configuration."""
        return inject.inject(self._plain(), self.edits)

    def _plain(self) -> dict[str, Any]:
        capabilities = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_MKNOD", "CAP_SETUID", "CAP_SETGID"]
        capabilities += self.more_capabilities
        env = {"PATH": PATH} | self.env
        return {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": self.arguments,
                "env": [f"{name}={value}" for name, value in env.items()],
                "cwd": "/",
                "capabilities": {kind: capabilities for kind in ("bounding", "effective", "permitted")},
                "noNewPrivileges": True,
            },
            "root": {"path": str(self.root), "readonly": self.readonly},
            "hostname": "container",
            "annotations": self.annotations,
            "mounts": [*usual_mounts(), *self.mounts],
            "hooks": {"prestart": self.prestart, "createContainer": self.create_container},
            "linux": {
                "cgroupsPath": self.cgroups_path or f"/{self.name}",
                "resources": {"devices": self.device_rules},
                "namespaces": [{"type": kind} for kind in self.namespaces],
                "maskedPaths": list(self.masked_paths),
                "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
                **self.linux,
            },
        }

    def write(self) -> None:
        """Write config.json."""
        (self.folder / "config.json").write_text(json.dumps(self.config(), indent=1))

    def command(self, runtime: str = "runc") -> list[str]:
        """The runtime's command line, without a verb."""
        program = find_program(runtime)
        if program is None:
            raise RuntimeError(f"{runtime} is not installed")
        return [program, *self.options, "--root", str(self.folder / "state")]

    def run(self, runtime: str = "runc", timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """`RUNTIME run`, to the end; the container is deleted afterwards, however that ended."""
        self.write()
        command = self.command(runtime)
        env = os.environ | {"PATH": SYSTEM_PATH}
        try:
            return subprocess.run(
                on_cgroup(self.cgroup, [*self.wrapper, *command, "run", "--bundle", str(self.folder), self.name]),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout,
                env=env,
            )
        finally:
            self.delete(runtime)

    def delete(self, runtime: str = "runc") -> None:
        """Delete the container, if there is one left."""
        command = on_cgroup(self.cgroup, [*self.command(runtime), "delete", "--force", self.name])
        subprocess.run(command, capture_output=True, check=False)
        shutil.rmtree(self.folder / "state", ignore_errors=True)


def usual_mounts() -> list[dict[str, Any]]:
    """proc, /dev with a pty instance, /sys: what every engine mounts."""
    hidden = ["nosuid", "noexec", "nodev"]
    tmpfs = ["nosuid", "strictatime", "mode=755", "size=65536k"]
    pts = ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]
    return [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": hidden},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": tmpfs},
        {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": pts},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": [*hidden, "mode=1777"]},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": [*hidden, "ro"]},
    ]

# SPDX-License-Identifier: Apache-2.0
"""Real engines, each with folders of its own: podman, containerd and dockerd of this machine, or of Debian 13.

An engine of Debian 13 runs in that Debian's root on this machine's kernel (`runtimes.ENTER`), with version 2 of
cgroups. Whatever was started is ended by its process id.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hook import install
from tests import releases
from tests.containers import SYSTEM_PATH
from tests.system import runtimes

IMAGE = "nvhook/test:1"
Done = subprocess.CompletedProcess[str]

CDI_FOLDER = 'mkdir -p /var/run/cdi && mount --bind "$1" /var/run/cdi && shift && exec "$@"'

# What a program of Debian 13 is started through: nvhook from this tree, by that Debian's own interpreter.
FROM_TREE = (
    """{python} -I -B -c 'import sys; sys.path.insert(0, "{tree}"); from hook.start import main; main()' {verb}"""
)


# The same for the runtime, whose launcher hands its caller's environment over. -S hides Debian's cffi.
ENTRY = """\
import sys
sys.path[:0] = [{tree!r}, "/usr/lib/python3/dist-packages"]
from hook.start import main
main()
"""


@dataclass(frozen=True)
class Debian:
    """Whose engines run: this machine's (`root` None), or those of a Debian root. `folders` are shown inside by
    their own names."""

    root: Path | None
    folders: tuple[Path, ...] = ()

    def command(self, words: list[str]) -> list[str]:
        """The command line that runs a command there."""
        if self.root is None:
            return words
        folders = " ".join(sorted({str(folder) for folder in (runtimes.TREE, *self.folders)}))
        enter = ["unshare", "--mount", "--propagation", "private", "sh", "-c", runtimes.ENTER]
        return [*enter, str(self.root), folders, *words]

    def program(self, name: str) -> str:
        """A program's path there."""
        if self.root is None:
            # Debian's own: a machine may have another vendor's client in /usr/local.
            here = shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
            if here is None:
                raise RuntimeError(f"{name} is not installed")
            return here
        for folder in ("usr/sbin", "usr/bin"):
            if (self.root / folder / name).exists():
                return f"/{folder}/{name}"
        raise RuntimeError(f"{name} is not in {self.root}")

    def run(self, *words: str, timeout: float = 120) -> Done:
        """Run a command there, to its end."""
        return subprocess.run(
            self.command(list(words)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            env={"PATH": SYSTEM_PATH, "HOME": "/root"},
        )


def newer(cache: Path, *folders: Path) -> Debian:
    """Debian 13 with its engines. Raises RuntimeError where it can't be made."""
    return Debian(releases.debian(cache, "trixie", engines=True), folders)


def programs(folder: Path, debian: Debian, prefix: Path, host_root: Path | None, names: dict[str, str]) -> Path:
    """A folder of programs, `names` with their verbs, that take another host's root as theirs.

    Engines choose the arguments of what they start, and nvhook learns of another host by arguments alone.
    """
    folder.mkdir()
    for name, verb in names.items():
        start = f"{prefix}/bin/nvhook-{verb}"
        if debian.root is not None:
            start = FROM_TREE.format(python=runtimes.PYTHON, tree=runtimes.TREE, verb=verb)
        # docker gives a hook of NVIDIA's name a verb of NVIDIA's.
        rest = "" if verb == "prestart" else '"$@"'
        where = f"--host-root {host_root}" if host_root else ""
        (folder / name).write_text(f"#!/bin/sh\nexec {start} {where} {rest}\n")
        (folder / name).chmod(0o755)
    return folder


def runtime(folder: Path, debian: Debian, prefix: Path, host_root: Path) -> Path:
    """A program that is nvhook-runtime there, with another host's root."""
    folder.mkdir(exist_ok=True)
    start = prefix / "bin/nvhook-runtime"
    if debian.root is not None:
        start = folder / "nvhook-runtime"
        (folder / "entry").write_text(ENTRY.format(tree=str(runtimes.TREE)))
        shutil.copy(runtimes.TREE / "hook/bin/launch", folder / "launch")
        install.write_marks(folder / "launch", {"@PYTHON@": runtimes.PYTHON, "@ENTRY@": str(folder / "entry")})
        start.symlink_to("launch")
    program = folder / "runtime"
    program.write_text(f'#!/bin/sh\nexec {start} --host-root {host_root} "$@"\n')
    program.chmod(0o755)
    return program


class Daemon:
    """A process of ours that serves a socket, until `close`."""

    def __init__(self, debian: Debian, folder: Path, words: list[str], path: str) -> None:
        self.debian = debian
        self.folder = folder
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                debian.command(words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"PATH": path, "HOME": "/root"},
            )

    def wait(self, ready: Callable[[], bool], seconds: float = 60) -> None:
        """Until it answers. Raises RuntimeError with the end of its log."""
        end = time.monotonic() + seconds
        while not ready():
            if self.process.poll() is not None or time.monotonic() > end:
                self.close()
                raise RuntimeError(f"the daemon does not answer: {self.log.read_text()[-1000:]}")
            time.sleep(0.1)

    def close(self) -> None:
        """End it, and what it started."""
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Docker(Daemon):
    """dockerd with its own containerd, storage and socket. `path` is put in front of its PATH, where it looks for
    NVIDIA's hook; `config` is its daemon.json."""

    def __init__(self, debian: Debian, folder: Path, config: dict[str, Any], path: Path | None = None) -> None:
        folder.mkdir()
        (folder / "daemon.json").write_text(json.dumps(config))
        self.socket = f"unix://{folder}/socket"
        words = [debian.program("dockerd"), "--config-file", str(folder / "daemon.json"), "-H", self.socket]
        words += ["--data-root", str(folder / "data"), "--exec-root", str(folder / "exec")]
        words += ["--pidfile", str(folder / "pid"), "--bridge=none", "--iptables=false", "--ip6tables=false"]
        super().__init__(debian, folder, words, os.pathsep.join([*([str(path)] if path else []), SYSTEM_PATH]))
        self.wait(lambda: self.client("info").returncode == 0)

    def client(self, *words: str) -> Done:
        """A command of docker's client."""
        return self.debian.run(self.debian.program("docker"), "-H", self.socket, *words)

    def load(self, archive: Path) -> None:
        """Take an image in."""
        done = self.client("load", "--input", str(archive))
        assert done.returncode == 0, done.stderr

    def run(self, script: str, *words: str) -> Done:
        """`docker run`."""
        return self.client("run", "--rm", "--network=none", *words, IMAGE, "/bin/sh", "-c", script)


class Containerd(Daemon):
    """containerd with its own storage and socket."""

    def __init__(self, debian: Debian, folder: Path) -> None:
        folder.mkdir()
        self.socket = str(folder / "socket")
        words = [debian.program("containerd"), "--address", self.socket]
        words += ["--root", str(folder / "root"), "--state", str(folder / "state")]
        super().__init__(debian, folder, words, SYSTEM_PATH)
        self.numbers = iter(range(1, 1000))
        self.wait(lambda: self.client("version").returncode == 0)

    def client(self, *words: str) -> Done:
        """A command of ctr, containerd's own client, which knows no CDI names."""
        return self.debian.run(self.debian.program("ctr"), "--address", self.socket, *words)

    def load(self, archive: Path) -> None:
        """Take an image in."""
        done = self.client("images", "import", str(archive))
        assert done.returncode == 0, done.stderr

    def run(self, script: str, *words: str) -> Done:
        """`ctr run`."""
        name = f"nvhook-test-{os.getpid()}-{next(self.numbers)}"
        return self.client("run", "--rm", *words, f"docker.io/{IMAGE}", name, "/bin/sh", "-c", script)


class Podman:
    """podman, which has no daemon, with its own storage in `folder`, whose path may have 50 characters at most.

    `cdi` is shown to it as /var/run/cdi, since podman 4.3 knows no option for that; `hooks_dir` holds hook files.
    """

    def __init__(
        self, debian: Debian, folder: Path, runtime: str, cdi: Path | None = None, hooks_dir: Path | None = None
    ) -> None:
        self.folder = folder
        self.debian = debian
        self.private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", CDI_FOLDER, "sh", str(cdi)]
        if cdi is None:
            self.private = []
        words = [debian.program("podman"), "--root", str(folder / "root"), "--runroot", str(folder / "run")]
        words += ["--storage-driver", "vfs", "--cgroup-manager=cgroupfs", "--runtime", runtime]
        if hooks_dir is not None:
            words += ["--hooks-dir", str(hooks_dir)]
        self.words = words

    def load(self, archive: Path) -> None:
        """Take an image in."""
        done = self.debian.run(*self.words, "load", "--input", str(archive))
        assert done.returncode == 0, done.stderr

    def run(self, script: str, *words: str) -> Done:
        """`podman run`; a machine without CAP_SYS_RESOURCE needs the ulimits, one whose cgroups are version 1's for
        the greater part has no `pids` controller on version 2."""
        limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096", "--pids-limit=0"]
        start = [
            "run",
            "--rm",
            "--network=none",
            "--pull=never",
            *limits,
            *words,
            f"localhost/{IMAGE}",
            "/bin/sh",
            "-c",
            script,
        ]
        return self.debian.run(*self.private, *self.words, *start)

    def close(self) -> None:
        """Remove what it stored."""
        for _ in range(100):
            shutil.rmtree(self.folder, ignore_errors=True)
            if not self.folder.exists():
                return
            time.sleep(0.1)
        raise RuntimeError(f"podman still uses {self.folder}")

# SPDX-License-Identifier: Apache-2.0
"""`nvhook-runtime`'s launcher: which calls reach the low-level runtime without Python, and what of the caller does.

The low-level runtime is a script that writes down how it was started. Everything happens in a mount namespace with a
/run of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hook import install
from tests.system.test_launcher import PT_INTERP, segment_types

STATE = "/run/nvhook/runtime.nvhook-runtime"
# $1 is the state file's content, $2 its mode, $3 what else is to be done.
PRIVATE = f"""
set -e
mount -t tmpfs tmpfs /run
mkdir /run/nvhook
printf "$1" > {STATE}
chmod "$2" {STATE}
eval "$3"
shift 3
exec "$@"
"""

# /bin/sh keeps ignored signals ignored, and passes on every descriptor below 10.
LOW_LEVEL = """#!/bin/sh
report={report}
printf '%s\\0' "$0" "$@" > $report.arguments
cat /proc/$$/environ > $report.environment
grep -E 'SigIgn|NoNewPrivs|Umask' /proc/$$/status > $report.status
ls /proc/$$/fd > $report.descriptors
readlink /proc/$$/cwd > $report.cwd
exit 43
"""

PYTHON_SAYS = "import sys\nsys.stdout.write(repr(sys.argv[1:2]))\n"


class Low:
    """The installed launcher beside an entry that says `runtime`, and a low-level runtime of ours."""

    def __init__(self, folder: Path, launcher: Path) -> None:
        self.folder = folder
        self.program = folder / "bin/nvhook-runtime"
        self.program.parent.mkdir()
        shutil.copy(launcher, folder / "bin/launch")
        (folder / "bin/entry").write_text(PYTHON_SAYS)
        marks = {"@PYTHON@": install.interpreter(), "@ENTRY@": str(folder / "bin/entry")}
        install.write_marks(folder / "bin/launch", marks)
        self.program.symlink_to("launch")
        self.low = folder / "low level"
        self.low.write_text(LOW_LEVEL.format(report=folder / "report"))
        self.low.chmod(0o755)

    def call(self, *words: str, content: str | None = None, mode: str = "644", act: str = "", **options: Any) -> str:
        """`runtime` if it was the low-level one, else what Python said."""
        for file in self.folder.glob("report.*"):
            file.unlink()
        text = f"{self.low}\\n" if content is None else content
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", PRIVATE, "sh", text, mode, act]
        name = options.pop("name", self.program)
        done = subprocess.run([*command, str(name), *words], capture_output=True, text=True, check=False, **options)
        if done.returncode == 43:
            return "runtime"
        assert done.returncode == 0, done.stderr
        said: str = done.stdout
        return said

    def report(self, name: str) -> bytes:
        return (self.folder / f"report.{name}").read_bytes()


PYTHON = "['runtime']"


@pytest.fixture
def low(tmp_path: Path, prefix: Path) -> Low:
    return Low(tmp_path, Path(install.origin("hook")).parent / "bin/launch")


def test_it_is_static(prefix: Path) -> None:
    assert PT_INTERP not in segment_types(prefix / "bin/nvhook-runtime")


@pytest.mark.parametrize(
    "words",
    [
        "state abc",
        "--root /r --log /l --log-format json delete --force create",
        "--log create kill abc",
        "--root=create --debug start run",
        "-log run -root create exec abc create",
        "--systemd-cgroup --cgroup-manager create ps abc",
        "--version",
        "",
        "--log-level debug exec --env A=b abc sh -c create",
    ],
)
def test_other_verbs_pass_by(low: Low, words: str) -> None:
    assert low.call(*words.split()) == "runtime"
    assert low.report("arguments").decode().split("\0")[:-1] == [str(low.low), *words.split()]


@pytest.mark.parametrize(
    "words",
    [
        "create abc",
        "--root /r --log /l --log-format json --systemd-cgroup create --bundle /b abc",
        "run abc",
        "--newer value create abc",
        "--host-root /h state abc",
        "--host-root=/h state abc",
        "-- create",
    ],
)
def test_what_python_decides(low: Low, words: str) -> None:
    assert low.call(*words.split()) == PYTHON


@pytest.mark.parametrize(
    ("content", "mode", "act"),
    [
        ("", "644", ""),
        ("/bin/false", "644", ""),
        ("/bin/false\\n/bin/true\\n", "644", ""),
        ("bin/false\\n", "644", ""),
        ("\\n", "644", ""),
        ("/no/such/runtime\\n", "644", ""),
        ("/bin/false\\n", "664", ""),
        ("/bin/false\\n", "646", ""),
        ("/bin/false\\n", "644", f"chown 1 {STATE}"),
        ("/bin/false\\n", "644", f"mv {STATE} /run/x; ln -s /run/x {STATE}"),
        ("/bin/false\\n", "644", f"rm {STATE}; mkfifo {STATE}"),
        ("/bin/false\\n", "644", f"rm {STATE}; mkdir {STATE}"),
        ("/bin/false\\n", "644", f"rm {STATE}"),
    ],
)
def test_a_file_that_is_absent_or_unsound(low: Low, content: str, mode: str, act: str) -> None:
    assert low.call("state", "abc", content=content, mode=mode, act=act) == PYTHON


def test_many_arguments(low: Low) -> None:
    assert low.call("exec", *["x"] * 5000) == "runtime"
    assert low.call("run", *["x"] * 5000) == PYTHON


@pytest.mark.parametrize("name", ["nvhook-runtime.legacy", "nvidia-container-runtime", "nvidia-container-runtime.cdi"])
def test_its_other_names(low: Low, name: str) -> None:
    link = low.folder / name
    link.symlink_to("bin/launch")
    assert low.call("create", name=link) == PYTHON
    # Each has a file of its own.
    assert low.call("state", name=link) == PYTHON
    assert low.call("state", name=link, act=f"mv {STATE} /run/nvhook/runtime.{name}") == "runtime"


def test_hooks_are_no_runtimes(low: Low) -> None:
    verbs = {
        "nvidia-container-runtime-hook": "nvidia-container-runtime-hook",
        "nvhook-runtimes": "runtimes",
        "runtime": "",
    }
    for name, verb in verbs.items():
        link = low.folder / name
        link.symlink_to("bin/launch")
        done = subprocess.run([link, "state"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == ((0, f"['{verb}']") if verb else (1, "")), name


# What of the caller reaches the runtime, by way of Python too


@pytest.fixture(params=["by the launcher", "by Python"])
def started(request: pytest.FixtureRequest, low: Low, prefix: Path) -> Any:
    """A function that starts the low-level runtime by either way."""

    def start(**options: Any) -> None:
        if request.param == "by the launcher":
            assert low.call("state", "abc", **options) == "runtime"
            return
        host = low.folder / "host"
        (host / "run/nvhook").mkdir(parents=True)
        (host / "run/nvhook/runtime.nvhook-runtime").write_text(f"{low.low}\n")
        bundle = low.folder / "bundle"
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps({"root": {"path": "/r"}, "process": {"env": ["A=b"]}}))
        words = ["--host-root", str(host), "create", "--bundle", str(bundle), "abc"]
        command = [str(prefix / "bin/nvhook-runtime"), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        assert done.returncode == 43, done.stderr
        assert low.report("arguments").decode().split("\0")[1:-1] == words[2:]

    return start


def test_the_environment(low: Low, started: Any) -> None:
    """Bytes that are no text, empty values, and Python's own variables, which must not have been obeyed."""
    env = {b"PATH": os.environb[b"PATH"], b"LISTEN_FDS": b"2", b"NOTIFY_SOCKET": b"/run/x", b"EMPTY": b""}
    env |= {
        b"XDG_RUNTIME_DIR": b"/run/user/7",
        b"BYTES": b"\xff\xfe=\n",
        b"PWD": os.getcwdb(),
        b"PYTHONHOME": b"/no/such",
    }
    started(env=env)
    found = set(low.report("environment").split(b"\0")) - {b""}
    assert found == {name + b"=" + value for name, value in env.items()}


def test_a_large_environment(low: Low, started: Any) -> None:
    env = {f"NAME_{number}": "x" * 1000 for number in range(1000)} | {"PATH": os.environ["PATH"], "PWD": os.getcwd()}
    started(env=env)
    assert low.report("environment").count(b"\0") == 1002


def test_descriptors_and_the_working_directory(low: Low, started: Any, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    for fd in (reading, writing):
        os.set_inheritable(fd, True)
    try:
        started(pass_fds=(reading, writing), cwd=tmp_path)
    finally:
        os.close(reading)
        os.close(writing)
    # And the shell's own: the script, and what `ls` lists with.
    extra = {number for number in map(int, low.report("descriptors").split())} - {0, 1, 2, reading, writing}
    assert extra <= {10, 11}
    assert low.report("cwd") == f"{tmp_path}\n".encode()


@pytest.mark.parametrize("ignored", [(), (signal.SIGPIPE,), (signal.SIGXFSZ, signal.SIGUSR1)])
def test_signals_privileges_and_umask(low: Low, started: Any, ignored: tuple[signal.Signals, ...]) -> None:
    """Python ignores two signals by itself; the container would inherit that."""

    def before() -> None:
        os.umask(0o027)
        # Whoever started the tests may ignore some, as nohup does.
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if signal.getsignal(number) == signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    started(preexec_fn=before, restore_signals=False)
    status = dict(line.split(":\t") for line in low.report("status").decode().splitlines())
    mask = int(status["SigIgn"], 16)
    assert {number for number in range(1, 65) if mask >> (number - 1) & 1} == set(map(int, ignored))
    assert (status["NoNewPrivs"], status["Umask"]) == ("0", "0027")


def test_python_is_started_in_a_clean_environment(low: Low) -> None:
    (low.folder / "bin/entry").write_text("import posix, sys\nsys.stdout.write(repr(sorted(posix.environ)))\n")
    env = {"PATH": os.environ["PATH"], "LD_PRELOAD": "/no/such.so", "PYTHONPATH": "/x", "SECRET": "y"}
    assert low.call("create", "abc", env=env) == "[b'LC_ALL', b'PATH']"

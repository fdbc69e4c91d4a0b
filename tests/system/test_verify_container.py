# SPDX-License-Identifier: Apache-2.0
"""`nvhook verify --in-container` with a real runtime; a hook of the test's own brings a libcuda without a GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hook import verify
from ldcache.errors import NvhookError
from tests.containers import find_program

HELLO = "Hello from GPU thread 0!\n"

# Puts argv[1] where the container's loader finds it, and does what the rest of argv says.
HOOK = """
import json, os, shutil, sys, time
root = json.load(sys.stdin)["bundle"] + "/rootfs"
folder = next(path for path, _, names in os.walk(root) if "libc.so.6" in names)
shutil.copy(sys.argv[1], folder + "/libcuda.so.1")
exec(sys.argv[2])
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, tree: Path) -> Path:
    output = tmp_path_factory.mktemp("fakecuda") / "libcuda.so.1"
    source = tree / "tests/unit/fakecuda.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", source, "-o", output], check=True)
    return output


@pytest.fixture(params=["runc", "crun"])
def runtime(request: pytest.FixtureRequest) -> str:
    """A runtime's path."""
    path = find_program(request.param)
    if path is None:
        pytest.skip(f"needs {request.param}, which is not installed")
    # crun takes version 2 below version 1 for an error of the machine's.
    if request.param == "crun" and os.path.ismount("/sys/fs/cgroup/unified"):
        pytest.skip("crun refuses this machine's hybrid cgroups")
    return path


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder where bundles are made; the test fails if anything is left of a container."""
    folder = tmp_path / "bundles"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    assert list(folder.iterdir()) == []
    # Others' cgroups come and go while we look, which os.walk doesn't mind.
    names = [name for _, folders, _ in os.walk("/sys/fs/cgroup") for name in folders]
    assert [name for name in names if name.startswith("nvhook-verify-")] == []


def hook(library: Path, then: str = "") -> list[str]:
    return [os.path.realpath(sys.executable), "-I", "-c", HOOK, str(library), then]


def test_kernels(runtime: str, library: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert verify.in_container(runtime=runtime, hook=hook(library)) == 0
    out, err = capfd.readouterr()
    assert out.startswith("libcuda.so.1: CUDA 12.4, devices: 1\n")
    assert out.endswith(f"elements right\n{HELLO}")
    assert err == ""


def test_json(runtime: str, library: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert verify.in_container(runtime=runtime, hook=hook(library), arguments=["--json"]) == 0
    [device] = json.loads(capfd.readouterr().out)["devices"]
    assert (device["hello"], device["failures"]) == (HELLO, [])


def test_failing_program(runtime: str, library: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = hook(library, "os.unlink(folder + '/libcuda.so.1')")
    assert verify.in_container(runtime=runtime, hook=command) == 1
    assert capfd.readouterr().err.startswith("cuda-check: error: step load: dlopen: libcuda.so.1: cannot open")


def test_failing_hook(runtime: str, library: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert verify.in_container(runtime=runtime, hook=hook(library, "sys.exit('no GPU today')")) != 0
    out, _ = capfd.readouterr()
    assert out == ""


def test_request_reaches_the_hook(runtime: str, library: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    then = f"shutil.copy(root + '/../config.json', {str(seen)!r})"
    assert verify.in_container(["1", "GPU-x"], runtime, hook(library, then)) == 0
    assert "NVIDIA_VISIBLE_DEVICES=1,GPU-x" in json.loads(seen.read_text())["process"]["env"]


COMMAND = """
import argparse
import sys
from hook import verify
parser = argparse.ArgumentParser()
verify.add_arguments(parser)
verify.hook_command = lambda: sys.argv[1:]
try:
    sys.exit(verify.run(parser.parse_args(["--in-container", "--runtime", {runtime!r}])))
except verify.NvhookError as error:
    sys.exit(error.what)
"""


PEERS = """
import argparse, sys
from hook import verify
parser = argparse.ArgumentParser()
verify.add_arguments(parser)
verify.hook_command = lambda: sys.argv[1:]
sys.exit(verify.run(parser.parse_args(["--in-container", "--runtime", {runtime!r}, "--json", "--peer", "5", "GPU-x"])))
"""


def test_copies_between_two(runtime: str, tmp_path: Path, tree: Path) -> None:
    """The hook is asked for the two by their names; in the container they are the first and the second."""
    source = tmp_path / "two.c"
    source.write_text(
        "#include <stdlib.h>\n"
        '__attribute__((constructor)) static void two(void) { setenv("FAKECUDA_DEVICES", "2", 1); }\n'
    )
    fake, both = tree / "tests/unit/fakecuda.c", tmp_path / "libboth.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", fake, source, "-o", both], check=True)
    seen = tmp_path / "seen"
    command = hook(both, f"shutil.copy(root + '/../config.json', {str(seen)!r})")
    program = [sys.executable, "-c", PEERS.format(runtime=runtime), *command]
    done = subprocess.run(program, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    peers = json.loads(done.stdout)["peers"]
    assert [(item["from"], item["to"], item["elements"]) for item in peers] == [(0, 1, 1 << 24), (1, 0, 1 << 24)]
    assert "NVIDIA_VISIBLE_DEVICES=5,GPU-x" in json.loads(seen.read_text())["process"]["env"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["hook", "program"])
def test_interrupt(runtime: str, library: Path, tmp_path: Path, tree: Path, number: signal.Signals, where: str) -> None:
    """An impatient person leaves no container, cgroup or folder (the fixture looks)."""
    mark = tmp_path / "mark"
    then = f"open({str(mark)!r}, 'w').write(root)"
    if where == "hook":
        command = hook(library, f"{then}; time.sleep(2)")
    else:
        command = hook(hanging_library(tmp_path), then)
    program = [sys.executable, "-c", COMMAND.format(runtime=runtime), *command]
    child = subprocess.Popen(program, cwd=tree, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(mark.exists)
        time.sleep(0.2)
        child.send_signal(number)
        _, err = child.communicate(timeout=20)
        assert child.returncode == 1
        assert err.endswith("interrupted; the container is deleted\n")
    finally:
        child.kill()
        child.wait()
    root = mark.read_text()
    wait_until(lambda: not processes_below(root))


def hanging_library(folder: Path) -> Path:
    source = folder / "hang.c"
    source.write_text(
        "#include <unistd.h>\n__attribute__((constructor)) static void hang(void) { for (;;) pause(); }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", folder / "libhang.so"], check=True)
    return folder / "libhang.so"


def processes_below(root: str) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            text = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if text.startswith("/cuda-check") or os.path.dirname(root) in text:
            found.append(text)
    return found


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "nothing happened in 20 s"
        time.sleep(0.01)


def test_mount_left_by_a_hook(library: Path, tmp_path: Path, clean: Path) -> None:
    """A folder that a hook hung into the root on the host is not emptied with it."""
    path = find_program("runc")
    if path is None:
        pytest.skip("needs runc, which is not installed")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    then = f"os.mkdir(root + '/precious'); os.system('mount --bind {precious} ' + root + '/precious')"
    try:
        with pytest.raises(NvhookError, match="/rootfs/precious is still mounted"):
            verify.in_container(runtime=path, hook=hook(library, then))
        assert (precious / "file").read_text() == "kept"
    finally:
        for mount in clean.glob("*/rootfs/precious"):
            subprocess.run(["umount", mount], check=True)
        for bundle in clean.iterdir():
            subprocess.run(["rm", "-r", bundle], check=True)


def test_noexec_folder(runtime: str, library: Path, clean: Path) -> None:
    """Hardened machines mount /tmp noexec: the program must go elsewhere."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec", "none", clean], check=True)
    try:
        assert verify.in_container(runtime=runtime, hook=hook(library)) == 0
    finally:
        subprocess.run(["umount", clean], check=True)

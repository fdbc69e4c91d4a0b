# SPDX-License-Identifier: Apache-2.0
"""Whatever an image puts where we write, nothing outside of its root changes: not by a link, not by a race, not
when the hook is killed.

The kind of CVE-2024-0132, CVE-2024-0133, CVE-2025-23266 and CVE-2025-23359.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.containers import Bundle, hook
from tests.needs import needs_program
from tests.simhost import SimulatedHost
from tests.system.conftest import MakeBundle
from tests.system.prestart import MULTIARCH, nvhook, proc_hook, tree_of, visible

pytestmark = needs_program("runc")

TREE = Path(__file__).resolve().parents[2]
KILL_HOOK = Path(__file__).with_name("killhook.py")

# What a start with every capability writes to, mounts on, or goes through.
PLACES = (
    "usr",
    "usr/lib",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04",
    "usr/bin",
    "usr/bin/nvidia-smi",
    "usr/share",
    "etc",
    "etc/ld.so.cache",
    "etc/.ld.so.cache.nvhook-0",
    "run",
    "run/nvidia-persistenced",
    "lib",
    "lib/firmware",
    "tmp",
    "tmp/nvidia-mps",
)


def absolute(path: Path, canary: Path) -> None:
    path.symlink_to(canary)


def upwards(path: Path, canary: Path) -> None:
    path.symlink_to("../" * 40 + str(canary).lstrip("/"))


def through_proc(path: Path, canary: Path) -> None:
    path.symlink_to(f"/proc/self/root{canary}")


def through_init(path: Path, canary: Path) -> None:
    path.symlink_to(f"/proc/1/root{canary}")


def loop(path: Path, canary: Path) -> None:
    path.symlink_to(path.name)


def forty_deep(path: Path, canary: Path) -> None:
    for number in range(40):
        link = path.with_name(f"link-{number}")
        link.unlink(missing_ok=True)
        link.symlink_to(f"link-{number + 1}" if number < 39 else canary)
    path.symlink_to("link-0")


def fifo(path: Path, canary: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path, canary: Path) -> None:
    # The address of a socket has 107 bytes at most.
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(before)


def device(path: Path, canary: Path) -> None:
    os.mknod(path, 0o20666, os.makedev(1, 3))


def file(path: Path, canary: Path) -> None:
    path.write_text("a file")


def folder(path: Path, canary: Path) -> None:
    path.mkdir()


OBSTACLES = (
    *(absolute, upwards, through_proc, through_init, loop, forty_deep),
    *(fifo, unix_socket, device, file, folder),
)


def host_mounts() -> list[str]:
    """This namespace's mounts, without their ids."""
    return [line.split(" ", 2)[2] for line in Path("/proc/self/mountinfo").read_text().splitlines()]


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A folder outside of every root, with what a hook might want to write over."""
    place = tmp_path / "canary"
    for name in ("etc", "usr/lib/x86_64-linux-gnu", "x86_64-linux-gnu", "firmware", "bin"):
        (place / name).mkdir(parents=True)
    for name in ("ld.so.cache", "etc/ld.so.cache", "libcuda.so.1", "nvidia-smi"):
        (place / name).write_text("the host's")
    return place


@pytest.mark.parametrize("obstacle", OBSTACLES, ids=lambda obstacle: obstacle.__name__)
def test_nothing_outside_of_the_root_changes(
    prefix: Path,
    host: SimulatedHost,
    make_bundle: MakeBundle,
    canary: Path,
    obstacle: Callable[[Path, Path], None],
) -> None:
    """The root is half an image in some of these, so the start may fail; then by our word, not by a traceback."""
    before, mounts = tree_of(canary), host_mounts()
    for place in PLACES:
        bundle = make_bundle("true", env=visible("all", "all"), prestart=nvhook(prefix, host))
        path = bundle.root / place
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            path.rename(path.with_name(f"{path.name}.aside"))
        path.parent.mkdir(parents=True, exist_ok=True)
        obstacle(path, canary)
        done = bundle.run(timeout=30)
        assert tree_of(canary) == before, (place, done.stderr)
        assert host_mounts() == mounts, place
        assert "Traceback" not in done.stderr, (place, done.stderr)
        shutil.rmtree(bundle.root)


SWAP = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
one, other = (name.encode() for name in sys.argv[1:])
AT_FDCWD, RENAME_EXCHANGE = -100, 2
while libc.renameat2(AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE) == 0:
    pass
"""


@pytest.mark.parametrize("place", ["usr/lib/x86_64-linux-gnu", "etc", "usr/bin"])
@pytest.mark.parametrize("runs", [10, pytest.param(1000, marks=pytest.mark.long)])
def test_a_folder_that_becomes_a_link_meanwhile(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, canary: Path, place: str, runs: int
) -> None:
    bundle = make_bundle("true", env=visible("all"), prestart=nvhook(prefix, host))
    path = bundle.root / place
    link = path.with_name("to-be-swapped")
    link.symlink_to(canary)
    before, mounts = tree_of(canary), host_mounts()
    command = [sys.executable, "-c", SWAP, str(path), str(link)]
    swapper = subprocess.Popen(command)
    try:
        for _ in range(runs):
            bundle.run(timeout=30)
            assert tree_of(canary) == before
            assert host_mounts() == mounts
        assert swapper.poll() is None, "the race ended before the runs did"
    finally:
        swapper.kill()
        swapper.wait()


def test_killed_at_any_step(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle) -> None:
    """SIGKILL, as by a runtime's timeout: no mount is left, no process, and the next start works."""
    bundle = make_bundle("resolve libcuda.so.1", env=visible("all"), prestart=[])
    mounts = host_mounts()
    place = 0
    while True:
        arguments = ("-I", "-S", str(KILL_HOOK), str(prefix / "lib/nvhook"), str(host.root), str(place))
        bundle.prestart = [proc_hook(), hook(sys.executable, *arguments)]
        done = bundle.run()
        assert host_mounts() == mounts, place
        assert running(bundle) == [], place
        if done.returncode == 0:
            break
        assert "signal: killed" in done.stderr, done.stderr
        place += 1
    assert place > 30
    bundle.prestart = nvhook(prefix, host)
    assert bundle.run().stdout == f"libcuda.so.1 {MULTIARCH}/libcuda.so.1\n"
    assert [path.name for path in bundle.root.rglob(".*nvhook-*")] == []


def running(bundle: Bundle) -> list[int]:
    """Processes whose command line names the bundle."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(bundle.folder).encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("stage", ["prestart", "create_container", "nvidia-cdi-hook"])
def test_code_in_the_image_does_not_run(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path, stage: str
) -> None:
    """The root is the working directory, and every variable that loads code points into it."""
    marker = tmp_path / "marker"
    planted = tmp_path / "planted.so"
    source = TREE / "tests/system/planted.c"
    subprocess.run(["cc", "-shared", "-fPIC", f'-DMARK="{marker}"', str(source), "-o", str(planted)], check=True)
    bundle = make_bundle("true", env=visible("0"))
    text = f"open({str(marker)!r}, 'w').close()\n"
    for name in ("json.py", "sitecustomize.py", "usercustomize.py", "posix.py", "hook.py", "ldcache.py", "cdi.py"):
        (bundle.root / name).write_text(text)
    (bundle.root / "encodings").mkdir()
    (bundle.root / "encodings/__init__.py").write_text(text)
    for name in ("libc.so.6", "planted.so", "gconv-modules.so"):
        shutil.copy(planted, bundle.root / name)
    root = str(bundle.root)
    env = [f"LD_PRELOAD={root}/planted.so", f"LD_AUDIT={root}/planted.so", f"LD_LIBRARY_PATH={root}", f"PATH={root}"]
    env += [f"{name}={root}" for name in ("PYTHONPATH", "PYTHONHOME", "GCONV_PATH", "LOCPATH", "PYTHONUSERBASE")]
    env += [f"PYTHONSTARTUP={root}/json.py", f"XDG_RUNTIME_DIR={root}"]
    if stage == "prestart":
        bundle.prestart = nvhook(prefix, host)
        bundle.prestart[-1]["env"] = env
    else:
        link = hook(prefix / "bin/nvhook-create-container", "--link", f"x::{MULTIARCH}/libx.so")
        if stage == "nvidia-cdi-hook":
            # As files of NVIDIA's toolkit up to 1.17 name it, without an environment of the hook's own.
            link["args"] = [stage, "create-symlinks", *link["args"][1:]]
        bundle.create_container = [{**link, "env": env}]
    # The planted library would run in an ordinary program: the test can fail.
    subprocess.run(["/bin/true"], env={"LD_PRELOAD": str(planted)}, check=True)
    assert marker.exists()
    marker.unlink()
    done = bundle.run()
    assert done.returncode == 0, done.stderr
    assert not marker.exists()


def test_many_starts_at_once(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle) -> None:
    """A cold inventory, and eight starts in flight: all are right, and none leaves anything."""
    shutil.rmtree(host.root / "run/nvhook", ignore_errors=True)
    script = "resolve libcuda.so.1"
    bundles = [make_bundle(script, env=visible("all"), prestart=nvhook(prefix, host)) for _ in range(8)]
    mounts = host_mounts()
    started = []
    for bundle in bundles:
        bundle.write()
        command = [*bundle.command(), "run", "--bundle", str(bundle.folder), bundle.name]
        started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True))
    try:
        said = [process.communicate(timeout=60)[0] for process in started]
    finally:
        for process, bundle in zip(started, bundles, strict=True):
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            bundle.delete()
    assert said == [f"libcuda.so.1 {MULTIARCH}/libcuda.so.1\n"] * 8
    assert host_mounts() == mounts

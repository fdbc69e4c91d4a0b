# SPDX-License-Identifier: Apache-2.0
"""Whatever an image puts where we write, nothing outside of its root changes: not by a link, not by a race, not
when the hook is killed.

The kind of CVE-2024-0132, CVE-2024-0133, CVE-2025-23266 and CVE-2025-23359.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.containers import Bundle, Hook, hook
from tests.needs import needs_program
from tests.simhost import SimulatedHost
from tests.system.conftest import MakeBundle
from tests.system.prestart import MULTIARCH, HostMounts, naming, nvhook, proc_hook, tree_of, visible

pytestmark = needs_program("runc")

TREE = Path(__file__).resolve().parents[2]
KILL_HOOK = Path(__file__).with_name("killhook.py")

# What puts something at a path, given the canary; and what starts a container, to its end.
Obstacle = Callable[[Path, Path], None]
Start = Callable[[], "subprocess.CompletedProcess[str]"]

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


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A folder outside of every root, with what a hook might want to write over."""
    place = tmp_path / "canary"
    for name in ("etc", "usr/lib/x86_64-linux-gnu", "x86_64-linux-gnu", "firmware", "bin"):
        (place / name).mkdir(parents=True)
    for name in ("ld.so.cache", "etc/ld.so.cache", "libcuda.so.1", "nvidia-smi"):
        (place / name).write_text("the host's")
    return place


Prestart = Callable[[], list[Hook]]


@pytest.fixture(scope="session")
def noopenat2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that runs another one, for which openat2 does not exist."""
    program = tmp_path_factory.mktemp("noopenat2") / "noopenat2"
    source = TREE / "tests/system/noopenat2.c"
    subprocess.run(["cc", "-Wall", "-Wextra", "-Werror", str(source), "-o", str(program)], check=True)
    return program


@pytest.fixture
def prestart(request: pytest.FixtureRequest, prefix: Path, host: SimulatedHost, noopenat2: Path) -> Prestart:
    """Prestart hooks that look paths up in one of the two ways."""
    hooks = nvhook(prefix, host)
    if request.param == "walk":
        hooks = [hooks[0], hook(noopenat2, *hooks[1]["args"])]
    return lambda: hooks


LOOKS = """
import sys
sys.path.insert(0, sys.argv[1])
from ldcache import kernel, root
top = root.open_root("/")
try:
    kernel.openat2(top, "etc", root.PATH)
    print("openat2")
except OSError as error:
    print(error.strerror)
print(root.real_path(top, "/etc/../etc/passwd"))
"""


def test_there_are_two_ways(noopenat2: Path) -> None:
    """The program below really has no openat2, and finds its files all the same."""
    command = [sys.executable, "-c", LOOKS, str(TREE)]
    for words, said in ((command, "openat2"), ([str(noopenat2), *command], "openat2: Function not implemented")):
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == [said, "/etc/passwd"]


def test_both_ways_make_the_same(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, noopenat2: Path, tmp_path: Path
) -> None:
    """In an image that is full of links, as files and links in its layer afterwards tell."""
    made = []
    for before in ([], [str(noopenat2)]):
        first, last = nvhook(prefix, host)
        words = [*before, *last["args"]]
        bundle = make_bundle("resolve libcuda.so.1", env=visible("all", "all"), prestart=[first, hook(*words)])
        for place in ("usr/bin", "etc"):
            path = bundle.root / place
            path.rename(path.with_name(f"{path.name}.aside"))
            path.symlink_to(f"/../..//{os.path.dirname(place)}/./{path.name}.aside/")
        done = bundle.run()
        assert done.stdout == f"libcuda.so.1 {MULTIARCH}/libcuda.so.1\n", done.stderr
        made.append({name: text for name, text in tree_of(bundle.root).items() if "ld.so.cache" not in name})
    assert made[0] == made[1] and "usr/bin.aside/nvidia-smi" in made[0]


BOTH_IN_EACH_RUN = (absolute, through_proc, loop)


class Watch:
    """A canary and this namespace's mounts, which must stay as they were when the watch began."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary
        self.before = tree_of(canary)
        self.mounts = HostMounts(canary)

    def meet(self, bundle: Bundle, place: str, obstacle: Obstacle, start: Start) -> None:
        """Put the obstacle at a place of the bundle's root, and start the container. The root is half an image then,
        so the start may fail; by our word, not by a traceback."""
        path = bundle.root / place
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            path.rename(path.with_name(f"{path.name}.aside"))
        path.parent.mkdir(parents=True, exist_ok=True)
        obstacle(path, self.canary)
        done = start()
        assert tree_of(self.canary) == self.before, (place, done.stderr)
        assert self.mounts.changed() == [], place
        assert "Traceback" not in done.stderr, (place, done.stderr)
        shutil.rmtree(bundle.root)


@pytest.mark.parametrize(
    ("prestart", "obstacle"),
    [
        pytest.param(
            way,
            obstacle,
            marks=[pytest.mark.long] if way == "walk" and obstacle not in BOTH_IN_EACH_RUN else [],
            id=f"{way}-{obstacle.__name__}",
        )
        for way in ("openat2", "walk")
        for obstacle in OBSTACLES
    ],
    indirect=["prestart"],
)
def test_nothing_outside_of_the_root_changes(
    prestart: Prestart,
    make_bundle: MakeBundle,
    canary: Path,
    obstacle: Obstacle,
) -> None:
    watch = Watch(canary)
    for place in PLACES:
        bundle = make_bundle("true", env=visible("all", "all"), prestart=prestart())
        watch.meet(bundle, place, obstacle, partial(bundle.run, timeout=30))


@pytest.mark.parametrize("prestart", ["openat2", "walk"], indirect=True)
@pytest.mark.parametrize("lead", [absolute, upwards])
def test_nothing_of_the_hosts_is_read(
    prestart: Prestart, make_bundle: MakeBundle, canary: Path, lead: Obstacle
) -> None:
    """A cache and a configuration outside: not a name of theirs shows in what the container gets."""
    (canary / "ld.so.cache").write_bytes(Path("/etc/ld.so.cache").read_bytes().replace(b"/libc.so.6", b"/libSECRET"))
    (canary / "ld.so.conf").write_text("/SECRET/lib\n")
    bundle = make_bundle("true", env=visible("all", "all"), prestart=prestart())
    for name in ("ld.so.cache", "ld.so.conf"):
        (bundle.root / "etc" / name).unlink(missing_ok=True)
        lead(bundle.root / "etc" / name, canary / name)
    done = bundle.run()
    assert done.returncode == 0, done.stderr
    made = bundle.root / "etc/ld.so.cache"
    assert not made.is_symlink() and b"libcuda.so.1" in made.read_bytes()
    assert [path for path in bundle.root.glob("etc/**/*") if path.is_file() and b"SECRET" in path.read_bytes()] == []


# What a createContainer hook writes to or goes through: it runs with the host's / as its root directory.
FINISHED = (*PLACES[:3], "usr/lib/x86_64-linux-gnu/libcuda.so.1", "etc", "etc/ld.so.cache", "opt", "opt/own/lib")


@pytest.mark.parametrize("obstacle", OBSTACLES, ids=lambda obstacle: obstacle.__name__)
def test_a_create_container_hook_changes_nothing_outside(
    prefix: Path,
    host: SimulatedHost,
    make_bundle: MakeBundle,
    canary: Path,
    noopenat2: Path,
    obstacle: Obstacle,
) -> None:
    watch = Watch(canary)
    library = host.library("libcuda.so.1")
    words = [str(prefix / "bin/nvhook-create-container"), "--driver", "580.159.04"]
    for folder in (MULTIARCH, "/opt/own/lib"):
        words += ["--link", f"{library.name}::{folder}/libcuda.so.1", "--folder", folder]
    for number, place in enumerate(FINISHED):
        # By turns in both ways: the look-ups are those of prestart, which meets each obstacle in each.
        hooks = [hook(*words), hook(noopenat2, *words)]
        bundle = make_bundle("true", create_container=[hooks[number % 2]])
        watch.meet(bundle, place, obstacle, partial(bundle.run, timeout=30))


SWAP = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
one, other = (name.encode() for name in sys.argv[1:])
AT_FDCWD, RENAME_EXCHANGE = -100, 2
while libc.renameat2(AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE) == 0:
    pass
"""


@pytest.mark.parametrize("place", ["usr/lib/x86_64-linux-gnu", "etc", "usr/bin"])
@pytest.mark.parametrize(
    ("prestart", "runs"),
    [
        ("openat2", 10),
        ("walk", 10),
        # Over a thousand, all folders together.
        pytest.param("openat2", 350, marks=pytest.mark.long),
        pytest.param("walk", 100, marks=pytest.mark.long),
    ],
    indirect=["prestart"],
)
def test_a_folder_that_becomes_a_link_meanwhile(
    prestart: Prestart, make_bundle: MakeBundle, canary: Path, place: str, runs: int
) -> None:
    bundle = make_bundle("true", env=visible("all"), prestart=prestart())
    path = bundle.root / place
    link = path.with_name("to-be-swapped")
    link.symlink_to(canary)
    before, mounts = tree_of(canary), HostMounts(canary)
    command = [sys.executable, "-c", SWAP, str(path), str(link)]
    swapper = subprocess.Popen(command)
    try:
        for _ in range(runs):
            bundle.run(timeout=30)
            assert tree_of(canary) == before
            assert mounts.changed() == []
        assert swapper.poll() is None, "the race ended before the runs did"
    finally:
        swapper.kill()
        swapper.wait()


def test_killed_at_any_step(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle) -> None:
    """SIGKILL, as by a runtime's timeout: no mount is left, no process, and the next start works."""
    bundle = make_bundle("resolve libcuda.so.1", env=visible("all"), prestart=[])
    mounts = HostMounts(prefix)
    place = 0
    while True:
        arguments = ("-I", "-S", str(KILL_HOOK), str(prefix / "lib/nvhook"), str(host.root), str(place))
        bundle.prestart = [proc_hook(), hook(sys.executable, *arguments)]
        done = bundle.run()
        assert mounts.changed() == [], place
        assert naming(bundle.folder) == [], place
        if done.returncode == 0:
            break
        assert "signal: killed" in done.stderr, done.stderr
        place += 1
    assert place > 30
    bundle.prestart = nvhook(prefix, host)
    assert bundle.run().stdout == f"libcuda.so.1 {MULTIARCH}/libcuda.so.1\n"
    assert [path.name for path in bundle.root.rglob(".*nvhook-*")] == []


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
    # Nor do its programs, among them what NVIDIA's hook runs.
    for name in ("sbin/ldconfig", "sbin/ldconfig.real", "usr/bin/nvidia-smi", "usr/bin/env", "bin/modprobe"):
        path = bundle.root / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/sh\necho > {marker}\n")
        path.chmod(0o755)
    root = str(bundle.root)
    env = [f"LD_PRELOAD={root}/planted.so", f"LD_AUDIT={root}/planted.so", f"LD_LIBRARY_PATH={root}", f"PATH={root}"]
    env += [f"{name}={root}" for name in ("PYTHONPATH", "PYTHONHOME", "GCONV_PATH", "LOCPATH", "PYTHONUSERBASE")]
    env += [f"PYTHONSTARTUP={root}/json.py", f"XDG_RUNTIME_DIR={root}"]
    if stage == "prestart":
        bundle.prestart = nvhook(prefix, host)
        bundle.prestart[-1]["env"] = env
    else:
        words = ["--link", f"x::{MULTIARCH}/libx.so"]
        more = ["--folder", MULTIARCH, "--driver", "580.159.04"] if stage == "create_container" else []
        link = hook(prefix / "bin/nvhook-create-container", *words, *more)
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

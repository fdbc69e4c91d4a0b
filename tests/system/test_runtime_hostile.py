# SPDX-License-Identifier: Apache-2.0
"""The runtime writes into an image's root from the host's side: nothing outside of it changes, whatever is there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.needs import needs_program
from tests.simhost import SimulatedHost
from tests.system import test_canary, test_launcher
from tests.system.prestart import MULTIARCH, HostMounts, tree_of, visible
from tests.system.shim import Shim, config

pytestmark = needs_program("runc")

canary = test_canary.canary
planted = test_launcher.planted
mark = test_launcher.mark


@pytest.fixture
def shim(prefix: Path, host: SimulatedHost, tmp_path: Path) -> Shim:
    return Shim(prefix, host, tmp_path)


# A few of each sort; the rest goes through the same look-ups, and takes a minute.
SOON = (test_canary.absolute, test_canary.through_proc, test_canary.fifo, test_canary.file)
OBSTACLES = [
    pytest.param(obstacle, marks=[] if obstacle in SOON else [pytest.mark.long]) for obstacle in test_canary.OBSTACLES
]


@pytest.mark.parametrize("obstacle", OBSTACLES, ids=lambda obstacle: obstacle.__name__)
def test_nothing_outside_of_the_root_changes(shim: Shim, canary: Path, obstacle: test_canary.Obstacle) -> None:
    watch = test_canary.Watch(canary)
    for place in test_canary.PLACES:
        bundle = shim.bundle("true", env=visible("all", "all"))
        watch.meet(bundle, place, obstacle, partial(shim.run, bundle, timeout=30))


@pytest.fixture
def alone(prefix: Path, host: SimulatedHost, tmp_path: Path) -> Iterator[Shim]:
    """The shim before a runtime that does nothing. runc makes mount points of config.json by their names; up to 1.1.13
    it can be raced into making empty files elsewhere (CVE-2024-45310), whoever wrote config.json."""
    shim = Shim(prefix, host, tmp_path, "nvhook-runtime.alone")
    state = host.root / "run/nvhook/runtime.nvhook-runtime.alone"
    state.parent.mkdir(exist_ok=True)
    state.write_text("/bin/true\n")
    yield shim
    state.unlink()


@pytest.mark.parametrize("place", ["usr/lib/x86_64-linux-gnu", "etc"])
# A thousand, both folders together.
@pytest.mark.parametrize("runs", [20, pytest.param(500, marks=pytest.mark.long)])
def test_a_folder_that_becomes_a_link_meanwhile(alone: Shim, canary: Path, place: str, runs: int) -> None:
    """A root that two containers share: one of them swaps while the other is made."""
    bundle = alone.bundle("true", env=visible("all"))
    path = bundle.root / place
    link = path.with_name("to-be-swapped")
    link.symlink_to(canary)
    before, mounts = tree_of(canary), HostMounts(canary)
    swapper = subprocess.Popen([sys.executable, "-c", test_canary.SWAP, str(path), str(link)])
    edited = tried = 0
    try:
        # How many get through depends on the machine's mood; without one that does the test would prove nothing.
        while tried < runs or (not edited and tried < 20 * runs):
            tried += 1
            bundle.write()
            done = alone.call(bundle, "create", "--bundle", str(bundle.folder), bundle.name)
            edited += "nvhook.request" in config(bundle)["annotations"]
            assert "Traceback" not in done.stderr, done.stderr
            assert tree_of(canary) == before
        assert mounts.changed() == []
        assert swapper.poll() is None, "the race ended before the runs did"
        assert edited
    finally:
        swapper.kill()
        swapper.wait()


def test_a_root_that_is_the_hosts(shim: Shim) -> None:
    bundle = shim.bundle("true", env=visible("0"), root=Path("/"))
    done = shim.run(bundle)
    assert done.returncode == 1 and "the container's root / is the host's own /" in done.stderr


@pytest.mark.parametrize("made", [True, False])
def test_a_link_into_a_volume(shim: Shim, made: bool) -> None:
    """/usr/bin leads to where a volume will be, perhaps not yet: the runtime would make files of ours in it."""
    volume = shim.folder / "volume"
    volume.mkdir()
    bundle = shim.bundle("true", env=visible("0"))
    for name in ("data", "usr/local/data") if made else ():
        (bundle.root / name).mkdir(parents=True)
    (bundle.root / "usr/bin").rename(bundle.root / "usr/bin.aside")
    (bundle.root / "usr/bin").symlink_to("../usr/local/link")
    (bundle.root / "usr/local").mkdir(exist_ok=True)
    (bundle.root / "usr/local/link").symlink_to("/data")
    bundle.mounts = [{"destination": "/data", "type": "bind", "source": str(volume), "options": ["rbind", "rw"]}]
    done = shim.run(bundle)
    assert "left out: /usr/bin/nvidia-smi in the container is in a mount from elsewhere" in done.stderr
    assert list(volume.iterdir()) == []


@pytest.mark.parametrize("target", ["/proc/1/root", "/sys/x", "../../dev/x", "loop"])
def test_a_link_to_where_nothing_can_be_mounted(shim: Shim, target: str) -> None:
    """runc would refuse the whole container."""
    bundle = shim.bundle("resolve libcuda.so.1", env=visible("0"))
    (bundle.root / "usr/bin/nvidia-smi").symlink_to(target)
    (bundle.root / "usr/bin/loop").symlink_to("loop")
    done = shim.run(bundle)
    assert done.stdout == f"libcuda.so.1 {MULTIARCH}/libcuda.so.1\n", done.stderr
    assert "left out: " in done.stderr and "/usr/bin/nvidia-smi" in done.stderr


def test_a_folder_behind_a_chain_of_long_links(alone: Shim) -> None:
    """Each part of each link was looked for by the whole path: 46 seconds."""
    bundle = alone.bundle("true", env=visible("0"))
    for number in range(39):
        (bundle.root / f"l{number}").symlink_to(f"/l{number + 1}" + "/a" * 2040)
    (bundle.root / "usr/bin").rename(bundle.root / "usr/bin.aside")
    (bundle.root / "usr/bin").symlink_to("/l0")
    bundle.write()
    done = alone.call(bundle, "create", "--bundle", str(bundle.folder), bundle.name)
    assert done.returncode == 0
    assert "left out: /usr/bin in the container is too long, or has too many links, to be followed" in done.stderr


def test_a_volume_with_an_endless_destination(alone: Shim) -> None:
    mounts = [{"destination": "/v" + "/a" * 40_000, "type": "bind", "source": "/var", "options": ["rbind"]}]
    bundle = alone.bundle("true", env=visible("0"), mounts=mounts)
    bundle.write()
    before = (bundle.folder / "config.json").read_bytes()
    done = alone.call(bundle, "create", "--bundle", str(bundle.folder), bundle.name)
    assert done.returncode == 1 and "is too long, or has too many links, to be followed" in done.stderr
    assert (bundle.folder / "config.json").read_bytes() == before


def test_a_mount_inside_of_the_root(shim: Shim, canary: Path) -> None:
    """Somebody has mounted a folder of the host's below the root before the container is made."""
    bundle = shim.bundle("true", env=visible("0"))
    bundle.write()
    place = bundle.root / MULTIARCH.lstrip("/")
    before = tree_of(canary)
    command = shim.command(bundle, "run", "--bundle", str(bundle.folder), bundle.name)
    script = f'mount --bind {canary} {place}; exec "$@"'
    wrapped = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *command]
    done = subprocess.run(wrapped, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "is a mount from elsewhere; nvhook makes no files in it" in done.stderr
    assert tree_of(canary) == before


def test_an_annotation_of_the_containers_gives_nothing(shim: Shim) -> None:
    """The mark of our own work keeps a GPU away, and that is all."""
    bundle = shim.bundle("ls /dev | grep -c nvidia", env=visible("all"), annotations={"nvhook.request": "{}"})
    assert shim.run(bundle).stdout == "0\n"
    assert json.dumps(config(bundle)) == json.dumps(bundle.config())


@pytest.mark.parametrize("trap", test_launcher.TRAPS, ids=lambda trap: trap.variable)
def test_planted_code_does_not_run(
    prefix: Path, tmp_path: Path, trap: test_launcher.Trap, planted: Path, mark: Path
) -> None:
    """Neither in the shim nor in its child, whatever the caller's environment, and in the folder of planted modules.
    No low-level runtime is found here: that gets the environment, and would be trapped."""
    host = tmp_path / "host"
    (host / "etc/nvhook").mkdir(parents=True)
    (host / "run").mkdir()
    (host / "etc/nvhook/config.toml").write_text('[runtime]\nruntimes = "/no/such/runtime"\n')
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "config.json").write_text(json.dumps({"root": {"path": "/r"}}))
    done = subprocess.run(
        [str(prefix / "bin/nvhook-runtime"), "--host-root", str(host), "create", "--bundle", str(bundle), "abc"],
        env=test_launcher.aim(trap, planted),
        cwd=planted,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "no low-level runtime: none of /no/such/runtime can be executed" in done.stderr
    assert not mark.exists()

# SPDX-License-Identifier: Apache-2.0
"""Many starts at once, a limit of descriptors beyond all measure, a start that is killed anywhere or waits for a
process that is stuck: what works goes on working, and nothing stays behind."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.containers import CGROUP, Bundle, Hook, hook
from tests.needs import needs_program
from tests.simhost import SimulatedHost
from tests.system.conftest import MakeBundle
from tests.system.prestart import MULTIARCH, HostMounts, naming, nvhook, output, proc_hook, visible

pytestmark = needs_program("runc")

KILLPOINT = Path(__file__).resolve().parents[1] / "killpoint.py"
FOUND = f"libcuda.so.1 {MULTIARCH}/libcuda.so.1\n"
NR_OPEN = Path("/proc/sys/fs/nr_open")

# Runs argv[3:] with argv[1] descriptors as its limit, and writes what it took into argv[2].
MEASURE = """
import json, os, resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
pid = os.posix_spawn(sys.argv[3], sys.argv[3:], {})
status, used = os.wait4(pid, 0)[1:]
with open(sys.argv[2], "w") as file:
    json.dump([1000 * (used.ru_utime + used.ru_stime), used.ru_maxrss], file)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def kept(host: SimulatedHost) -> list[str]:
    """What the host keeps in /run/nvhook."""
    return sorted(os.listdir(host.root / "run/nvhook"))


def forget(host: SimulatedHost) -> None:
    """The next start is a cold one."""
    shutil.rmtree(host.root / "run/nvhook", ignore_errors=True)


def cgroups() -> list[str]:
    """Our containers' cgroups. Others come and go while we look, which os.walk doesn't mind."""
    return [name for _, names, _ in os.walk(CGROUP) for name in names if name.startswith(f"nvhook-test-{os.getpid()}-")]


@pytest.mark.parametrize(("starts", "in_flight"), [(24, 8), pytest.param(200, 20, marks=pytest.mark.long)])
def test_many_starts(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, starts: int, in_flight: int) -> None:
    """From a cold inventory on, so many in flight at each moment: all are right, and none leaves anything."""
    forget(host)
    mounts, there = HostMounts(prefix), cgroups()
    making = threading.Lock()

    def one(number: int) -> tuple[str, list[str], list[int]]:
        with making:
            bundle = make_bundle("resolve libcuda.so.1", env=visible(str(number % 2)), prestart=nvhook(prefix, host))
        done = bundle.run(timeout=200)
        left = [path.name for path in bundle.root.rglob(".*nvhook-*")]
        shutil.rmtree(bundle.root)
        return done.stdout + done.stderr, left, naming(bundle.folder)

    with ThreadPoolExecutor(in_flight) as pool:
        assert list(pool.map(one, range(starts))) == [(FOUND, [], [])] * starts
    assert mounts.changed() == []
    assert cgroups() == there
    assert kept(host) == ["inventory.json", "lock"]


def most_descriptors() -> int:
    """2^30, as engines used to give containers, or as many as may be had here."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = min(1 << 30, int(NR_OPEN.read_text()))
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
        except (OSError, ValueError):
            # Raising it takes CAP_SYS_RESOURCE.
            os._exit(1)
        os._exit(0)
    return wanted if os.waitpid(pid, 0)[1] == 0 else hard


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
def test_a_limit_of_descriptors_costs_nothing(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path, cold: bool
) -> None:
    """Programs that close each descriptor up to the limit, or make a table of that length, have taken minutes there."""
    limits = 1024, most_descriptors()
    assert limits[1] >= 4 * limits[0]
    taken: dict[int, list[list[float]]] = {limit: [] for limit in limits}
    launcher = nvhook(prefix, host)[-1]["args"]

    def shortest() -> list[list[float]]:
        return [list(map(min, zip(*taken[limit], strict=True))) for limit in limits]

    def dearer() -> bool:
        # Even one system call for each of 20,000 would be 10 ms; 1 MiB is less than 2^17 entries of a table.
        usual, most = shortest()
        return most[0] >= 1.5 * usual[0] + 5 or most[1] >= usual[1] + 1024

    # What a limit costs is there each time; a busy machine's moods are not.
    while len(taken[limits[0]]) < 4 or (dearer() and len(taken[limits[0]]) < 16):
        for limit in limits:
            if cold:
                forget(host)
            measured = hook(sys.executable, "-c", MEASURE, str(limit), str(tmp_path / "taken"), *launcher)
            bundle = make_bundle("resolve libcuda.so.1", env=visible("all"), prestart=[proc_hook(), measured])
            assert output(bundle) == FOUND
            taken[limit].append(json.loads((tmp_path / "taken").read_text()))
    assert not dearer(), shortest()


def prestart(prefix: Path, host: SimulatedHost, *before: str, python: str = sys.executable) -> list[Hook]:
    """The hooks of a container, the installed one started by hand: `before` stands between interpreter and program."""
    text = (
        f"import sys; sys.path[:0] = [{str(prefix / 'lib/nvhook')!r}]; sys.executable = {python!r}\n"
        "from hook import start; start.main()"
    )
    words = ["-c", text, "prestart", "--host-root", str(host.root)]
    return [proc_hook(), hook(sys.executable, "-I", "-S", "-B", *before, *words)]


@pytest.mark.parametrize("points", [16, pytest.param(60, marks=pytest.mark.long)])
@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
def test_killed_anywhere(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path, cold: bool, points: int
) -> None:
    """SIGKILL before any of a start's calls into the kernel, its first and its last among them."""
    report = tmp_path / "calls"

    def killed_at(place: int) -> Bundle:
        """A start that is to be killed there, in a root that none was made in yet: a second one has less to do."""
        if cold:
            forget(host)
        hooks = prestart(prefix, host, str(KILLPOINT), str(place), str(report))
        return make_bundle("resolve libcuda.so.1", env=visible("all"), prestart=hooks)

    assert output(killed_at(0)) == FOUND
    calls = int(report.read_text())
    assert calls > 300
    mounts, there = HostMounts(prefix), cgroups()
    for place in sorted({1 + (calls - 1) * number // (points - 1) for number in range(points)}):
        bundle = killed_at(place)
        done = bundle.run()
        # Waiting for a child takes a number of calls that differs: a few late places may be past the end.
        assert "signal: killed" in done.stderr or (cold and place > calls // 2 and done.stdout == FOUND), place
        assert mounts.changed() == [], place
        assert gone(bundle.folder) and gone(host.root), place
        assert cgroups() == there, place
        bundle.prestart = nvhook(prefix, host)
        assert output(bundle) == FOUND, place
        assert [path.name for path in bundle.root.rglob(".*nvhook-*")] == [], place
        assert kept(host) == ["inventory.json", "lock"], place
        shutil.rmtree(bundle.root)


def gone(folder: Path) -> bool:
    """Whether no process names the folder, a moment from now at the latest: a renewal's ends with its start."""
    end = time.monotonic() + 10
    while naming(folder):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.long
def test_a_renewal_that_is_stuck(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path) -> None:
    """The start fails at its deadline, naming the process, and the next one neither waits nor fails."""
    forget(host)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nkill -STOP $$\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    bundle = make_bundle(
        "resolve libcuda.so.1", env=visible("all"), prestart=prestart(prefix, host, python=str(python))
    )
    began = time.monotonic()
    done = bundle.run(timeout=120)
    assert 30 <= time.monotonic() - began < 60
    assert "nvhook: error: renewing the inventory took too long: its process " in done.stderr
    began = time.monotonic()
    bundle.prestart = nvhook(prefix, host)
    assert output(bundle) == FOUND
    assert time.monotonic() - began < 20
    assert kept(host) == ["inventory.json", "lock"]

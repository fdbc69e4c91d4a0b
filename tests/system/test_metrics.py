# SPDX-License-Identifier: Apache-2.0
"""`nvhook metrics`: what real starts of real containers are counted as, and which containers have GPUs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hook import record
from ldcache import root
from tests import simhost
from tests.containers import Bundle, hook
from tests.needs import needs_program
from tests.simhost import SimulatedHost
from tests.system.conftest import MakeBundle
from tests.system.prestart import nvhook, output, visible
from tests.system.shim import Shim

pytestmark = needs_program("runc")

TREE = Path(__file__).resolve().parents[2]
SAMPLE = re.compile(r"(\w+)\{(.*)\} (\S+)")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[SimulatedHost]:
    """A host of this test's own."""
    made = simhost.build(tmp_path / "host", simhost.Host(gpus=simhost.gpus(2)))
    yield made
    made.close()


def command(machine: SimulatedHost, *words: str) -> list[str]:
    return [sys.executable, "-m", "hook", "metrics", "--host-root", str(machine.root), *words]


def collect(machine: SimulatedHost, *words: str) -> dict[str, dict[str, float]]:
    """Values by labels, by metric."""
    done = subprocess.run(command(machine, *words), cwd=TREE, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    text = done.stdout if words else (machine.root / "run/nvhook/nvhook.prom").read_text()
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            found.setdefault(match[1], {})[match[2]] = float(match[3])
    return found


def files(machine: SimulatedHost) -> set[str]:
    folder = machine.root / "run/nvhook"
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def test_nobody_counts_until_somebody_asks(prefix: Path, machine: SimulatedHost, make_bundle: MakeBundle) -> None:
    output(make_bundle("true", env=visible("0"), prestart=nvhook(prefix, machine)))
    assert files(machine) & {"starts", "nvhook.prom"} == set()
    assert collect(machine)["nvhook_gpu_containers"] != {}
    output(make_bundle("true", env=visible("0"), prestart=nvhook(prefix, machine)))
    # A container that asks for none is none of ours.
    output(make_bundle("true", prestart=nvhook(prefix, machine)))
    output(make_bundle("true", env=visible("void"), prestart=nvhook(prefix, machine)))
    assert collect(machine)["nvhook_starts_total"] == {'way="prestart"': 1}
    assert (machine.root / "run/nvhook/nvhook.prom").stat().st_mode & 0o777 == 0o644
    assert collect(machine, "--output", "-")["nvhook_starts_total"] == {'way="prestart"': 1}
    subprocess.run(command(machine, "--stop"), cwd=TREE, check=True)
    assert not files(machine) & {"starts", "starts.old", "counters.json", "nvhook.prom"}


def test_failures_by_reason(prefix: Path, machine: SimulatedHost, make_bundle: MakeBundle) -> None:
    collect(machine)
    wanted = {
        "request": visible("7"),
        "requirements": visible("0") | {"NVIDIA_REQUIRE_CUDA": "cuda>=99.0"},
        "host": visible("0", "compute"),
    }
    for reason, env in wanted.items():
        if reason == "host":
            machine.library("libcuda.so.1").unlink()
        assert make_bundle("true", env=env, prestart=nvhook(prefix, machine)).run().returncode != 0
    (machine.root / "etc/nvhook").mkdir()
    (machine.root / "etc/nvhook/config.toml").write_text("[log")
    assert make_bundle("true", env=visible("0"), prestart=nvhook(prefix, machine)).run().returncode != 0
    failures = {f'way="prestart",reason="{reason}"': 1.0 for reason in (*wanted, "inventory")}
    metrics = collect(machine)
    assert metrics["nvhook_start_failures_total"] == failures
    assert "nvhook_starts_total" not in metrics and "nvhook_container_gpu" not in metrics


def test_each_way_and_its_steps(prefix: Path, machine: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path) -> None:
    collect(machine)
    output(make_bundle("true", env=visible("0"), prestart=nvhook(prefix, machine)))
    shim = Shim(prefix, machine, tmp_path / "shim")
    shim.output(shim.bundle("true", env=visible("1")))
    finish = hook(prefix / "bin/nvhook-create-container", "--host-root", str(machine.root), "--link", "x::/usr/lib/x")
    output(make_bundle("true", create_container=[finish]))
    metrics = collect(machine)
    ways = {f'way="{way}"' for way in ("prestart", "runtime", "create-container")}
    assert metrics["nvhook_starts_total"] == dict.fromkeys(ways, 1.0)
    counts, sums = (metrics[f"nvhook_step_milliseconds_{kind}"] for kind in ("count", "sum"))
    for way, steps in {
        "prestart": ("inventory", "request", "plan", "namespace", "node", "mount", "rules", "loadercache"),
        "runtime": ("inventory", "request", "plan", "link", "loadercache", "configuration"),
        "create-container": ("namespace", "plan", "link"),
    }.items():
        for step in steps:
            labels = f'way="{way}",step="{step}"'
            assert counts[labels] >= 1 and 0 < sums[labels] < 60000, labels


def running(bundle: Bundle, runtime: str = "runc") -> None:
    """Start a container that stays."""
    bundle.write()
    with Path("/dev/null").open("r+") as null:
        words = [*bundle.command(runtime), "create", "--bundle", str(bundle.folder), bundle.name]
        done = subprocess.run(words, stdin=null, stdout=null, stderr=null, check=False, timeout=60)
    assert done.returncode == 0


def delete(bundle: Bundle, runtime: str = "runc") -> None:
    subprocess.run([*bundle.command(runtime), "delete", "--force", bundle.name], check=False, capture_output=True)


def test_gpus_in_use_by_container(
    prefix: Path, machine: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    collect(machine)
    one = make_bundle("sleep 600", env=visible("0,1"), prestart=nvhook(prefix, machine))
    shim = Shim(prefix, machine, tmp_path / "shim")
    two = shim.bundle("sleep 600", env=visible("1"))
    uuids = [gpu.uuid for gpu in machine.host.gpus]
    try:
        running(one)
        running(two, str(shim.program))
        metrics = collect(machine)
        used = {tuple(re.findall('container="(.*?)",gpu="(.*?)"', text)[0]) for text in metrics["nvhook_container_gpu"]}
        assert used == {(one.name, "0"), (one.name, "1"), (two.name, "1")}
        by_gpu = {re.findall('uuid="(.*?)"', text)[0]: n for text, n in metrics["nvhook_gpu_containers"].items()}
        assert by_gpu == {uuids[0]: 1, uuids[1]: 2}
        delete(one)
        (left,) = collect(machine)["nvhook_container_gpu"]
        assert f'container="{two.name}"' in left
    finally:
        delete(one)
        delete(two, str(shim.program))
    # The other one's process was not known. It is new, so its runtime may just not have made its folder.
    counters = machine.root / "run/nvhook/counters.json"
    value = json.loads(counters.read_text())
    value["containers"][two.name]["at"] -= 61
    counters.write_text(json.dumps(value))
    assert set(collect(machine)["nvhook_gpu_containers"].values()) == {0.0}


def writer(machine: SimulatedHost, count: int, size: int = 1) -> None:
    """Starts, as far as their records go."""
    host = root.open_host(str(machine.root))
    for number in range(count):
        one = record.Record(host, "prestart", "inventory", f"c{number}" * size)
        one.use([{"minor": 0}], [])
        one.end()
    os.close(host)


def test_many_starts_at_once_while_the_file_is_set_aside(machine: SimulatedHost) -> None:
    """512 KiB are a moment's work for these; each record counts once, and none is lost."""
    collect(machine)
    threads = [threading.Thread(target=writer, args=(machine, 1500)) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        collect(machine)
    assert collect(machine)["nvhook_starts_total"] == {'way="prestart"': 6000}
    assert "starts.old" in files(machine)
    assert collect(machine)["nvhook_starts_total"] == {'way="prestart"': 6000}


def test_a_killed_collector_counts_nothing_twice(machine: SimulatedHost) -> None:
    collect(machine)
    for number in range(12):
        writer(machine, 100)
        child = subprocess.Popen(command(machine), cwd=TREE)
        try:
            child.wait(0.05 + 0.015 * number)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
        child.wait()
    assert collect(machine)["nvhook_starts_total"] == {'way="prestart"': 1200}


def test_where_nobody_reads_the_file_stays_small(machine: SimulatedHost) -> None:
    collect(machine)
    writer(machine, 6000, size=20)
    size = (machine.root / "run/nvhook/starts").stat().st_size
    assert record.SIZE_MAX <= size < record.SIZE_MAX + 4096
    assert 0 < collect(machine)["nvhook_starts_total"]['way="prestart"'] < 6000
    # A new file is begun, and counting goes on.
    before = collect(machine)["nvhook_starts_total"]['way="prestart"']
    writer(machine, 10)
    assert collect(machine)["nvhook_starts_total"]['way="prestart"'] == before + 10


def test_a_file_that_others_may_write_is_left_alone(
    prefix: Path, machine: SimulatedHost, make_bundle: MakeBundle
) -> None:
    collect(machine)
    starts = machine.root / "run/nvhook/starts"
    starts.chmod(0o666)
    writer(machine, 1)
    assert starts.read_text() == ""
    starts.unlink()
    starts.symlink_to("/dev/full")
    output(make_bundle("true", env=visible("0"), prestart=nvhook(prefix, machine)))
    starts.unlink()
    # A disk that is full.
    os.mkfifo(starts)
    output(make_bundle("true", env=visible("0"), prestart=nvhook(prefix, machine)))


def test_what_a_container_is_called_stays_in_its_label(machine: SimulatedHost) -> None:
    collect(machine)
    host = root.open_host(str(machine.root))
    one = record.Record(host, "runtime", "inventory", 'a"} 1\nnvhook_fake 2\\\udcff')
    one.place = "/"
    one.use([], ['vendor/class="x'])
    one.end()
    with (machine.root / "run/nvhook/starts").open("ab") as file:
        file.write(b'\n{"verb": "prestart", "fai\n[]\nnull\n\xff\n')
    text = "".join(collect(machine)["nvhook_container_gpu"])
    assert text.startswith('container="a\\"} 1\\nnvhook_fake 2\\\\')
    assert text.endswith('gpu="vendor/class=\\"x",uuid="",bus_id=""')


def test_output_elsewhere(machine: SimulatedHost, tmp_path: Path) -> None:
    assert collect(machine, "--output", str(tmp_path / "nvhook.prom")) == {}
    assert (tmp_path / "nvhook.prom").read_text().startswith("# HELP nvhook_starts_total ")
    words = command(machine, "--output", str(tmp_path / "none/nvhook.prom"))
    done = subprocess.run(words, cwd=TREE, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"nvhook: error: cannot write {tmp_path}/none/nvhook.prom: No such file")


def test_output_where_others_may_write(machine: SimulatedHost, tmp_path: Path) -> None:
    """Nothing that another user put beside it is written to, removed, waited for, or makes the run fail."""
    folder = tmp_path / "everybody's"
    folder.mkdir()
    folder.chmod(0o1777)
    victim = tmp_path / "victim"
    victim.write_text("kept")
    # Named as a temporary file of a process, and as one of ours by chance.
    (folder / ".x.prom.d").mkdir()
    (folder / f".x.prom.{'0' * 16}").mkdir()
    (folder / f".x.prom.{'1' * 16}").symlink_to(victim)
    os.mkfifo(folder / f".x.prom.{'2' * 16}")
    os.link(victim, folder / f".x.prom.{'3' * 16}")
    (folder / ".x.prom.swp").write_text("an editor's")
    os.chown(victim, 4242, 4242)
    planted = sorted(os.listdir(folder))
    own = folder / f".x.prom.{'4' * 16}"
    own.write_text("left by one that was killed")
    collect(machine, "--output", str(folder / "x.prom"))
    assert (folder / "x.prom").read_text().startswith("# HELP nvhook_starts_total ")
    assert sorted(os.listdir(folder)) == sorted([*planted, "x.prom"])
    assert victim.read_text() == "kept"

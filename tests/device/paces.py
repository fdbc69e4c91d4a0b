# SPDX-License-Identifier: Apache-2.0
"""Times with one GPU and with all, in turn, so that drift of the machine meets all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import start
from tests.device.appliers import Appliers, Way
from tests.device.machines import Machine

# A start with one GPU of many may take this much longer than on a host that has no other one, by the medians and by the
# shortest: on a busy machine either alone is luck.
TOLERANCE = 1.25
ROUNDS_TO_JUDGE = 10

START = "start, "
# It is given a path that is free.
Work = Callable[[Path], float]


# Of each kind of work, with which GPUs: "one" of the machine's, "all" of them, and "alone", which is the only one of
# another host.
Times = dict[tuple[str, str], list[float]]


def measure(appliers: Appliers, alone: Appliers | None, folder: Path, rounds: int) -> Times:
    """Milliseconds of each kind of work, once a round, in turn. The first round, which fills caches, is left out."""
    work = _kinds(appliers, alone)
    times: Times = {key: [] for key in work}
    for number in range(rounds + 1):
        for key, one in work.items():
            spent = one(folder / f"pace-{number}")
            if number:
                times[key].append(spent)
    return times


def table(times: Times) -> list[str]:
    """Medians, and ratios to one GPU."""
    made = [f"{'milliseconds (median)':24}{'alone':>10}{'one':>10}{'all':>10}{'all/one':>10}{'one/alone':>10}"]
    for name in dict.fromkeys(name for name, _ in times):
        alone, one, every = (_median(times, name, which) for which in ("alone", "one", "all"))
        values = (alone, one, every, _ratio(every, one), _ratio(one, alone))
        made.append(f"{name:24}" + "".join(f"{'-':>10}" if value is None else f"{value:10.2f}" for value in values))
    return made


def misses(times: Times) -> list[str]:
    """Starts with one GPU that take longer for the others of the host; none where too few rounds were made."""
    if min(map(len, times.values())) < ROUNDS_TO_JUDGE:
        return []
    found = []
    for name in [name for name, which in times if which == "alone" and name.startswith(START)]:
        one, alone = times[name, "one"], times[name, "alone"]
        ratio = min(statistics.median(one) / statistics.median(alone), min(one) / min(alone))
        if ratio > TOLERANCE:
            found.append(f"{name}, with one GPU takes {ratio:.2f} times as long as on a host of one")
    return found


def _kinds(appliers: Appliers, alone: Appliers | None) -> dict[tuple[str, str], Work]:
    machine = appliers.machine
    work: dict[tuple[str, str], Work] = {
        ("inventory", "all"): partial(_renew, machine),
        ("cdi generate", "one"): partial(_generate, machine, ("--device-id", "0")),
        ("cdi generate", "all"): partial(_generate, machine, ()),
    }
    if alone:
        work["inventory", "alone"] = partial(_renew, alone.machine)
        work["cdi generate", "alone"] = partial(_generate, alone.machine, ())
    for way in appliers.ways:
        work[START + way.name, "one"] = _start(way, "0")
        # Side by side, since these two are compared.
        for same in [same for same in (alone.ways if alone else []) if same.name == way.name]:
            work[START + way.name, "alone"] = _start(same, "0")
        work[START + way.name, "all"] = _start(way, "all")
    return work


def _start(way: Way, asked: str) -> Work:
    fields = way.bundle([asked])
    # benchmarks.start wants all that stands for runc in one place.
    options = fields.pop("options", [])
    kind = start.Way(fields, [] if way.runtime == "runc" else [way.runtime, *options])
    return lambda place: start.one(place, kind, start.create)


def _renew(machine: Machine, place: Path) -> float:
    return _cold(machine, "inventory", "--refresh")


def _generate(machine: Machine, words: tuple[str, ...], place: Path) -> float:
    # The file is thrown away: whether that hook is there does not matter.
    file = place.with_name(f"{place.name}.json")
    words = ("--output", str(file), "--hook-path", "/usr/bin/nvhook-create-container", *words)
    spent = _cold(machine, "cdi", "generate", *words)
    file.unlink()
    return spent


def _cold(machine: Machine, *words: str) -> float:
    """A command of nvhook, its interpreter's start included. Raises SystemExit if it fails."""
    began = time.perf_counter()
    done = machine.nvhook(*words)
    spent = (time.perf_counter() - began) * 1000
    if done.returncode:
        raise SystemExit(f"nvhook {' '.join(words)} failed:\n{done.stderr}")
    return spent


def _median(times: Times, name: str, which: str) -> float | None:
    values = times.get((name, which))
    return statistics.median(values) if values else None


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None

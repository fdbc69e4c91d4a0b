# SPDX-License-Identifier: Apache-2.0
"""Several GPUs on one host: each container gets its own, and only its own, by each way that nvhook applies.

    python -m tests.device.several_gpus [--rounds 20] [--simulated N] [--single N] [--way NAME]

As root, with runc and a driver; `--simulated N` takes a simulated host of N GPUs instead, on which kernels run on the
CPU. Prints tables of what was looked at and what was found, and then what was wrong. Exit status 1 if anything was.
With one GPU all that needs a second is left out, and it says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import simhost
from tests.device import paces, renewals
from tests.device.appliers import NAMES, PRESTART, RUNTIME, Appliers, Way
from tests.device.inside import COLUMNS, OK, WRONG, Containers, Row
from tests.device.machines import Gpu, Machine

# What one container more has to bring for one GPU more: its node, and nothing else.
NODE_MAJOR = 195


class Report:
    """What was looked at, printed as it comes, and all that was wrong."""

    def __init__(self) -> None:
        self.misses: list[str] = []

    def heading(self) -> None:
        """Of the containers' table."""
        print(f"{'way':14}{'asked for':46}" + "".join(f"{name:12}" for name in COLUMNS))

    def row(self, row: Row) -> None:
        """One container."""
        verdicts = "".join(f"{row.verdicts[name]:12}" for name in COLUMNS)
        print(f"{row.way:14}{row.asked:46}{verdicts}".rstrip(), flush=True)
        self.misses += [f"{row.way}, {row.asked}: {miss}" for miss in row.misses]

    def fact(self, what: str, misses: list[str], found: str = "") -> None:
        """Anything else."""
        print(f"{what + ':':60}{WRONG if misses else OK}{'  ' + found if found else ''}", flush=True)
        self.misses += [f"{what}: {miss}" for miss in misses]


def examine(
    machine: Machine,
    folder: Path,
    rounds: int = 0,
    single: int | None = None,
    rules: list[dict[str, Any]] | None = None,
    ways: list[str] | None = None,
) -> list[str]:
    """Look at everything and print it; what was wrong comes back. `single`: how many GPUs are asked for one by one,
    from either end; `rules`: inside.Containers'; `ways`: by name, None for all."""
    report = Report()
    names = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
    print(f"driver {machine.driver}, {len(machine.gpus)} GPUs: {names}{'' if machine.real else ' (simulated)'}")
    appliers = Appliers(machine, folder, ways)
    containers = Containers(machine, folder, rules)
    report.fact("indexes are NVML's", _indexes(machine))
    for name, file in appliers.specs.items():
        report.fact(f"names in the file for {name}", _names(machine, json.loads(file.read_text())))
    _requests(report, machine, appliers, containers, single)
    _fresh(report, machine, appliers, containers)
    _growth(report, machine, appliers, containers)
    _verified(report, machine)
    if rounds:
        _paces(report, appliers, folder, rounds)
    print(f"{len(report.misses)} wrong" if report.misses else "all of it is right")
    for miss in report.misses:
        print(f"WRONG: {miss}")
    return report.misses


def _indexes(machine: Machine) -> list[str]:
    """nvhook's index, UUID, bus id and minor of each GPU, and NVML's and the kernel's."""
    done = machine.nvhook("inventory", "--refresh", "--json")
    if done.returncode:
        return [done.stderr.strip()]
    found = [(gpu["index"], gpu["uuid"], gpu["bus_id"], gpu["minor"]) for gpu in json.loads(done.stdout)["gpus"]]
    wanted = [(gpu.index, gpu.uuid, gpu.bus_id, gpu.minor) for gpu in machine.gpus]
    return [f"nvhook has {one}" for one in found if one not in wanted] + [
        f"the driver has {one}" for one in wanted if one not in found
    ]


def _names(machine: Machine, spec: dict[str, Any]) -> list[str]:
    """`0` and so on, UUIDs and `all` lead to the nodes of those GPUs, which have the driver's numbers."""
    wanted = {name: {gpu.minor} for gpu in machine.gpus for name in (str(gpu.index), gpu.uuid)}
    wanted["all"] = {gpu.minor for gpu in machine.gpus}
    found = {}
    for device in spec["devices"]:
        nodes = [Path(node.get("hostPath", node["path"])) for node in device["containerEdits"]["deviceNodes"]]
        numbers = [os.stat(node).st_rdev for node in nodes]
        found[device["name"]] = {os.minor(number) for number in numbers if os.major(number) == NODE_MAJOR}
    return [
        f"{name!r} leads to the minors {found.get(name)}, not {wanted.get(name)}"
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name) != wanted.get(name)
    ]


def _requests(report: Report, machine: Machine, appliers: Appliers, containers: Containers, single: int | None) -> None:
    """Each request by each way. The inventory is there already, and no start renews it."""
    report.heading()
    with renewals.renewals(machine) as found:
        for way in appliers.ways:
            for asked, devices, chosen in _asked(machine, way, single):
                report.row(containers.one(way, asked, devices, chosen))
            if len(machine.gpus) > 1:
                first, *_, last = machine.gpus
                for row in containers.pair(way, first, last) + containers.pair(way, last, first):
                    report.row(row)
    renewed = found[renewals.FILE]
    report.fact("renewals in all these starts", [f"there were {renewed}"] if renewed else [], str(renewed))
    if len(machine.gpus) < 2:
        print("left out, for they need two GPUs: two at once, those not asked for, copies between them")


def _asked(machine: Machine, way: Way, single: int | None) -> Iterator[tuple[str, list[str], list[Gpu]]]:
    """Words for the table, devices as a user names them, and the GPUs that these are."""
    gpus = machine.gpus
    some = gpus if single is None else gpus[: (single + 1) // 2] + gpus[len(gpus) - single // 2 :]
    for gpu in some:
        yield str(gpu.index), [str(gpu.index)], [gpu]
        yield gpu.uuid, [gpu.uuid], [gpu]
        if way.env:
            prefix = _prefix(gpu, gpus)
            yield f"{prefix} (a beginning)", [prefix], [gpu]
    yield "all", ["all"], gpus
    if len(gpus) > 1:
        first, *_, last = gpus
        for one, other in ((first, last), (last, first)):
            yield f"{one.index},{other.index}", [str(one.index), str(other.index)], [one, other]
        yield f"{last.index} and the UUID of {first.index}", [str(last.index), first.uuid], [last, first]


def _prefix(gpu: Gpu, gpus: list[Gpu]) -> str:
    """The shortest beginning of its UUID that no other GPU shares, of four digits at least."""
    others = [other.uuid for other in gpus if other is not gpu]
    lengths = range(len("GPU-") + 4, len(gpu.uuid))
    return next(gpu.uuid[:n] for n in lengths if not any(uuid.startswith(gpu.uuid[:n]) for uuid in others))


def _fresh(report: Report, machine: Machine, appliers: Appliers, containers: Containers) -> None:
    """A start that finds no inventory makes one, once; those after it make none. CDI's starts never read it."""
    for way in appliers.ways:
        counts = []
        renewals.forget(machine)
        for _ in range(3):
            with renewals.renewals(machine) as found:
                row = containers.one(way, "0", ["0"], machine.gpus[:1])
            report.misses += [f"{way.name}, without an inventory: {miss}" for miss in row.misses]
            counts.append(found[renewals.FILE])
        wanted = [1, 0, 0] if way.name in (PRESTART, RUNTIME) else [0, 0, 0]
        misses = [] if counts == wanted else [f"three starts renewed it {counts} times, not {wanted}"]
        report.fact(f"renewals in three starts, {way.name}", misses, str(counts))
    sessions = renewals.sessions(machine)
    report.fact("NVML sessions in one renewal", [] if sessions == 1 else [f"there were {sessions}"], str(sessions))


def _growth(report: Report, machine: Machine, appliers: Appliers, containers: Containers) -> None:
    """What is planned for one GPU is as much for each, and for all it is one node a GPU more."""
    plans = []
    for devices, chosen in [([str(gpu.index)], [gpu]) for gpu in machine.gpus] + [(["all"], machine.gpus)]:
        bundle = containers.bundle(appliers.prestart, devices, chosen)
        bundle.write()
        done = machine.nvhook("plan", "--bundle", str(bundle.folder))
        shutil.rmtree(bundle.root)
        if done.returncode:
            report.fact("what is planned", [done.stderr.strip()])
            return
        plan = json.loads(done.stdout)
        plans.append((len(plan["edits"]["deviceNodes"]), len(plan["edits"]["mounts"]), len(plan["steps"])))
    *single, every = plans
    nodes, mounts, _ = single[0]
    wanted = (nodes + len(machine.gpus) - 1, mounts)
    misses = [] if len(set(single)) == 1 else [f"nodes, mounts and steps for each GPU differ: {single}"]
    misses += [] if every[:2] == wanted else [f"for all GPUs nodes and mounts are {every[:2]}, not {wanted}"]
    report.fact("nodes, mounts and steps planned", misses, f"{single[0]} for one GPU, {every} for all")


def _verified(report: Report, machine: Machine) -> None:
    """`nvhook verify` on the host: each GPU by itself, and copies between neighbours and the two ends."""
    command = (sys.executable, "-m", "hook", "verify", "--json")
    for gpu in machine.gpus:
        for name in (str(gpu.index), gpu.uuid):
            done = machine.run(*command, "--device", name)
            uuids = [device["uuid"] for device in json.loads(done.stdout or '{"devices": []}')["devices"]]
            misses = [] if uuids == [gpu.uuid] and not done.returncode else [f"{uuids} {done.stdout}{done.stderr}"]
            report.fact(f"verify --device {name}", misses)
    pairs = [*itertools.pairwise(machine.gpus), (machine.gpus[0], machine.gpus[-1])]
    for first, second in dict.fromkeys(pair for pair in pairs if pair[0] is not pair[1]):
        done = machine.run(*command, "--peer", first.uuid, str(second.index))
        peers = json.loads(done.stdout or '{"peers": []}')["peers"]
        misses = [] if not done.returncode and len(peers) == 2 else [done.stdout + done.stderr]
        ways = [
            f"{item['bandwidth'] / 1e9:.1f} GB/s{'' if item['direct'] else ' by way of the host'}" for item in peers
        ]
        link = peers[0]["link"] if peers else None
        misses += [] if link else ["nvidia-smi topo -m tells no link"]
        report.fact(
            f"verify --peer {first.index} {second.index}", misses, f"link {link}, there and back {', '.join(ways)}"
        )


def _paces(report: Report, appliers: Appliers, folder: Path, rounds: int) -> None:
    """Times. Beside a simulated host there is another with one GPU; a real one can't be had with fewer."""
    alone = None
    if not appliers.machine.real:
        place = folder / "alone"
        alone = Appliers(
            Machine(simhost.build(place / "host", simhost.Host())), place, [way.name for way in appliers.ways]
        )
    times = paces.measure(appliers, alone, folder, rounds)
    print("\n".join(paces.table(times)))
    if alone and rounds >= paces.ROUNDS_TO_JUDGE:
        report.fact("starts with one GPU, however many the host has", paces.misses(times))
    else:
        print(f"not judged: that takes a host with one GPU beside this one, and {paces.ROUNDS_TO_JUDGE} rounds")


def main(argv: list[str] | None = None) -> int:
    """0 if nothing was wrong, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="for times; 0: none; default: 20")
    parser.add_argument("--simulated", type=int, metavar="N", help="a simulated host of N GPUs")
    parser.add_argument("--single", type=int, metavar="N", help="ask for N GPUs one by one, not for each")
    parser.add_argument("--way", action="append", choices=NAMES, help="only by this way; repeatable")
    arguments = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="nvhook-gpus-"))
    try:
        simulated = None
        if arguments.simulated:
            simulated = simhost.build(folder / "host", simhost.Host(gpus=simhost.gpus(arguments.simulated)))
        machine = Machine(simulated)
        return 1 if examine(machine, folder, arguments.rounds, arguments.single, ways=arguments.way) else 0
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())

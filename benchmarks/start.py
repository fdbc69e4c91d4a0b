# SPDX-License-Identifier: Apache-2.0
"""How much nvhook adds to a container's start: `runc create` by each way, and without, in turn.

    python -m benchmarks.start [--rounds 20]

With a driver on this machine it is used, else the simulated host. Each round starts one container of each
kind, from a fresh copy of a small root, so that drift of the machine meets all alike. Prints milliseconds:
minimum, median, and the median of the differences to runc alone in the same round. Then the same of a whole life:
create, start, exec, kill, delete.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cdi import generate
from cdi.finish import HOOK_NAME
from cdi.host import inventory, store
from hook import install
from tests import demo, roots
from tests.containers import Bundle, hook
from tests.system import cdifiles

ALONE = "runc alone"


class Way(NamedTuple):
    """What a container's bundle has beside the ordinary, the runtime's command where it is not runc, and whether its
    whole life is of interest."""

    others: dict[str, Any]
    runtime: list[str] = []
    life: bool = False


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args(argv).rounds
    folder = Path(tempfile.mkdtemp(prefix="nvhook-benchmark-"))
    try:
        kinds = ways(folder)
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(rounds + 1):
            for name, way in kinds.items():
                spent = one(folder / f"{number}", way, create)
                # The first round renews the inventory and fills the page cache.
                if number:
                    times[name].append(spent)
        print_table("create", times)
        lives: dict[str, list[float]] = {name: [] for name in kinds if kinds[name].life}
        for number in range(rounds):
            for name, spent_in_life in lives.items():
                spent_in_life.append(one(folder / f"{number}", kinds[name], life))
        print_table("create, start, exec, kill, delete", lives)
    finally:
        shutil.rmtree(folder)
    return 0


def ways(folder: Path) -> dict[str, Way]:
    """Each kind of container."""
    machine = demo.machine(folder)
    launchers = {path.name: path for path in install.install(folder / "prefix")}
    arguments = [] if machine.real else ["--host-root", str(machine.root)]
    ours = [hook(launchers["nvhook-prestart"], *arguments)]
    runtime = [str(launchers["nvhook-runtime"]), *arguments]
    request = {"NVIDIA_VISIBLE_DEVICES": "all"}
    everything = request | {"NVIDIA_DRIVER_CAPABILITIES": "all"}
    python = [hook(install.interpreter(), "-I", "-S", "-c", "pass")]

    def cdi(**options: Any) -> dict[str, Any]:
        return {"edits": edits(machine, launchers[HOOK_NAME], generate.Options(**options))}

    few = ("compute", "utility")
    return {
        ALONE: Way({}, life=True),
        "a hook that is an empty Python": Way({"prestart": python}),
        "prestart, no GPU asked for": Way({"prestart": ours}),
        "prestart, compute and utility": Way({"env": request, "prestart": ours}, life=True),
        "prestart, all capabilities": Way({"env": everything, "prestart": ours}),
        "runtime, no GPU asked for": Way({}, runtime),
        "runtime, compute and utility": Way({"env": request}, runtime, life=True),
        "runtime, all capabilities": Way({"env": everything}, runtime),
        "CDI and hook, compute and utility": Way(cdi(capabilities=few), life=True),
        "CDI and hook, all capabilities": Way(cdi()),
        "CDI alone, compute and utility": Way(cdi(capabilities=few, layout="debian"), life=True),
        "CDI alone, all capabilities": Way(cdi(layout="debian")),
    }


def edits(machine: demo.Machine, finish: Path, options: generate.Options) -> list[dict[str, Any]]:
    """What an engine takes out of a CDI file of this host for all GPUs; that is done before the time is taken."""
    found, _ = inventory.current(store.Options(str(machine.root)))
    spec = generate.make(found, str(finish), options)
    if not machine.real:
        spec = cdifiles.on_this_machine(spec, machine.root)
    return [spec["containerEdits"], spec["devices"][-1]["containerEdits"]]


def one(folder: Path, way: Way, what: Callable[[list[str], Bundle], None]) -> float:
    """Milliseconds of one container's part."""
    folder.mkdir()
    bundle = Bundle(folder / "bundle", roots.make_root(folder / "image"), ["/bin/sleep", "60"], **way.others)
    bundle.write()
    command = bundle.command()
    if way.runtime:
        command[:1] = way.runtime
    try:
        began = time.perf_counter()
        what(command, bundle)
        return (time.perf_counter() - began) * 1000
    finally:
        bundle.delete()
        shutil.rmtree(folder)


def call(command: list[str], *words: str) -> None:
    """One call of the runtime, which must succeed."""
    null = subprocess.DEVNULL
    subprocess.run([*command, *words], stdin=null, stdout=null, check=True)


def create(command: list[str], bundle: Bundle) -> None:
    """The container is made and waits."""
    call(command, "create", "--bundle", str(bundle.folder), bundle.name)


def life(command: list[str], bundle: Bundle) -> None:
    """From its making to its end."""
    create(command, bundle)
    call(command, "start", bundle.name)
    call(command, "exec", bundle.name, "/bin/true")
    call(command, "kill", bundle.name, "KILL")
    while subprocess.run([*command, "delete", bundle.name], stderr=subprocess.DEVNULL, check=False).returncode:
        # The kernel has not taken the process away yet.
        time.sleep(0.001)


def print_table(what: str, times: dict[str, list[float]]) -> None:
    """One line a kind."""
    print(f"{what:36}{'min':>8}{'median':>8}{'over runc alone':>18}")
    for name, values in times.items():
        over = statistics.median([value - alone for value, alone in zip(values, times[ALONE], strict=True)])
        print(f"{name:36}{min(values):8.1f}{statistics.median(values):8.1f}{over:+18.1f}")


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""How much nvhook adds to a container's start: `runc create` by each way, and without, in turn.

    python -m benchmarks.start [--rounds 20]

With a driver on this machine it is used, else the simulated host. Each round starts one container of each
kind, from a fresh copy of a small root, so that drift of the machine meets all alike. Prints milliseconds:
minimum, median, and the median of the differences to runc alone in the same round.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cdi import generate
from cdi.finish import HOOK_NAME
from cdi.host import inventory, store
from hook import install
from tests import demo, roots
from tests.containers import Bundle, hook
from tests.system import cdifiles

ALONE = "runc alone"


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
            for name, others in kinds.items():
                spent = one(folder / f"{number}", others)
                # The first round renews the inventory and fills the page cache.
                if number:
                    times[name].append(spent)
    finally:
        shutil.rmtree(folder)
    print_table(times)
    return 0


Others = dict[str, Any]


def ways(folder: Path) -> dict[str, Others]:
    """Each kind of container, as what its bundle has beside the ordinary."""
    machine = demo.machine(folder)
    launchers = {path.name: path for path in install.install(folder / "prefix")}
    arguments = [] if machine.real else ["--host-root", str(machine.root)]
    ours = [hook(launchers["nvhook-prestart"], *arguments)]
    request = {"NVIDIA_VISIBLE_DEVICES": "all"}
    python = [hook(install.interpreter(), "-I", "-S", "-c", "pass")]
    finish = launchers[HOOK_NAME]
    few = ("compute", "utility")
    return {
        ALONE: {},
        "a hook that is an empty Python": {"prestart": python},
        "nvhook, no GPU asked for": {"prestart": ours},
        "nvhook, compute and utility": {"env": request, "prestart": ours},
        "nvhook, all capabilities": {"env": request | {"NVIDIA_DRIVER_CAPABILITIES": "all"}, "prestart": ours},
        "CDI file, its hook, two of them": {"edits": edits(machine, finish, generate.Options(capabilities=few))},
        "CDI file, its hook, all": {"edits": edits(machine, finish, generate.Options())},
        "CDI file, no hook, two of them": {
            "edits": edits(machine, finish, generate.Options(capabilities=few, layout="debian"))
        },
        "CDI file, no hook, all": {"edits": edits(machine, finish, generate.Options(layout="debian"))},
    }


def edits(machine: demo.Machine, finish: Path, options: generate.Options) -> list[dict[str, Any]]:
    """What an engine takes out of a CDI file of this host for all GPUs; that is done before the time is taken."""
    found, _ = inventory.current(store.Options(str(machine.root)))
    spec = generate.make(found, str(finish), options)
    if not machine.real:
        spec = cdifiles.on_this_machine(spec, machine.root)
    return [spec["containerEdits"], spec["devices"][-1]["containerEdits"]]


def one(folder: Path, others: Others) -> float:
    """Milliseconds of one `runc create`."""
    folder.mkdir()
    bundle = Bundle(folder / "bundle", roots.make_root(folder / "image"), ["/bin/true"], **others)
    bundle.write()
    command = [*bundle.command(), "create", "--bundle", str(bundle.folder), bundle.name]
    try:
        began = time.perf_counter()
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
        return (time.perf_counter() - began) * 1000
    finally:
        bundle.delete()
        shutil.rmtree(folder)


def print_table(times: dict[str, list[float]]) -> None:
    """One line a kind."""
    print(f"{'':32}{'min':>8}{'median':>8}{'over runc alone':>18}")
    for name, values in times.items():
        over = statistics.median([value - alone for value, alone in zip(values, times[ALONE], strict=True)])
        print(f"{name:32}{min(values):8.1f}{statistics.median(values):8.1f}{over:+18.1f}")


if __name__ == "__main__":
    sys.exit(main())

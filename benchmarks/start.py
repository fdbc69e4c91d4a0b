# SPDX-License-Identifier: Apache-2.0
"""How much nvhook adds to a container's start: `runc create` with and without the hook, in turn.

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

from hook import install
from tests import demo, roots
from tests.containers import Bundle, Hook, hook

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
            for name, (env, hooks) in kinds.items():
                spent = one(folder / f"{number}", env, hooks)
                # The first round renews the inventory and fills the page cache.
                if number:
                    times[name].append(spent)
    finally:
        shutil.rmtree(folder)
    print_table(times)
    return 0


def ways(folder: Path) -> dict[str, tuple[dict[str, str], list[Hook]]]:
    """Each kind of container: its environment and its prestart hooks."""
    machine = demo.machine(folder)
    launcher = install.install(folder / "prefix")[0]
    arguments = [] if machine.real else ["--host-root", str(machine.root)]
    ours = [hook(launcher, *arguments)]
    request = {"NVIDIA_VISIBLE_DEVICES": "all"}
    python = [hook(install.interpreter(), "-I", "-S", "-c", "pass")]
    return {
        ALONE: ({}, []),
        "a hook that is an empty Python": ({}, python),
        "nvhook, no GPU asked for": ({}, ours),
        "nvhook, compute and utility": (request, ours),
        "nvhook, all capabilities": (request | {"NVIDIA_DRIVER_CAPABILITIES": "all"}, ours),
    }


def one(folder: Path, env: dict[str, str], hooks: list[Hook]) -> float:
    """Milliseconds of one `runc create`."""
    folder.mkdir()
    bundle = Bundle(folder / "bundle", roots.make_root(folder / "image"), ["/bin/true"], env=env, prestart=hooks)
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

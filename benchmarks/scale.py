# SPDX-License-Identifier: Apache-2.0
"""How discovery grows with the number of GPUs, on simulated hosts.

    python -m benchmarks.scale [--rounds 5] [--init 0] [--per-gpu 0]

`--init` and `--per-gpu` are milliseconds that the simulated NVML takes to start and for each GPU's handle, as without
persistence mode. Prints, for each number of GPUs, whole and divided, the median in milliseconds of: an inventory
without NVML, one for which NVML is asked about each GPU, a CDI file from that, and the look by which a container's
start sees that a kept inventory still holds; then NVML's sessions and calls for one inventory, and the file's size.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cdi import generate, spec
from cdi.host import fingerprint, inventory
from cdi.host.store import Options
from ldcache import root
from tests.simhost import Fault, Host, Nvml, build, divided, gpus

COUNTS = (1, 2, 4, 8, 16)
# As many MIG devices as a GPU can have: seven of one slice each.
INSTANCES = tuple((instance, 0) for instance in range(7, 14))
COLUMNS = ("GPUs", "MIG", "inventory", "with NVML", "CDI file", "fresh?", "sessions", "calls", "KiB")


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--init", type=int, default=0, metavar="MS")
    parser.add_argument("--per-gpu", type=int, default=0, metavar="MS")
    arguments = parser.parse_args(argv)
    slow = (
        Fault("nvmlInit", delay_ms=arguments.init),
        Fault("nvmlDeviceGetHandle", delay_ms=arguments.per_gpu),
    )
    folder = Path(tempfile.mkdtemp(prefix="nvhook-benchmark-"))
    print("".join(f"{name:>11}" for name in COLUMNS))
    try:
        for instances in ((), INSTANCES):
            for count in COUNTS:
                place = folder / f"{count}.{len(instances)}"
                print("".join(f"{value:>11}" for value in row(place, count, instances, slow, arguments.rounds)))
    finally:
        shutil.rmtree(folder)
    return 0


def row(
    folder: Path, count: int, instances: tuple[tuple[int, int], ...], slow: tuple[Fault, ...], rounds: int
) -> list[str]:
    """One line of the table, for one number of GPUs, each divided into `instances` if there are any."""
    cards = tuple(divided(gpu, *instances) if instances else gpu for gpu in gpus(count))
    host = build(folder, Host(gpus=cards, nvml=Nvml(faults=slow)))
    top = str(host.root)
    plain = median(rounds, lambda: inventory.gather(Options(top, nvml="never")))
    asked = median(rounds, lambda: inventory.gather(Options(top, nvml="health")))
    host.clear_nvml_calls()
    found = inventory.gather(Options(top, nvml="health"))
    calls = [call.name for call in host.nvml_calls()]
    made = median(rounds, lambda: text_of(found))
    root_fd = root.open_root(top)
    fresh = median(rounds * 20, lambda: fingerprint.changed(root_fd, found["fingerprint"]))
    os.close(root_fd)
    sessions = sum(name.startswith("nvmlInit") for name in calls)
    times = [f"{value:.1f}" for value in (plain, asked, made)] + [f"{fresh:.3f}"]
    return [
        str(count),
        str(count * len(instances)),
        *times,
        str(sessions),
        str(len(calls)),
        f"{len(text_of(found)) / 1024:.1f}",
    ]


def text_of(found: dict[str, Any]) -> str:
    """The CDI file."""
    return spec.serialise(generate.make(found, "/usr/bin/nvhook-create-container"), "yaml")


def median(rounds: int, work: Callable[[], object]) -> float:
    """Milliseconds."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())

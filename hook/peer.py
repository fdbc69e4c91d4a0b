# SPDX-License-Identifier: Apache-2.0
"""Copies from one GPU's memory to another's: what `nvhook verify --peer` reports, and the link between the two.

Cold. The copy itself is hook/cuda.c. The link is what `nvidia-smi topo -m` shows, since CUDA tells only whether one GPU
reaches the other's memory.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hook.verify import Failure

SMI = "nvidia-smi"
# nvidia-smi initialises every GPU where nothing keeps the driver loaded: 2 s each.
SMI_SECONDS = 60

LISTED = re.compile(r"^GPU (\d+): .*\(UUID: (GPU-[0-9a-f-]+)\)", re.MULTILINE)
# It underlines the heading, whatever its output is.
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Peer:
    """A copy of the memory of device `source` to that of `target`, both indexes as a Result has them.

    `direct`: `target` reads the memory of `source` itself, else the driver copies by way of the host's. `elements`
    counts the elements that the CPU found right, `bandwidth` is in bytes a second, 0 where it was not reached. `link`
    is the word of `nvidia-smi topo -m`, such as NV18 or PHB; None where that doesn't tell.
    """

    source: int
    target: int
    direct: bool
    elements: int
    bandwidth: float
    link: str | None
    failures: tuple[Failure, ...]

    def __str__(self) -> str:
        way = "directly" if self.direct else "by way of the host's memory"
        speed = f"{self.elements} elements right, {self.bandwidth / 1e9:.1f} GB/s, {way}"
        return f"device {self.source} to device {self.target}: {speed}; link {self.link or 'unknown'}"

    def to_json(self) -> dict[str, Any]:
        """As `cuda-check --json` has it, and `link`."""
        value = asdict(self)
        return {"from": value.pop("source"), "to": value.pop("target"), **value}


def link(first: str, second: str) -> str | None:
    """What `nvidia-smi topo -m` shows between two GPUs, by UUID; None where it does not tell."""
    indexes = {uuid: int(index) for index, uuid in LISTED.findall(_ask("-L"))}
    if first not in indexes or second not in indexes:
        return None
    return topology(_ask("topo", "-m")).get((indexes[first], indexes[second]))


def topology(text: str) -> dict[tuple[int, int], str]:
    """The links in the matrix that `nvidia-smi topo -m` prints, by nvidia-smi's indexes.

    Tabs stand between its cells: one line of headings (GPU0, NIC0, CPU Affinity and so on), then one for each GPU
    and NIC.
    """
    heading: list[str] = []
    found = {}
    for line in ESCAPE.sub("", text).splitlines():
        cells = [cell.strip() for cell in line.split("\t")]
        row = re.fullmatch(r"GPU(\d+)", cells[0])
        if row and heading:
            for name, cell in zip(heading[1:], cells[1:], strict=False):
                column = re.fullmatch(r"GPU(\d+)", name)
                if column and cell not in ("", "X"):
                    found[int(row[1]), int(column[1])] = cell
        elif not heading and "GPU0" in cells[1:]:
            heading = cells
    return found


def _ask(*words: str) -> str:
    """What nvidia-smi prints; nothing where there is none, it fails, or takes too long."""
    try:
        done = subprocess.run(
            [SMI, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout

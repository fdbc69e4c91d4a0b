# SPDX-License-Identifier: Apache-2.0
"""IMEX channels: nodes by which GPUs of several machines share memory, `/dev/nvidia-caps-imex-channels/channel<N>`.

The minor of a channel's node is its number (nvidia-modprobe, `nvidia_cap_imex_channel_mknod`). There may be thousands
(the module's parameter ImexChannelCount is 2048 by default), alike but for that number, and every start reads the
inventory: so channels that follow each other are kept as one entry.
"""

from __future__ import annotations

import re
from typing import Any

from cdi.host import fingerprint, nodes

DEVICE = "nvidia-caps-imex-channels"
FOLDER = f"/dev/{DEVICE}"
ROLE = "imex"
NAME = re.compile(r"channel(0|[1-9]\d{0,6})")
# What NVIDIA's toolkit takes for the greatest number of a channel, the greatest minor of a device.
CHANNEL_MAX = (1 << 20) - 1
# More than anybody gives out; the folder's times tell of nodes that come and go, whatever their number.
ENTRIES_MAX = 64
RECORDED_MAX = 64


def read(recorder: fingerprint.Recorder, dev: fingerprint.Base) -> tuple[list[dict[str, Any]], list[str]]:
    """Runs of channels, `channel` the first of `count`, with its `node`; and warnings."""
    recorder.file(dev, FOLDER)
    major = nodes.character_majors(recorder.root_fd).get(DEVICE)
    numbers = sorted(int(found[1]) for name in nodes.listing(dev, FOLDER) if (found := NAME.fullmatch(name)))
    runs: list[dict[str, Any]] = []
    warnings: list[str] = []
    for place, number in enumerate(numbers):
        wanted = nodes.Wanted(f"{FOLDER}/channel{number}", ROLE, major, number)
        node = nodes.look(recorder if place < RECORDED_MAX else None, dev, wanted, warnings)
        if node is None:
            continue
        if runs and _follows(runs[-1], number, node):
            runs[-1]["count"] += 1
        elif len(runs) == ENTRIES_MAX:
            warnings.append(f"{dev.prefix}{FOLDER}: channels from {number} on are left out: too many gaps")
            break
        else:
            runs.append({"channel": number, "count": 1, "node": node})
    return runs, warnings


def _follows(run: dict[str, Any], number: int, node: dict[str, Any]) -> bool:
    """Whether a node differs from the run's first in nothing but its number."""
    alike = all(run["node"][key] == node[key] for key in ("major", "mode", "uid", "gid"))
    return alike and number == run["channel"] + run["count"]

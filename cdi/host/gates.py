# SPDX-License-Identifier: Apache-2.0
"""What the gates open: nodes of other drivers that GPUs work with, for containers that ask by a variable.

Which nodes and files belong to each is what NVIDIA's toolkit 1.20 gives for it.
"""

from __future__ import annotations

import re
from typing import Any

from cdi.host import fingerprint, nodes

INFINIBAND = "/dev/infiniband"

# Nodes of one fixed name, and those that are numbered from 0 on.
FIXED = {
    "gdrcopy": ("/dev/gdrdrv",),
    "gds": (),
    "mofed": ("/dev/infiniband/rdma_cm",),
    "nvswitch": ("/dev/nvidia-nvswitchctl",),
}
NUMBERED = {"gds": "/dev/nvidia-fs", "mofed": "/dev/infiniband/uverbs", "nvswitch": "/dev/nvidia-nvswitch"}
NUMBER = re.compile(r"0|[1-9]\d{0,3}")

# GPUDirect Storage asks udev's data base which disks can do it.
UDEV = "/run/udev"
CUFILE = "/etc/cufile.json"


def read(
    recorder: fingerprint.Recorder, dev: fingerprint.Base, base: fingerprint.Base, host: fingerprint.Base
) -> tuple[dict[str, Any], list[str]]:
    """Nodes and files of each gate that has a node, by its name; and warnings. `base` is the driver root."""
    found: dict[str, Any] = {}
    warnings: list[str] = []
    recorder.file(dev, INFINIBAND)
    for gate, fixed in FIXED.items():
        paths = [*fixed, *_numbered(dev, NUMBERED.get(gate))]
        # What is not there is looked at as well, so that the fingerprint tells of its coming.
        wanted = (nodes.Wanted(path, gate, needed=False) for path in paths)
        there = nodes.look_all(recorder, dev, wanted, warnings)
        if there:
            files = _storage_files(recorder, [base, host]) if gate == "gds" else []
            found[gate] = {"nodes": there, "files": files}
    return found, warnings


def _numbered(dev: fingerprint.Base, prefix: str | None) -> list[str]:
    """Paths from 0 to the one after the last that is there: drivers give out the lowest free number."""
    if prefix is None:
        return []
    folder, _, stem = prefix.rpartition("/")
    rests = (name.removeprefix(stem) for name in nodes.listing(dev, folder) if name.startswith(stem))
    last = max((int(rest) for rest in rests if NUMBER.fullmatch(rest)), default=-1)
    return [f"{prefix}{number}" for number in range(last + 2)]


def _storage_files(recorder: fingerprint.Recorder, bases: list[fingerprint.Base]) -> list[dict[str, Any]]:
    found = []
    for path, look in ((UDEV, recorder.entry), (CUFILE, recorder.file)):
        for base in bases:
            real = look(base, path)
            if real is not None and real.isprintable():
                kept = {"path": base.prefix + real, "container_path": path, "capability": "compute"}
                found.append(kept | {"kind": "gds", "links": []})
                break
    return found

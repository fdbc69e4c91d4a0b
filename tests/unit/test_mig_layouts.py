# SPDX-License-Identifier: Apache-2.0
"""Ways to divide GPUs, by the tables of NVIDIA's MIG user guide: each MIG device is offered whole and by its names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cdi import generate, spec
from cdi.host import inventory
from cdi.host.store import Options
from tests.needs import needs_root
from tests.simhost import Host, Mig, build, gpus
from tests.simhost.kernel import mig_minors

HOOK = "/usr/bin/nvhook-create-container"


@dataclass(frozen=True, slots=True)
class Layout:
    """A model, how many GPUs of it, and of each GPU: profile, GPU instance and compute instance of its MIG devices."""

    model: str
    count: int
    devices: tuple[tuple[str, int, int], ...]


LAYOUTS = {
    "a30-quarters": Layout("NVIDIA A30", 1, tuple(("1g.6gb", gi, 0) for gi in (3, 4, 5, 6))),
    "a30-mixed": Layout("NVIDIA A30", 2, (("2g.12gb", 1, 0), ("1g.6gb+me", 5, 0), ("1g.6gb", 6, 0))),
    "a100-sevenths": Layout("NVIDIA A100-SXM4-40GB", 1, tuple(("1g.5gb", gi, 0) for gi in range(7, 14))),
    "a100-mixed": Layout("NVIDIA A100-SXM4-80GB", 2, (("3g.40gb", 2, 0), ("2g.20gb", 3, 0), ("1g.10gb", 9, 0))),
    "h100-node": Layout("NVIDIA H100 80GB HBM3", 8, tuple(("1g.10gb", gi, 0) for gi in range(7, 14))),
    "h100-compute-instances": Layout("NVIDIA H100 PCIe", 1, tuple(("1c.3g.40gb", 1, ci) for ci in range(3))),
    "h200-mixed": Layout("NVIDIA H200", 2, (("4g.71gb", 1, 0), ("2g.35gb", 5, 0), ("1g.18gb+me", 13, 0))),
    "b200-whole": Layout("NVIDIA B200", 1, (("7g.180gb", 0, 0),)),
    "b200-node": Layout("NVIDIA B200", 8, tuple(("1g.23gb", gi, 0) for gi in range(7, 14))),
}


@needs_root
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_mig_device_is_offered(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    cards = tuple(
        replace(
            card,
            name=layout.model,
            mig=1,
            mig_devices=tuple(
                Mig(gi, ci, f"MIG-{card.minor:04x}{gi:02x}{ci:02x}-5555-6666-7777-888888888888", profile)
                for profile, gi, ci in layout.devices
            ),
        )
        for card in gpus(layout.count)
    )
    host = build(tmp_path, Host(gpus=cards, graphics=False))
    found = inventory.gather(Options(str(host.root), nvml="health"))
    assert [entry["profile"] for entry in found["mig"]] == [one[0] for one in layout.devices] * layout.count
    made = generate.make(found, HOOK)
    assert spec.problems(made) == [] and generate.left_out(found) == []
    nodes = {one["name"]: [node["path"] for node in one["containerEdits"]["deviceNodes"]] for one in made["devices"]}
    for card in cards:
        for index, device in enumerate(card.mig_devices):
            minors = mig_minors(card.minor, device.gi), mig_minors(card.minor, device.gi, device.ci)
            expected = [f"/dev/nvidia{card.minor}", *(f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in minors)]
            assert nodes.pop(f"{card.minor}:{index}") == nodes.pop(device.uuid) == expected
    assert list(nodes) == ["all"]

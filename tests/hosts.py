# SPDX-License-Identifier: Apache-2.0
"""Inventories of simulated hosts, for the tests of discovery."""

from __future__ import annotations

from typing import Any

from cdi.host import inventory
from cdi.host.store import Options
from tests.simhost import SimulatedHost

RELEASE = "580.159.04"


def look(host: SimulatedHost, **options: Any) -> dict[str, Any]:
    """The inventory of a simulated host; NVML is another test's subject."""
    return inventory.gather(Options(str(host.root), nvml="never", **options))


def by_name(found: dict[str, Any], name: str, bits: int = 64) -> dict[str, Any]:
    """The library of that file name."""
    (library,) = [item for item in found["libraries"] if (item["name"], item["class"]) == (name, bits)]
    return dict(library)

# SPDX-License-Identifier: Apache-2.0
"""Hosts that many tests only read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simhost import Host, SimulatedHost, build
from tests.simhost import gpus as some_gpus


@pytest.fixture(scope="session")
def workstation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedHost]:
    """A host with all that this package looks for. Tests only read it."""
    modules = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")
    host = Host(gpus=some_gpus(2), i386=True, modules=modules, persistenced="answering", fabricmanager="dead", mps=True)
    built = build(tmp_path_factory.mktemp("workstation"), host)
    yield built
    built.close()

# SPDX-License-Identifier: Apache-2.0
"""What the system tests share: an installed nvhook, a simulated host, container roots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hook import install
from tests import roots, simhost
from tests.containers import Bundle, cgroup_versions
from tests.system import runtimes
from tests.system.ways import Ways


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """nvhook, installed as `nvhook install --prefix` does."""
    folder = tmp_path_factory.mktemp("prefix")
    install.install(folder)
    return folder


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[simhost.SimulatedHost]:
    """A simulated host with two GPUs, 32-bit twins and everything that answers."""
    description = simhost.Host(gpus=simhost.gpus(2), i386=True, persistenced="answering", mps=True)
    simulated = simhost.build(tmp_path_factory.mktemp("host"), description)
    yield simulated
    simulated.close()


@pytest.fixture(params=cgroup_versions())
def cgroup(request: pytest.FixtureRequest) -> str:
    """Each cgroup version that works on this machine."""
    version: str = request.param
    return version


MakeBundle = Callable[..., Bundle]


@pytest.fixture
def make_bundle(tmp_path: Path) -> MakeBundle:
    """A function that makes a bundle with a fresh root: make_bundle("shell script", flavour=…, **Bundle's)."""
    numbers = iter(range(1, 1000))

    def make(script: str, flavour: roots.Flavour = "debian", **others: object) -> Bundle:
        number = next(numbers)
        image = roots.make_root(tmp_path / f"image-{number}", flavour)
        arguments = ["/bin/sh", "-c", script]
        return Bundle(tmp_path / f"bundle-{number}", image, arguments, **others)  # type: ignore[arg-type]

    return make


@pytest.fixture
def debian_13(cache: Path) -> Path:
    """That Debian's root, or the reason why there is none."""
    try:
        return runtimes.debian(cache)
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture
def ways(tmp_path: Path, prefix: Path, host: simhost.SimulatedHost) -> Ways:
    return Ways(tmp_path, prefix, host)

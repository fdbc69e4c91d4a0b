# SPDX-License-Identifier: Apache-2.0
"""What every test stands on: native parts that are built, and what to leave out, each with its reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

TREE = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked long too")


def pytest_configure(config: pytest.Config) -> None:
    # The same examples on every run, however slow the machine: a red test means a change, not luck.
    hypothesis.settings.register_profile("nvhook", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("nvhook")
    # A test against a module compiled from yesterday's C would pass or fail for nothing.
    command = [sys.executable, str(TREE / "packaging/build.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.exit(f"the native parts do not compile:\n{done.stdout}{done.stderr}", returncode=1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = pytest.mark.skip(reason="long: runs with --all (./test all)")
    system = pytest.mark.skip(reason="needs root: namespaces, cgroups, device nodes")
    for item in items:
        # Containers, mounts and engines belong to the whole machine: one process runs the tests that have them, in
        # turn. Beside it a second one runs the rest, which mind nothing but their own folders.
        alone = item.path.is_relative_to(TREE / "tests/system") or item.path.is_relative_to(TREE / "tests/device")
        item.add_marker(pytest.mark.xdist_group("machine" if alone else "unit"))
        if item.get_closest_marker("long") and not config.getoption("--all"):
            item.add_marker(long)
        if os.geteuid() != 0 and item.path.is_relative_to(TREE / "tests/system"):
            item.add_marker(system)


@pytest.fixture(scope="session")
def tree() -> Path:
    """The repository's root."""
    return TREE


@pytest.fixture(scope="session")
def cache() -> Path:
    """A folder that outlives the test run, for what is slow to make: other releases' roots, packages.

    NVHOOK_TEST_CACHE names it; by default it is .cache in the tree, which git ignores.
    """
    folder = Path(os.environ.get("NVHOOK_TEST_CACHE") or TREE / ".cache")
    folder.mkdir(parents=True, exist_ok=True)
    return folder

# SPDX-License-Identifier: Apache-2.0
"""docs/images.md: the smallest image in which `verify` runs, and what it is made of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hook import verify
from tests.containers import Bundle
from tests.needs import needs_program
from tests.simhost import SimulatedHost
from tests.system.prestart import nvhook, visible

TREE = Path(__file__).resolve().parents[2]
PAGE = (TREE / "docs/images.md").read_text()


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """The root that `nvhook verify --in-container` makes."""
    program = verify.installed("cuda-check")
    assert program is not None
    verify.build_root(tmp_path / "scratch", program)
    return tmp_path / "scratch"


def files_of(root: Path) -> dict[str, int]:
    """Names and sizes."""
    return {path.name: path.stat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink()}


def test_it_is_as_small_as_the_page_says(scratch: Path) -> None:
    (limit,) = re.findall(r"smaller than (\d+) MB", PAGE.replace("\n", " "))
    assert 1_000_000 < sum(files_of(scratch).values()) < int(limit) * 1_000_000


def test_it_holds_what_the_page_copies(scratch: Path) -> None:
    (recipe,) = re.findall(r"```dockerfile\n(.*?)```", PAGE, re.DOTALL)
    copied = set(re.findall(r"/([\w.+-]+\.so\.\d+)\s", recipe)) | {"cuda-check"}
    assert set(files_of(scratch)) == copied


@needs_program("runc")
def test_its_program_finds_the_drivers_library(
    scratch: Path, tmp_path: Path, prefix: Path, host: SimulatedHost
) -> None:
    """The simulated libcuda runs kernels on the CPU, on each GPU whose node it can open."""
    bundle = Bundle(tmp_path / "bundle", scratch, ["/cuda-check"], env=visible("all"), prestart=nvhook(prefix, host))
    done = bundle.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert f"devices: {len(host.host.gpus)}" in done.stdout
    other = tmp_path / "other"
    program = verify.installed("cuda-check")
    assert program is not None
    verify.build_root(other, program)
    without = Bundle(tmp_path / "without", other, ["/cuda-check"]).run()
    assert "libcuda.so.1: cannot open shared object file" in without.stderr

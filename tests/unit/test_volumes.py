# SPDX-License-Identifier: Apache-2.0
"""A path as the runtime will resolve it, where an image or a volume wants that to take long."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hook import volumes
from ldcache.errors import NvhookError


@pytest.fixture
def base(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_PATH)
    yield fd
    os.close(fd)


def test_links_are_followed_also_to_what_is_not_there_yet(base: int, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("/b/./c//d/")
    (tmp_path / "x").symlink_to("../a/../e")
    assert volumes.Volumes(base).real("/a/f/g") == "/b/c/d/f/g"
    assert volumes.Volumes(base).real("/x/f") == "/b/c/e/f"
    assert volumes.Volumes(base).real("/../") == ""


def chain(top: Path, text: str) -> None:
    for number in range(39):
        (top / f"l{number}").symlink_to(f"/l{number + 1}{text}")


LONG = "/a" * (volumes.PARTS_MAX + 1)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        pytest.param("/v" + "/a" * 40_000, "", id="a volume's destination"),
        pytest.param(LONG, "", id="parts"),
        pytest.param("/l0", "/a" * 2040, id="a chain of links"),
        pytest.param("/l0", "/." * 2040, id="links with parts that are none"),
        pytest.param("/l0", "/" * 4080, id="slashes"),
        pytest.param("/" + "/".join(["a" * 200] * 30), "", id="bytes"),
        pytest.param("/loop", "", id="a circle"),
    ],
)
def test_what_would_take_long_is_refused(base: int, tmp_path: Path, path: str, text: str) -> None:
    """The parts are counted: a chain alone took 46 seconds, a destination 28."""
    chain(tmp_path, text)
    (tmp_path / "loop").symlink_to("loop")
    begin = time.process_time()
    with pytest.raises(NvhookError, match="is too long, or has too many links") as caught:
        volumes.Volumes(base).real(path)
    assert time.process_time() - begin < 1
    assert len(caught.value.what) < 300

# SPDX-License-Identifier: Apache-2.0
"""What an image's loader and ldconfig search, where the image wants it to take long."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hook import loader
from ldcache import cache, imageconf, root


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A root with a thousand folders in ld.so.conf, older than its cache."""
    (tmp_path / "etc").mkdir()
    folders = [f"/opt/{number:04}" for number in range(imageconf.FOLDERS_MAX)]
    for folder in folders:
        (tmp_path / folder[1:]).mkdir(parents=True)
        os.utime(tmp_path / folder[1:], (1, 1))
    (tmp_path / "etc/ld.so.conf").write_text("\n".join(folders))
    return tmp_path


def stale(image: Path, data: bytes) -> tuple[list[str], float]:
    """The stale folders with that for a cache, and the processor time that it took to tell."""
    (image / "etc/ld.so.cache").write_bytes(data)
    base = root.open_root(str(image))
    facts = loader.Loader()
    facts.conf = imageconf.read(base, loader.DROP_IN)
    begin = time.process_time()
    found = loader.stale(base, facts)
    seconds = time.process_time() - begin
    os.close(base)
    return found, seconds


def test_folders_that_the_cache_does_not_list(image: Path) -> None:
    entries = [cache.Entry(b"liba.so.1", b"/opt/0007/liba.so.1", 0x303)]
    found, _ = stale(image, cache.serialize(cache.Cache(entries, generator=b"g")))
    assert len(found) == imageconf.FOLDERS_MAX - 1 and "/opt/0007" not in found


def test_a_huge_cache_is_not_searched_for_each(image: Path) -> None:
    """Sixteen megabytes of what nearly is what is looked for, once a folder."""
    found, seconds = stale(image, (b"\0/opt/" * (cache.MAX_FILE // 6))[: cache.MAX_FILE])
    assert 0 < len(found) < imageconf.FOLDERS_MAX
    assert seconds < 3


def test_a_folder_that_changed_is_stale_in_any_case(image: Path) -> None:
    data = bytes(cache.MAX_FILE)
    stale(image, data)
    later = (image / "etc/ld.so.cache").stat().st_mtime + 100
    os.utime(image / "opt/0250", (later, later))
    base = root.open_root(str(image))
    facts = loader.Loader()
    facts.conf = imageconf.read(base, loader.DROP_IN)
    assert "/opt/0250" in loader.stale(base, facts)
    os.close(base)

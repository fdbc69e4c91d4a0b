# SPDX-License-Identifier: Apache-2.0
"""ld.so.conf: its lines, and the patterns of what it includes, against glob(3)."""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ldcache import conf
from ldcache.tree import Tree, opened


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Tree]:
    with opened(str(tmp_path)) as tree:
        yield tree


def write(tmp_path: Path, **files: str) -> None:
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_lines(tmp_path: Path, image: Tree) -> None:
    write(
        tmp_path,
        etc__ld_so_conf="\n # comment\n/a # why\n\t/b/ \ninclude ld.so.conf.d/*.conf\t/etc/x.list # z\n/c=libc6\n"
        "hwcap 0 nosegneg\nHWCap\t1 x\nhwcaps\nincluded\ninclude\n/d\0/e\n/last",
        etc__ld_so_conf_d__b_conf="/from/b\ninclude more/*\n",
        etc__ld_so_conf_d__a_conf="/from/a",
        etc__ld_so_conf_d__more__x="/from/more\n",
        etc__x_list="/from/x\n",
    )
    assert conf.folders(image, b"/etc/ld.so.conf") == [
        b"/a ",
        b"/b/ ",
        b"/from/a",
        b"/from/b",
        b"/from/more",
        b"/from/x",
        b"/c=libc6",
        b"hwcaps",
        b"included",
        b"include",
        b"/d",
        b"/last",
    ]


def test_what_is_no_file_lists_nothing(tmp_path: Path, image: Tree) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    for name in (b"/fifo", b"/loop", b"/folder", b"/nowhere", b"/fifo/x"):
        assert conf.folders(image, name) == []


NAMES = ["a", "b", "ab", "a.conf", "b.conf", ".hidden", "[c]", "-", "]", "a-b", "\\", "^", "!", "aXb", "zz"]


class Glob(ctypes.Structure):
    """glob_t of glibc."""

    _fields_ = [
        ("count", ctypes.c_size_t),
        ("paths", ctypes.POINTER(ctypes.c_char_p)),
        ("offset", ctypes.c_size_t),
        ("flags", ctypes.c_int),
        ("functions", ctypes.c_void_p * 5),
    ]


def real_glob(pattern: bytes) -> list[bytes]:
    libc = ctypes.CDLL(None)
    found = Glob()
    if libc.glob(pattern, 0, None, ctypes.byref(found)) != 0:
        return []
    paths = [found.paths[number] or b"" for number in range(found.count)]
    libc.globfree(ctypes.byref(found))
    return sorted(paths)


# A slash in a bracket or escaped has no meaning that anybody relies on.
PATTERNS = st.text(st.sampled_from("ab*?[]!^-.c\\zX/"), min_size=1, max_size=8).filter(
    lambda pattern: not re.search(r"\\/|\[.*/", pattern)
)


@given(PATTERNS)
@settings(max_examples=1500, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_patterns_equal_glob(tmp_path: Path, image: Tree, pattern: str) -> None:
    for folder in ("", "a/"):
        for name in NAMES:
            if not (tmp_path / folder / name).exists():
                (tmp_path / folder / name).mkdir()
    top = os.fsencode(tmp_path)
    expected = [path[len(top) :] for path in real_glob(top + b"/" + pattern.encode())]
    assert plain(conf.matches(image, b"/" + pattern.encode())) == plain(expected)


def plain(names: list[bytes]) -> list[bytes]:
    return sorted(re.sub(b"/+", b"/", name).rstrip(b"/") for name in names)


def test_many_stars_take_no_longer(tmp_path: Path, image: Tree) -> None:
    (tmp_path / ("a" * 250)).touch()
    began = time.process_time()
    assert conf.matches(image, b"/" + b"*a" * 200 + b"b") == []
    assert conf.matches(image, b"/" + b"[a-]*" * 120 + b"?") == [b"/" + b"a" * 250]
    assert time.process_time() - began < 1

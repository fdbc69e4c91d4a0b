# SPDX-License-Identifier: Apache-2.0
"""Names that ldconfig takes; patterns are held against glob(3) in test_ldcache_conf."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ldcache import names


@given(st.text("ab*?!-.", max_size=8), st.text("ab.-", max_size=8))
def test_patterns(pattern: str, name: str) -> None:
    """fnmatch reads brackets otherwise than glob(3) does; those are left to the test below."""
    assert names.Pattern(pattern.encode()).matches(name.encode()) == fnmatch.fnmatchcase(name, pattern)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("[ab].conf", "a.conf", True),
        ("[!ab].conf", "a.conf", False),
        ("[^ab].conf", "c.conf", True),
        ("[a-c]*", "bxx", True),
        ("[]a]", "]", True),
        ("[", "[", True),
        ("\\*", "*", True),
        ("\\*", "a", False),
        ("*a*b*c", "a" * 200, False),
        # Two bytes in the C locale.
        ("?", "\u00e9", False),
        ("??", "\u00e9", True),
    ],
)
def test_brackets(pattern: str, name: str, expected: bool) -> None:
    assert names.Pattern(pattern.encode()).matches(name.encode()) is expected


def test_hidden_names_only_where_the_pattern_has_the_dot() -> None:
    listed = [b"b", b".c", b"a"]
    assert names.Pattern(b"*").among(listed) == [b"a", b"b"]
    assert names.Pattern(b".*").among(listed) == names.Pattern(b"\\.*").among(listed) == [b".c"]


def test_libraries() -> None:
    good = (b"liba.so", b"liba.so.1", b"ld-linux.so.2", b"ld.so.1", b"libfoo-1.2.so")
    bad = (b"a.so", b"liba.a", b"ld.so")
    assert [name for name in (*good, *bad) if names.is_library(name)] == list(good)
    partial = (
        b"liba.so.1.dpkg-new",
        b"liba.so.1.dpkg-tmp",
        b"liba.so.#prelink#",
        b"liba.so.#prelink#.abcdef",
        b"liba.so;1",
    )
    assert [name for name in (*good, *partial) if names.is_temporary(name)] == list(partial)
    assert not names.is_temporary(b"liba.so.1.dpkg-new", package_managers=False)

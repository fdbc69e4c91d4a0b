# SPDX-License-Identifier: Apache-2.0
"""The order of entries, against glibc's functions written down step by step."""

from __future__ import annotations

import functools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ldcache import cache, order
from ldcache.cache import Entry


def int32(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def libcmp(one: bytes, other: bytes, signed: bool = True) -> int:
    """_dl_cache_libcmp, step by step: negative, zero or positive."""
    a, b = [*one, 0], [*other, 0]
    i = j = 0
    while a[i]:
        if 48 <= a[i] <= 57 and 48 <= b[j] <= 57:
            left = right = 0
            while 48 <= a[i] <= 57:
                left = int32(left * 10 + a[i] - 48)
                i += 1
            while 48 <= b[j] <= 57:
                right = int32(right * 10 + b[j] - 48)
                j += 1
            if left != right:
                return int32(left - right)
        elif 48 <= a[i] <= 57:
            return 1
        elif 48 <= b[j] <= 57:
            return -1
        elif a[i] != b[j]:
            break
        else:
            i += 1
            j += 1
    return char(a[i], signed) - char(b[j], signed)


def char(byte: int, signed: bool) -> int:
    return byte - 256 if signed and byte > 127 else byte


def sign(value: int) -> int:
    return (value > 0) - (value < 0)


SONAME = st.text(st.sampled_from("ab._-0129~\x01\x7f\x80\xff"), max_size=10).map(lambda text: text.encode("latin-1"))


@given(SONAME, SONAME, st.booleans())
@settings(max_examples=2000, deadline=None)
def test_libcmp_key(one: bytes, other: bytes, signed: bool) -> None:
    keys = [order.libcmp_key(name, signed_char=signed) for name in (one, other)]
    expected = sign(libcmp(one, other, signed))
    # A difference of two runs that doesn't fit 32 bits has no order.
    if not any(len(run) > 9 for run in (one + b" " + other).translate(order._DIGITS_ONLY).split()):
        assert (keys[0] > keys[1]) - (keys[0] < keys[1]) == expected


@pytest.mark.parametrize(
    ("greater", "lesser"),
    [
        (b"liba.so.10", b"liba.so.9"),
        (b"liba.so.2", b"liba.so.1.9"),
        (b"liba.so.1", b"liba.so"),
        (b"libfoo.so_bak", b"libfoo.so.1"),
        (b"lib1", b"liba"),
        (b"lib\x7f", b"lib"),
        (b"lib", b"lib\x80"),
        (b"liba.so.2147483647", b"liba.so.2147483646"),
        (b"liba.so.2147483647", b"liba.so.4294967296"),
    ],
)
def test_libcmp_examples(greater: bytes, lesser: bytes) -> None:
    assert libcmp(greater, lesser) > 0
    assert order.libcmp_key(greater) > order.libcmp_key(lesser)


def test_libcmp_equals() -> None:
    for one, other in ((b"a.01", b"a.1"), (b"a.0", b"a.00"), (b"a.4294967297", b"a.1")):
        assert libcmp(one, other) == 0
        assert order.libcmp_key(one) == order.libcmp_key(other)
    assert order.libcmp_key(b"lib\x80", signed_char=False) > order.libcmp_key(b"lib", signed_char=False)


def test_signed_char() -> None:
    assert order.signed_char([Entry(b"a", b"a", 0x303), Entry(b"a", b"a", 3)])
    assert not order.signed_char([Entry(b"a", b"a", 0xA03)])


def test_order_of_equal_sonames() -> None:
    level = cache.HWCAP_EXTENSION
    ordered = [
        Entry(b"liba.so", b"/1", 0x303, level, b"x86-64-v2"),
        Entry(b"liba.so", b"/2", 0x303, level | 3 << 32, b"x86-64-v3"),
        Entry(b"liba.so", b"/3", 0x303, 3),
        Entry(b"liba.so", b"/4", 0x303, 1 << 63),
        Entry(b"liba.so", b"/5", 0x303, 1),
        Entry(b"liba.so", b"/6", 0x303, osversion=2),
        Entry(b"liba.so", b"/7", 0x303, osversion=1),
        Entry(b"liba.so", b"/8", 0x303),
        Entry(b"liba.so", b"/9", 3),
        Entry(b"liba.so", b"/10", -1),
    ]
    keys = [order.libcmp_key(entry.soname) for entry in ordered]
    assert order.misplaced(ordered, keys) is None
    for index in range(len(ordered) - 1):
        swapped = list(ordered)
        swapped[index], swapped[index + 1] = swapped[index + 1], swapped[index]
        assert order.misplaced(swapped, keys) == index + 1


# libcmp itself, and what ldconfig makes of a list


ANY_SONAME = st.one_of(
    SONAME,
    st.builds(
        lambda number, tail: b"lib.so.%d%b" % (number, tail),
        st.one_of(st.integers(0, 20), st.integers((1 << 31) - 3, (1 << 33) + 3)),
        st.sampled_from([b"", b".1", b"x"]),
    ),
)
FLAGS = st.sampled_from([0x303, 3, 1, -1])
HWCAPS = st.sampled_from([(0, None), (1 << 62, b"x86-64-v2"), (1 << 62, b"x86-64-v3"), (1 << 63, None), (3, None)])
ENTRIES = st.lists(
    st.builds(lambda soname, flags, hwcap: (soname, flags, *hwcap), ANY_SONAME, FLAGS, HWCAPS), max_size=14
).map(
    lambda rows: [
        Entry(soname, b"/%d" % number, flags, hwcap, hwcaps)
        for number, (soname, flags, hwcap, hwcaps) in enumerate(rows)
    ]
)


@given(ANY_SONAME, ANY_SONAME, st.booleans())
@settings(max_examples=2000)
def test_libcmp(one: bytes, other: bytes, signed: bool) -> None:
    assert order.libcmp(one, other, signed_char=signed) == libcmp(one, other, signed)
    if not order.wraps((one, other)):
        keys = [order.libcmp_key(name, signed_char=signed) for name in (one, other)]
        assert (keys[0] > keys[1]) - (keys[0] < keys[1]) == sign(libcmp(one, other, signed))


def inserted(entries: list[Entry]) -> list[Entry]:
    """add_to_cache of elf/cache.c: each goes before the first that is greater."""
    found: list[Entry] = []
    for entry in entries:
        place = next((place for place, known in enumerate(found) if compare(known, entry) > 0), len(found))
        found.insert(place, entry)
    return found


def compare(one: Entry, other: Entry) -> int:
    """compare of elf/cache.c."""
    result = libcmp(other.soname, one.soname)
    if result == 0:
        ties = order.tie_key(one), order.tie_key(other)
        return (ties[0] > ties[1]) - (ties[0] < ties[1])
    return result


@given(ENTRIES)
@settings(max_examples=1000)
def test_arranged_as_ldconfig_inserts(entries: list[Entry]) -> None:
    assert order.arranged(entries) == inserted(entries)


def test_arranged_is_quick_where_names_have_an_order() -> None:
    random_ = random.Random("arranged")
    entries = [Entry(b"lib%d.so.%d" % (random_.randrange(999), n % 7), b"/%d" % n, 0x303) for n in range(20_000)]
    began = time.process_time()
    found = order.arranged(entries)
    assert time.process_time() - began < 2
    assert found[:50] == sorted(entries, key=functools.cmp_to_key(compare))[:50]

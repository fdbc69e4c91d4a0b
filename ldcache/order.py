# SPDX-License-Identifier: Apache-2.0
"""The order of a cache's entries: `compare` in glibc's elf/cache.c, `_dl_cache_libcmp` in elf/dl-cache.c.

Hot. A cache is sorted *descending* by soname as libcmp sees it, and the loader searches by the same function: an entry
out of order is one that no program finds.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ldcache.cache import Entry

# End of string is 0 and C's char is signed on x86, so bytes from 0x80 sort below the end; digits are above
# all else.
_SIGNED = bytes([*range(0x80, 0x100), 0, *(c for c in range(1, 0x80) if not 0x30 <= c <= 0x39), *range(0x30, 0x3A)])
_UNSIGNED = bytes([0, *(c for c in range(1, 0x100) if not 0x30 <= c <= 0x39), *range(0x30, 0x3A)])


def _ranks(order: bytes) -> bytes:
    return bytes(map(order.index, range(0x100)))


_SIGNED_RANKS = _ranks(_SIGNED)
_UNSIGNED_RANKS = _ranks(_UNSIGNED)
_DIGITS_ONLY = bytes(c if 0x30 <= c <= 0x39 else 0x20 for c in range(0x100))
# A run of digits becomes this byte, which no other character's rank reaches, and its value.
_RUN = b"\xf6"

MAX_RUNS = 500_000

# Second byte of the flags of architectures whose C char is unsigned: s390x, ppc64, ARM, AArch64, RISC-V.
_UNSIGNED_CHAR = frozenset((0x400, 0x500, 0x900, 0xA00, 0xB00, 0xF00, 0x1000))


def libcmp_key(soname: bytes, *, signed_char: bool = True) -> bytes:
    """Bytes that sort as _dl_cache_libcmp sorts sonames; equal where it returns 0 (`.so.01` and `.so.1`).

    Each run of digits counts as its value, wrapped to 32 bits as in C. libcmp also wraps the *difference* of
    two runs: where two values at one place are 2^31 or more apart, so at least one run is beyond 2147483647,
    its order is none (it isn't transitive) and this one differs.
    """
    ranks = _SIGNED_RANKS if signed_char else _UNSIGNED_RANKS
    runs = soname.translate(_DIGITS_ONLY).split()
    parts = []
    for run in runs:
        # The first place where these digits stand is this run: the remaining name has no earlier digit.
        before, _, soname = soname.partition(run)
        parts.append(before.translate(ranks))
        parts.append(_RUN_KEYS.get(run) or _run_key(run))
    parts.append(soname.translate(ranks))
    parts.append(ranks[:1])
    return b"".join(parts)


class TooManyNumbers(ValueError):
    """Sonames with more runs of digits than a cache's order is worth."""

    __slots__ = ()


def libcmp_keys(sonames: list[bytes], *, signed_char: bool = True) -> list[bytes]:
    """The libcmp_key of each soname, made once of equal ones.

    A cache may hold a hundred thousand names of nothing but digits and letters by turns, and each run of digits takes
    its time. Raises TooManyNumbers beyond MAX_RUNS of them in different names.
    """
    made: dict[bytes, bytes] = {}
    left = MAX_RUNS
    for soname in sonames:
        if soname not in made:
            key = made[soname] = libcmp_key(soname, signed_char=signed_char)
            # Each run is one _RUN byte in the key; bytes of the values may look like one, which only counts too much.
            left -= key.count(_RUN)
            if left < 0:
                raise TooManyNumbers(f"more than {MAX_RUNS} numbers in its sonames")
    return [made[soname] for soname in sonames]


def _run_key(run: bytes) -> bytes:
    return _RUN + (_run_value(run) ^ 0x80000000).to_bytes(4, "big")


def _run_value(run: bytes) -> int:
    """The value of these digits, wrapped to 32 bits without sign."""
    if len(run) < 10:
        return int(run)
    # Digit by digit as C does: int() of a name from a hostile file could be a number of any size.
    value = 0
    for digit in run:
        value = value * 10 + digit - 0x30 & 0xFFFFFFFF
    return value


_RUN_KEYS = {b"%d" % value: _run_key(b"%d" % value) for value in range(100)}


def signed_char(entries: Iterable[Entry]) -> bool:
    """Whether the machine that these entries are for compares names as signed bytes, as x86 does."""
    return all(entry.flags & 0xFF00 not in _UNSIGNED_CHAR for entry in entries)


def tie_key(entry: Entry) -> tuple[int, bool, bytes, int, int, int]:
    """Order among entries whose sonames are equal: flags, glibc-hwcaps by name, legacy hwcap, OS version.

    The last two are of ldconfig up to 2.36 and 2.35; later ones write zeros there, so one rule serves all.
    """
    if entry.hwcaps is not None:
        return -entry.flags, False, entry.hwcaps, 0, 0, -entry.osversion
    return -entry.flags, True, b"", -entry.hwcap.bit_count(), -entry.hwcap, -entry.osversion


def misplaced(entries: list[Entry], keys: list[bytes]) -> int | None:
    """Index of the first entry that must not stand behind the one before it; None if the order holds.

    `keys` are the libcmp_key of each soname.
    """
    for index in range(1, len(keys)):
        if keys[index - 1] > keys[index]:
            continue
        if keys[index - 1] < keys[index] or tie_key(entries[index - 1]) > tie_key(entries[index]):
            return index
    return None


def libcmp(one: bytes, other: bytes, *, signed_char: bool = True) -> int:
    """_dl_cache_libcmp itself, character by character: negative, zero or positive.

    Slow. For names that `libcmp_key` can't order, see `wraps`.
    """
    at = there = 0
    while at < len(one):
        left, right = one[at], other[there] if there < len(other) else 0
        if _is_digit(left) and _is_digit(right):
            first, at = _run(one, at)
            second, there = _run(other, there)
            if first != second:
                return _int32(first - second)
        elif _is_digit(left):
            return 1
        elif _is_digit(right):
            return -1
        elif left != right:
            return _char(left, signed_char) - _char(right, signed_char)
        else:
            at += 1
            there += 1
    return -_char(other[there], signed_char) if there < len(other) else 0


def _is_digit(character: int) -> bool:
    return 0x30 <= character <= 0x39


def _run(name: bytes, at: int) -> tuple[int, int]:
    """The value of the digits at `at`, and where they end."""
    end = at
    while end < len(name) and _is_digit(name[end]):
        end += 1
    return _int32(_run_value(name[at:end])), end


def _int32(value: int) -> int:
    return (value + 0x80000000 & 0xFFFFFFFF) - 0x80000000


def _char(character: int, signed: bool) -> int:
    return character - 0x100 if signed and character > 0x7F else character


def wraps(sonames: Iterable[bytes]) -> bool:
    """Whether two runs of digits in these names may differ by 2^31 or more, so that libcmp has no order for them."""
    least = greatest = 0
    for soname in sonames:
        for run in soname.translate(_DIGITS_ONLY).split():
            value = _int32(_run_value(run))
            least, greatest = min(least, value), max(greatest, value)
    return greatest - least >= 1 << 31


def arranged(entries: list[Entry]) -> list[Entry]:
    """Entries in the order that ldconfig gives them when it meets them in this one."""
    signed = signed_char(entries)
    if wraps([entry.soname for entry in entries]):
        return _inserted_one_by_one(entries, signed)
    ordered = sorted(entries, key=tie_key)
    # Descending, yet stable: `reverse` keeps equals in their order.
    ordered.sort(key=lambda entry: libcmp_key(entry.soname, signed_char=signed), reverse=True)
    return ordered


def _inserted_one_by_one(entries: list[Entry], signed: bool) -> list[Entry]:
    """ldconfig's own loop: each goes before the first one that is greater. Where libcmp isn't transitive, only this
    gives its result; quadratic, as it is there."""
    ordered: list[Entry] = []
    for entry in entries:
        tie = tie_key(entry)
        for place, known in enumerate(ordered):
            # Descending by soname.
            result = libcmp(entry.soname, known.soname, signed_char=signed)
            if result > 0 or (result == 0 and tie_key(known) > tie):
                ordered.insert(place, entry)
                break
        else:
            ordered.append(entry)
    return ordered

# SPDX-License-Identifier: Apache-2.0
"""Which names ldconfig takes: those that a pattern of ld.so.conf stands for, and those of libraries.

Hot. One component of a path at a time, in bytes: ldconfig runs in the C locale, where `?` is one byte. Opening folders
is the caller's business. Patterns are glob(3)'s without named classes; names are `_dl_is_dso`'s and
search_dir's (glibc `elf/ldconfig.c`).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MAGIC = frozenset(b"*?[\\")
_ANY = frozenset(range(0x100))


def is_pattern(part: bytes) -> bool:
    """Whether a component of a path is a pattern at all."""
    return not MAGIC.isdisjoint(part)


class Pattern:
    """One component of a shell pattern.

    Matched in steps of at most name times pattern; the image chose both, and a regular expression of many stars would
    take for ever.
    """

    __slots__ = ("hidden", "tokens")

    def __init__(self, text: bytes) -> None:
        self.hidden = text.startswith((b".", b"\\."))
        # Each is what one character may be; None is any number of any.
        self.tokens: list[frozenset[int] | None] = []
        at = 0
        while at < len(text):
            token, at = _token(text, at)
            if token is not None or self.tokens[-1:] != [None]:
                self.tokens.append(token)

    def among(self, listed: Iterable[bytes]) -> list[bytes]:
        """The names of a folder that it stands for, in C order; hidden ones only where it begins with the dot."""
        return sorted([name for name in listed if (self.hidden or name[:1] != b".") and self.matches(name)])

    def matches(self, name: bytes) -> bool:
        """Whether the whole name fits."""
        tokens = self.tokens
        at = here = 0
        # Behind the last star, and where in the name it stopped; only that one is ever widened.
        star, stopped = -1, 0
        while at < len(name):
            token = tokens[here] if here < len(tokens) else frozenset()
            if token is None:
                star, stopped = here + 1, at
                here += 1
            elif name[at] in token:
                at += 1
                here += 1
            elif star >= 0:
                stopped += 1
                at, here = stopped, star
            else:
                return False
        return all(token is None for token in tokens[here:])


def _token(text: bytes, at: int) -> tuple[frozenset[int] | None, int]:
    """What the pattern says at `at`, and where it goes on."""
    character = text[at : at + 1]
    if character == b"*":
        return None, at + 1
    if character == b"?":
        return _ANY, at + 1
    if character == b"[" and (bracket := _bracket(text, at + 1)) is not None:
        return bracket
    if character == b"\\":
        # At the end it escapes nothing, and fits nothing.
        at += 1
    return frozenset(text[at : at + 1]), at + 1


def _bracket(text: bytes, at: int) -> tuple[frozenset[int], int] | None:
    """The characters that a bracket stands for, and where it ends. None for one that is never closed: a plain `[`."""
    inverse = text[at : at + 1] in (b"!", b"^")
    at += inverse
    found: set[int] = set()
    first = True
    while first or text[at : at + 1] != b"]":
        first = False
        low, at = _inside(text, at)
        high = low
        if text[at : at + 1] == b"-" and text[at + 1 : at + 2] not in (b"]", b""):
            high, at = _inside(text, at + 1)
        if low is None or high is None or at >= len(text):
            return None
        found.update(range(low, high + 1))
    return (_ANY - found if inverse else frozenset(found)), at + 1


def _inside(text: bytes, at: int) -> tuple[int | None, int]:
    """One character of a bracket, which may be escaped."""
    if text[at : at + 1] == b"\\":
        at += 1
    return (text[at] if at < len(text) else None), at + 1


def is_library(name: bytes) -> bool:
    """Whether a file of that name may be a library or the loader."""
    return name.startswith((b"lib", b"ld-", b"ld.so.", b"ld64.so.")) and b".so" in name


def is_temporary(name: bytes, package_managers: bool = True) -> bool:
    """Whether prelink made the file and will rename it, or, which ldconfig asks since 2.39, dpkg or rpm."""
    if name.endswith(b".#prelink#") or (len(name) >= 17 and name[-17:-6] == b".#prelink#."):
        return True
    return package_managers and (b";" in name or name.endswith((b".dpkg-new", b".dpkg-tmp")))


def is_hwcaps(name: bytes) -> bool:
    """Whether a sub-folder of `glibc-hwcaps` counts."""
    return name[:1] != b"." and b":" not in name

# SPDX-License-Identifier: Apache-2.0
"""ld.so.conf: the folders that it lists, with what it includes (`parse_conf` in glibc's elf/ldconfig.c).

A container's image may have written the file, so it has bounds where ldconfig has none: a file that includes itself
would be read until descriptors run out.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from ldcache import names
from ldcache.errors import NvhookError
from ldcache.tree import Tree

MAX_FILE = 1 << 20
MAX_DEPTH = 16
MAX_FILES = 4096

_SPACE = b" \t\n\v\f\r"


def folders(tree: Tree, path: bytes) -> list[bytes]:
    """The lines that name folders, as they stand but for comment and leading blanks, in ldconfig's order.

    A file that isn't there lists none. Raises NvhookError for one that can't be read, and beyond the bounds.
    """
    return list(_Reader(tree).folders(path, 0))


class _Reader:
    __slots__ = ("files", "tree")

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.files = 0

    def folders(self, path: bytes, depth: int) -> Iterator[bytes]:
        self.files += 1
        if depth > MAX_DEPTH or self.files > MAX_FILES:
            raise _too_much(path)
        for line in _lines(_content(self.tree, path)):
            words = line.replace(b"\t", b" ").split(b" ")
            if words[0] == b"include" and len(words) > 1:
                for pattern in words[1:]:
                    if pattern:
                        yield from self.included(path, pattern, depth)
            elif not (words[0].lower() == b"hwcap" and len(words) > 1):
                yield line

    def included(self, path: bytes, pattern: bytes, depth: int) -> Iterator[bytes]:
        folder, slash, _ = path.rpartition(b"/")
        if not pattern.startswith(b"/") and slash:
            pattern = (folder or b"/") + b"/" + pattern
        for name in matches(self.tree, pattern):
            yield from self.folders(name, depth + 1)


def _too_much(path: bytes) -> NvhookError:
    what = f"{os.fsdecode(path)} includes too much: more than {MAX_DEPTH} deep, or {MAX_FILES} files"
    return NvhookError(what, "see whether a file of ld.so.conf includes itself")


def _content(tree: Tree, path: bytes) -> bytes:
    try:
        return tree.read_file(path, MAX_FILE)
    except OSError as error:
        # ldconfig warns of those that are no files and goes on; a folder, a FIFO or a loop names no library folder.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG):
            return b""
        what = f"cannot read the configuration {os.fsdecode(path)}: {error.strerror}"
        raise NvhookError(what, "make it readable, or name another one with -f") from error


def _lines(text: bytes) -> Iterator[bytes]:
    for line in text.split(b"\n"):
        # A C string ends at NUL.
        line = line.partition(b"\0")[0].partition(b"#")[0].lstrip(_SPACE)
        if line:
            yield line


def matches(tree: Tree, pattern: bytes) -> list[bytes]:
    """glob(3) inside the tree, in byte order, hidden names only where the pattern has the dot."""
    found = [b"/" if pattern.startswith(b"/") else b""]
    for part in pattern.split(b"/"):
        if not part:
            continue
        if names.is_pattern(part):
            wanted = names.Pattern(part)
            found = [folder + name for folder in found for name in wanted.among(_listed(tree, folder or b"."))]
        else:
            found = [folder + part for folder in found if _exists(tree, folder + part)]
        if len(found) > MAX_FILES:
            raise _too_much(pattern)
        found = [name + b"/" for name in found]
    return sorted(name.rstrip(b"/") for name in found)


def _exists(tree: Tree, name: bytes) -> bool:
    try:
        tree.status(name, follow=False)
    except OSError:
        return False
    return True


def _listed(tree: Tree, folder: bytes) -> list[bytes]:
    try:
        fd = tree.open_folder(folder)
    except OSError:
        return []
    try:
        # readdir(3) lists these two as well.
        return [b".", b"..", *(os.fsencode(name) for name in os.listdir(fd))]
    finally:
        os.close(fd)

# SPDX-License-Identifier: Apache-2.0
"""The links that ldconfig makes and removes in the folders that it scans (`create_links` in glibc's elf/ldconfig.c)."""

from __future__ import annotations

import os
import stat

from ldcache.tree import Tree

# Links that Debian's patch of ldconfig never re-points, since they lead to the loader. Two of its names lack a comma.
LOADERS = frozenset(
    (
        b"ld-kfreebsd-x86-64.so.1",
        b"ld-linux-aarch64.so.1",
        b"ld-linux-aarch64_be.so.1",
        b"ld-linux-armhf.so.3",
        b"ld-linux-ia64.so.2",
        b"ld-linux-mipsn8.so.1",
        b"ld-linux-riscv64-lp64.so.1ld-linux-riscv64-lp64d.so.1ld-linux-x32.so.2",
        b"ld-linux-x86-64.so.2",
        b"ld-linux.so.2",
        b"ld-linux.so.3",
        b"ld.so.1",
        b"ld64.so.1",
        b"ld64.so.2",
    )
)


def make(tree: Tree, folder: bytes, name: bytes, soname: bytes) -> str | None:
    """Let `soname` in this folder lead to the library `name` in it. The text of a warning, if there is one.

    Nothing happens where it leads there already, or is something else than a link.
    """
    link = folder + b"/" + soname
    try:
        leads_to = tree.status(link)
    except OSError:
        leads_to = None
    if leads_to is not None:
        try:
            library = tree.status(folder + b"/" + name)
        except OSError as error:
            return f"cannot look at {os.fsdecode(folder + b'/' + name)}: {error.strerror}"
        if soname in LOADERS or (leads_to.st_dev, leads_to.st_ino) == (library.st_dev, library.st_ino):
            return None
    try:
        return _replace(tree, link, name, exists=leads_to is not None)
    except OSError as error:
        return f"cannot link {os.fsdecode(link)} to {os.fsdecode(name)}: {error.strerror}"


def _replace(tree: Tree, link: bytes, name: bytes, *, exists: bool) -> str | None:
    # A soname may hold slashes: its folder is looked up inside the root like any other.
    with tree.folder_of(link) as (folder, base):
        try:
            is_link = stat.S_ISLNK(os.lstat(base, dir_fd=folder).st_mode) if base else False
        except FileNotFoundError:
            is_link = False
        if exists and not is_link:
            return f"{os.fsdecode(link)} is not a symbolic link"
        if is_link:
            os.unlink(base, dir_fd=folder)
        os.symlink(name, base, dir_fd=folder)
    return None

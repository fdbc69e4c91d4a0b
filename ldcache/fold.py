# SPDX-License-Identifier: Apache-2.0
"""A folder of a root, read and merged into that root's cache: the verb `merge`."""

from __future__ import annotations

import os

from ldcache import merge, scan
from ldcache.cache import Cache, Entry
from ldcache.errors import NvhookError
from ldcache.rules import Rules
from ldcache.tree import Tree


class Folder:
    """The folder, by an absolute name inside the root, and the cache it is meant for.

    Whether the cache lists it already is judged by device and inode: another spelling of a listed folder is the same
    folder. Raises NvhookError where there is none.
    """

    __slots__ = ("aliases", "cache", "path", "scanner", "tree")

    def __init__(self, tree: Tree, cache: Cache, path: bytes, rules: Rules) -> None:
        self.tree = tree
        self.cache = cache
        self.path = path.rstrip(b"/")
        self.scanner = scan.Scanner(tree, rules, with_links=False)
        if path.startswith(b"/"):
            self.scanner.add(path)
        if not self.scanner.folders:
            what = f"cannot merge the folder {os.fsdecode(path)}: there is no such folder, or its name is relative"
            raise NvhookError(what, "give the absolute path of an existing folder with --folder")
        self.aliases = self._aliases()

    @property
    def warnings(self) -> list[str]:
        """Lines for a person."""
        return self.scanner.warnings

    def _aliases(self) -> list[bytes]:
        """The spellings under which the cache lists this folder, its own one too."""
        identity = self.scanner.folders[0].identity
        found = []
        for folder in merge.folders(self.cache):
            try:
                status = self.tree.status(folder)
            except OSError:
                continue
            if (status.st_dev, status.st_ino) == identity:
                found.append(folder)
        return found

    def merged(self, names: list[bytes], *, win: bool) -> Cache:
        """The cache with the folder merged into it.

        With `names`, files of a folder that is listed already, only these come in, and all else of it stays; otherwise
        all that the folder has, as a rerun of ldconfig with it listed first. Raises NvhookError for a name that is no
        library there, UnmergeableLdCache for the cache.
        """
        wanted = {self._inside(name) for name in names}
        whole = not names or not self.aliases
        read: set[bytes] = set()

        def accept(path: bytes) -> bool:
            if path in wanted:
                read.add(path)
            return whole or path in wanted

        entries = self.scanner.entries(accept)
        self._check_read(wanted, read, entries)
        return merge.merge(
            self.cache,
            self.path,
            entries,
            whole_folder=whole,
            win=win,
            aliases=self.aliases,
            subfolders=self.scanner.hwcaps_names if whole else (),
        )

    def _inside(self, name: bytes) -> bytes:
        """The path of a library named by its file in the folder, or by its whole path."""
        path = name if name.startswith(self.path + b"/") else self.path + b"/" + name
        if name.startswith(b"/") and path != name:
            what = f"{os.fsdecode(name)} is not in the folder {os.fsdecode(self.path)}"
            raise NvhookError(what, "name files of the folder that --folder names")
        return path

    def _check_read(self, wanted: set[bytes], read: set[bytes], entries: list[Entry]) -> None:
        missing = sorted(wanted - read)
        if missing or (wanted and not entries):
            what = f"{os.fsdecode((missing or sorted(wanted))[0])} is no library that ldconfig would list"
            raise NvhookError(what, "name files of the folder; they are called lib….so…, as ldconfig wants them")

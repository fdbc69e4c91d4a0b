# SPDX-License-Identifier: Apache-2.0
"""A whole cache from the folders that a root's configuration lists, as ldconfig makes it."""

from __future__ import annotations

import os

from ldcache import cache, conf, scan
from ldcache.cache import Cache
from ldcache.errors import NvhookError
from ldcache.order import arranged
from ldcache.rules import OLDEST, Rules
from ldcache.tree import Tree

# What ldconfig adds behind all others, Debian's and Ubuntu's; upstream's for x86-64 has lib64 and libx32 besides.
SYSTEM_FOLDERS = (b"/lib", b"/usr/lib")
# Names the version whose rules made it, in the words of ldconfig's own, so that `check` and `merge` know them.
GENERATOR = b"nvhook ldcache build, as ldconfig stable release version %d.%d"


def build(
    tree: Tree, rules: Rules, *, configuration: bytes, folders: list[bytes], with_links: bool, for_cache: bool
) -> tuple[Cache, list[str]]:
    """The cache of these folders, those of the configuration and the system's, and warnings.

    With `with_links` links are made and dangling ones removed, as ldconfig does without -X; `for_cache` says that the
    cache will be written, as without -N. A library whose soname or
    path is beyond the limits of `ldcache.cache` is left out, with a warning. Raises NvhookError.
    """
    if rules.version < OLDEST:
        what = f"cannot build as ldconfig {rules.version[0]}.{rules.version[1]} does"
        raise NvhookError(what, "give --like 2.36 or a later version")
    scanner = scan.Scanner(tree, rules, with_links=with_links, for_cache=for_cache)
    for folder in folders:
        if not folder.startswith(b"/"):
            what = f"{os.fsdecode(folder)} is a relative folder, which no cache can hold"
            raise NvhookError(what, "give its absolute path")
        scanner.add(folder)
    for line in conf.folders(tree, configuration):
        scanner.add(line)
    for folder in SYSTEM_FOLDERS:
        scanner.add(folder)
    entries = scanner.entries()
    if len(entries) > cache.MAX_ENTRIES:
        what = f"{len(entries)} libraries, more than {cache.MAX_ENTRIES}"
        raise NvhookError(what, "list fewer folders in the configuration")
    unused = scan.strings_of(entries, scanner.hwcaps_names)
    return Cache(arranged(entries), generator=GENERATOR % rules.version, unused=unused), scanner.warnings

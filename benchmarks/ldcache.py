# SPDX-License-Identifier: Apache-2.0
"""How long a loader cache takes: read, 40 libraries merged, written; and a build beside the real ldconfig's.

    python -m benchmarks.ldcache [--rounds 40]

Milliseconds after all imports, minimum and median. The merge is the one that a container start does; its cache is of
the same kind as a flat folder of that many libraries gives.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ldcache import build, cache, merge
from ldcache.cache import Entry
from ldcache.order import arranged
from ldcache.rules import LDCONFIG, Rules, ldconfig_version
from ldcache.tree import opened
from tests.simhost.elfwriter import shared_object

COUNTS = (100, 1_000, 5_000, 20_000)
OURS = 40
BUILT = 1_000


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args(argv).rounds
    print(f"{'':40}{'min':>9}{'median':>9}")
    folder = Path(tempfile.mkdtemp(prefix="nvhook-benchmark-"))
    try:
        for count in COUNTS:
            file = folder / "cache"
            file.write_bytes(a_cache(count))
            show(f"read, merge {OURS}, write: {count} libraries", rounds, partial(renewed, file))
        root = a_root(folder / "root")
        show(f"build: {BUILT} libraries", max(rounds // 8, 3), partial(built, root))
        for binary in LDCONFIG:
            if Path(binary).exists():
                show(f"ldconfig: {BUILT} libraries", max(rounds // 8, 3), partial(real, binary, root))
                break
    finally:
        shutil.rmtree(folder)
    return 0


def show(name: str, rounds: int, work: Callable[[], object]) -> None:
    """One line of the table."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1000)
    print(f"{name:40}{min(times):9.2f}{statistics.median(times):9.2f}")


def a_cache(count: int) -> bytes:
    """The bytes of a cache of that many libraries in two folders."""
    entries = []
    for number in range(count):
        soname = b"libpart%d-%d.so.%d" % (number % 89, number, number % 7)
        folder = (b"/usr/lib/x86_64-linux-gnu", b"/usr/local/lib")[number % 2]
        entries.append(Entry(soname, folder + b"/" + soname, 0x303))
    return cache.serialize(cache.Cache(arranged(entries), generator=build.GENERATOR % (2, 41)))


def renewed(file: Path) -> None:
    """What a container start does with its image's cache."""
    names = [b"libnvidia-part%d.so.1" % number for number in range(OURS)]
    ours = [Entry(name, b"/usr/lib/x86_64-linux-gnu/" + name, 0x303) for name in names]
    known = cache.parse(file.read_bytes())
    merged = merge.merge(known, b"/usr/lib/x86_64-linux-gnu", ours, whole_folder=False, win=True)
    file.with_suffix(".new").write_bytes(cache.serialize(merged))


def a_root(root: Path) -> Path:
    """A root with one flat folder of libraries."""
    folder = root / "usr/lib"
    folder.mkdir(parents=True)
    (root / "etc").mkdir()
    for number in range(BUILT):
        (folder / f"libpart{number}.so.1").write_bytes(shared_object(f"libpart{number}.so.1"))
    return root


def built(root: Path) -> None:
    """`ldcache build` without its start."""
    with opened(str(root)) as tree:
        known, _ = build.build(
            tree,
            Rules(ldconfig_version()),
            configuration=b"/etc/ld.so.conf",
            folders=[],
            with_links=True,
            for_cache=True,
        )
        tree.replace_file(b"/etc/ld.so.cache", cache.serialize(known))


def real(binary: str, root: Path) -> None:
    """The same by the program, its start included; without its auxiliary cache."""
    subprocess.run([binary, "-i", "-r", str(root)], check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())

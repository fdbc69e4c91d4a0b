# SPDX-License-Identifier: Apache-2.0
"""Roots full of libraries, whole and odd, as a random seed chooses them, and what ldconfig makes of them.

The same seed makes the same root, so that ldconfig works on one and nvhook on its twin. On a file system that lists a
folder in an order of its own the two are alike as well, as long as both lie on it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import shutil
import stat
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests import stubs
from tests.simhost.elfwriter import EM_386, EM_AARCH64, EM_X86_64, shared_object

LISTED = ("/opt/a", "/opt/b", "/opt/c", "/srv/x/lib")
# Where a.out files may lie, legacy sub-folders besides. In a glibc-hwcaps folder, or behind a link from one, ldconfig
# gives them the ISA level of whatever it read before, so no link leads here from there.
AOUT = "/srv/x/lib"
SONAMES = (
    "liba.so.1",
    "liba.so.01",
    "liba.so.2",
    "liba.so.10",
    "libb.so.9",
    "libb.so",
    "libcuda.so.1",
    "libnvidia-ml.so.1",
    "libx.so_bak",
    "libx.so.1",
    "libfoo-2.31.so",
    "lib.so.1.2.3",
    "libts.so.20240131",
    "libts.so.2024",
    "lib\udcff.so.1",
    "libé.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux.so.2",
    "ld-other.so.1",
    "ld.so.1",
    "ld64.so.2",
    "soname-without-lib",
    "",
    "..",
    "sub/libdeep.so.1",
    "../b/libup.so.1",
)
# 2^32 + 5 wraps to 5, and 3000000000 to a negative number.
LONG_NUMBERS = ("libn.so.3000000000", "libn.so.4294967301", "libn.so.7", "libn.so.2147483647", "libn.so.1999999999")
FILE_NAMES = (
    *(name for name in SONAMES if "/" not in name and name not in ("", "..")),
    "liba.so.1.5",
    "liba.so.1.05",
    "liba.so.1.10",
    "libcuda.so",
    "libcuda.so.580.1",
    "libcuda.so.550.9",
    "libcuda.so.590.1.dpkg-new",
    "libcuda.so.590.1.dpkg-tmp",
    "libcuda.so.1;65f0",
    "libp.so.1.#prelink#",
    "libp.so.1.#prelink#.AbCdEf",
    "libp.so.1.#prelink#.AbCdEfg",
    "libx.so-gdb.py",
    "lib a\n.so",
    "libnone",
    "plain.so",
    "ld.so",
    "libmöglich.so.1",
)
HWCAPS = ("x86-64-v2", "x86-64-v3", "x86-64-v4", "other", ".hidden", "a:b")
LEGACY = ("tls", "haswell", "x86_64", "avx512_1", "i686", "i586", "xeon_phi", "sse2", "power9")
LEVELS = ("", "x86-64-baseline", "x86-64-v2", "x86-64-v3", "x86-64-v4")


@functools.cache
def real_libraries() -> tuple[bytes, ...]:
    """Small libraries of this machine."""
    folders = [Path("/usr/lib") / f"{os.uname().machine}-linux-gnu", Path("/usr/lib64")]
    files = [path for folder in folders if folder.is_dir() for path in sorted(folder.glob("lib*.so.*"))]
    small = [path for path in files if path.is_file() and not path.is_symlink() and path.stat().st_size < 40_000]
    return tuple(path.read_bytes() for path in small[:40])


def odd_contents(random_: random.Random, good: bytes, aout: bool) -> bytes:
    """What a library's name may stand on that is none, or hardly one; an a.out file where that may be."""
    kind = random_.randrange(16)
    if kind == 6 and not aout:
        kind = 7
    if kind == 0:
        return b""
    if kind == 1:
        return b"/* GNU ld script */\nGROUP ( /lib/libc.so.6 )\n" + b" " * 80
    if kind == 2:
        return good[: random_.randrange(1, len(good))]
    if kind == 3:
        return good[:16] + struct.pack("<H", random_.choice((0, 1, 2, 4))) + good[18:]
    if kind == 4:
        return good[:18] + struct.pack("<H", random_.choice((0, 2, 3, 40, 62, 183))) + good[20:]
    if kind == 5:
        return good[: 4 + random_.randrange(3)] + bytes([random_.randrange(4)]) + good[5 + random_.randrange(3) :]
    if kind == 6:
        return random_.choice((b"\x0b\x01", b"\xcc\x00")) + bytes(random_.choice((10, 61, 62, 200)))
    if kind == 7:
        return random_.randbytes(300)
    if kind == 8:
        return good[:63]
    if kind == 9:
        # Program headers of another kind: no dynamic section, two of them, an interpreter.
        at = 64 + 56 * random_.randrange(3) if good[4] == 2 else 52 + 32 * random_.randrange(3)
        return good[:at] + struct.pack("<I", random_.choice((0, 1, 2, 3, 4, 0x6474E553))) + good[at + 4 :]
    changed = bytearray(good)
    for _ in range(random_.randrange(1, 4)):
        # Beyond the identification, which has its own cases: headers, tags, strings.
        at = random_.randrange(20, len(changed))
        changed[at] = random_.choice((0, 1, 2, 5, 14, 0x40, random_.randrange(128)))
    return bytes(changed)


def contents(random_: random.Random, sonames: tuple[str, ...], odd: float, levels: bool, aout: bool) -> bytes:
    """One file."""
    soname = random_.choice(sonames) if random_.random() < 0.9 else None
    bits, machine = random_.choice(((64, EM_X86_64), (64, EM_X86_64), (64, EM_X86_64), (32, EM_386), (32, EM_X86_64)))
    needed = tuple(random_.sample(("libc.so.6", "libm.so.6", "libz.so.1"), random_.randrange(3)))
    if random_.random() < 0.05:
        bits, machine = 64, EM_AARCH64
    if levels and random_.random() < 0.2:
        return stubs.stub(random_.choice(SONAMES[:8]), level=random_.choice(LEVELS))
    if random_.random() < 0.1 and real_libraries():
        return random_.choice(real_libraries())
    encoded = None if soname is None else soname.encode("utf-8", "surrogateescape").decode("latin-1")
    good = (
        shared_object(None, bits=bits, machine=machine) if encoded is None else _named(encoded, bits, machine, needed)
    )
    return odd_contents(random_, good, aout) if random_.random() < odd else good


def _named(soname: str, bits: int, machine: int, needed: tuple[str, ...]) -> bytes:
    """A shared object whose soname is these Latin-1 characters as bytes; the writer itself takes text alone."""
    mark = "@" * len(soname)
    data = shared_object(mark or "@", bits=bits, machine=machine, needed=needed)
    return data.replace((mark or "@").encode() + b"\0", soname.encode("latin-1") + b"\0" * (1 if soname else 2))


@dataclass
class Plan:
    """How a root is asked to be built: the words that ldconfig and `ldcache build` take alike."""

    options: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)

    @property
    def writes(self) -> bool:
        return "-N" not in self.options


def plant(
    root: Path, seed: str, *, files: int = 12, odd: float = 0.25, levels: bool = True, long: bool = False
) -> Plan:
    """Fill a root, and say how to call ldconfig for it. `files` is about how many a folder gets at most."""
    random_ = random.Random(seed)
    sonames = SONAMES + (LONG_NUMBERS * 4 if long else ())
    folders = [*LISTED, "/lib", "/usr/lib"]
    for folder in folders:
        fill(root / folder[1:], random_, files, sonames, odd, levels, folder == AOUT)
        if random_.random() < 0.5:
            _hwcaps(root, folder, random_, sonames, odd, levels)
        if random_.random() < 0.5:
            _legacy(root, folder, random_, sonames, odd)
    _aliases(root, random_)
    return _configure(root, random_)


def fill(
    folder: Path,
    random_: random.Random,
    files: int,
    sonames: tuple[str, ...],
    odd: float,
    levels: bool,
    aout: bool = False,
) -> None:
    """Files, then links to them, to each other and to nowhere."""
    folder.mkdir(parents=True, exist_ok=True)
    names = random_.sample(FILE_NAMES, random_.randrange(min(files, len(FILE_NAMES)) + 1))
    for name in names:
        (folder / name).write_bytes(contents(random_, sonames, odd, levels, aout))
    for number in range(max(0, files - len(FILE_NAMES))):
        (folder / f"lib{random_.randrange(files)}-{number}.so.{number % 7}").write_bytes(
            contents(random_, (*sonames, *(f"lib{n}.so.1" for n in range(files // 2))), odd, levels, aout)
        )
    if random_.random() < 0.2:
        (folder / "libfolder.so.1").mkdir()
    if random_.random() < 0.1:
        os.mkfifo(folder / "libfifo.so.1")
    for _ in range(random_.randrange(6)):
        link(folder, random_, names)


def link(folder: Path, random_: random.Random, names: list[str]) -> None:
    """One link. Targets with a slash lead out of the folder, some out of the root if one would let them."""
    name = random_.choice((*FILE_NAMES, *(soname for soname in SONAMES if soname in FILE_NAMES)))
    if os.path.lexists(folder / name):
        return
    others = ("libnowhere.so.1", name, "/opt/a/liba.so.1", "../a/libcuda.so.1", "../../../../../etc", "/opt", "..")
    (folder / name).symlink_to(random_.choice((*names * 3, *others)))


def _hwcaps(
    root: Path, folder: str, random_: random.Random, sonames: tuple[str, ...], odd: float, levels: bool
) -> None:
    inside = root / folder[1:] / "glibc-hwcaps"
    inside.mkdir()
    for name in random_.sample(HWCAPS, random_.randrange(1, len(HWCAPS))):
        fill(inside / name, random_, 4, sonames, odd, levels)
        if folder != AOUT and random_.random() < 0.3:
            link(inside / name, random_, [])
            (inside / name / "any-name").symlink_to("../../liba.so.1")
    # No absolute link: that of a folder on the command line, ldconfig looks up outside of the root.
    if random_.random() < 0.3:
        (inside / "linked").symlink_to(random_.choice(("x86-64-v2", "other", "nowhere")))
    if random_.random() < 0.3:
        (inside / "file").write_bytes(b"")
    if random_.random() < 0.2:
        fill(inside / "x86-64-v2/glibc-hwcaps/nested", random_, 3, sonames, odd, levels)


def _legacy(root: Path, folder: str, random_: random.Random, sonames: tuple[str, ...], odd: float) -> None:
    for name in random_.sample(LEGACY, random_.randrange(1, 5)):
        inside = root / folder[1:] / name
        if os.path.lexists(inside):
            continue
        if random_.random() < 0.2:
            inside.symlink_to(random_.choice(("/opt/c", "../b/tls", "nowhere")))
            continue
        fill(inside, random_, 4, sonames, odd, False, True)
        if random_.random() < 0.5:
            fill(inside / random_.choice(LEGACY), random_, 3, sonames, odd, False, True)


def _aliases(root: Path, random_: random.Random) -> None:
    (root / "opt/alias").symlink_to("a")
    (root / "opt/absolute").symlink_to("/opt/b")
    (root / "opt/loop").symlink_to("loop")
    (root / "srv/out").symlink_to("../../../../opt/c")
    if random_.random() < 0.3:
        (root / "lib64").symlink_to("usr/lib")


def _configure(root: Path, random_: random.Random) -> Plan:
    spellings = [
        *LISTED,
        "/opt/alias",
        "/opt/absolute",
        "/opt/loop",
        "/srv/out",
        "/opt//b/",
        "/opt/c/.",
        "/nowhere",
        "opt/c",
        "/lib",
        "/opt/a/glibc-hwcaps/x86-64-v2",
        "/opt/a/haswell",
        "/opt/b/tls",
        "/",
        "/opt/b=libc6",
        "/opt/c=libc5",
        "/srv/x/lib=other",
        "/opt/a =libc6",
        "/opt/alias=glibc2",
    ]
    lines = random_.sample(spellings, random_.randrange(1, 8))
    decorated = [
        random_.choice(("", " ", "\t")) + line + random_.choice(("", "", " ", "/", " # no", "//\t")) for line in lines
    ]
    decorated += random_.sample(
        ["# comment", "", "hwcap 0 nosegneg", "HWCAP 1 x", "include", "include nothing/*", "included /x"], 3
    )
    random_.shuffle(decorated)
    etc = root / "etc"
    for name in ("b.conf", "a.conf", ".hidden.conf", "Z.conf", "x.txt", "[c].conf"):
        path = etc / "ld.so.conf.d" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(line + "\n" for line in random_.sample(spellings, random_.randrange(3))))
    includes = [
        "include ld.so.conf.d/*.conf",
        "include /etc/ld.so.conf.d/[ab]*",
        " include\t/etc/ld.so.conf.d/?.conf  ld.so.conf.d/x.txt # z",
        "include ld.so.conf.d/\\[c\\].conf ld.so.conf.d/[!a-b].conf",
    ]
    decorated[random_.randrange(len(decorated)) : 0] = random_.sample(includes, random_.randrange(3))
    name = random_.choice(("ld.so.conf", "other.conf"))
    (etc / name).write_text("\n".join(decorated) + random_.choice(("", "\n")))
    options = [option for option in ("-X", "-N") if random_.random() < 0.2]
    if name != "ld.so.conf":
        options += ["-f", f"/etc/{name}"]
    absolute = [line for line in spellings if line.startswith("/")]
    return Plan(options, random_.sample(absolute, random_.choice((0, 0, 1, 2))))


def state(root: Path) -> dict[str, str]:
    """Every file of a root, what it is and holds. What ldconfig keeps for itself is left out."""
    found = {}
    for folder, folders, names in os.walk(os.fsencode(root)):
        for name in [*folders, *names]:
            path = os.path.join(folder, name)
            inside = os.fsdecode(path)[len(str(root)) :]
            if inside in ("/etc/ld.so.cache", "/var") or inside.startswith("/var/cache"):
                continue
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                found[inside] = f"-> {os.fsdecode(os.readlink(path))}"
            elif stat.S_ISREG(mode):
                found[inside] = hashlib.sha256(Path(os.fsdecode(path)).read_bytes()).hexdigest()
            else:
                found[inside] = oct(stat.S_IFMT(mode))
    return found


def order(root: Path) -> list[list[str]]:
    """How the file system lists each folder."""
    return [[*os.listdir(folder)] for folder, _, _ in sorted(os.walk(root))]


def run(binary: str, root: Path, plan: Plan) -> bytes | None:
    """The cache that ldconfig writes; None where it is told not to."""
    command = [binary, "-i", "-r", str(root), "-C", "/etc/ld.so.cache", *plan.options, *plan.folders]
    done = subprocess.run(command, capture_output=True, env={"LC_ALL": "C"}, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return (root / "etc/ld.so.cache").read_bytes() if plan.writes else None


def remove(root: Path) -> None:
    """Take a root away again: hundreds of them fill a disk."""
    shutil.rmtree(root)

# SPDX-License-Identifier: Apache-2.0
"""The command `ldcache`.

`ldcache print [-C FILE]` shows a cache as `ldconfig -p -C FILE` does, byte for byte and with the same exit status, but
neither crashes on a damaged one nor passes on what a hostile one holds: a character that isn't printable, or a byte
that is no UTF-8, is shown as `\\xNN`. A cache outside the limits of `ldcache.cache` is an error here.

The text that ldconfig prints differs by its version; `--like` picks one. Without it the ldconfig of this machine is
asked, and where there is none, 2.41's text is used.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator

from ldcache import cache
from ldcache.cache import Cache, Entry, InvalidLdCache
from ldcache.errors import NvhookError

Version = tuple[int, int]

DEFAULT_CACHE = "/etc/ld.so.cache"
DEFAULT_VERSION: Version = (2, 41)
LDCONFIG = ("/sbin/ldconfig", "/usr/sbin/ldconfig")

_TYPES = {0: "libc4", 1: "ELF", 2: "libc5", 3: "libc6"}

# Text of the second byte of the flags, where it is the same in every version.
_ABIS = {
    0x100: "64bit",
    0x300: "x86-64",
    0x400: "64bit",
    0x500: "64bit",
    0x600: "N32",
    0x700: "64bit",
    0x800: "x32",
    0x900: "hard-float",
    0xA00: "AArch64",
    0xB00: "soft-float",
    0xC00: "nan2008",
    0xD00: "N32,nan2008",
    0xE00: "64bit,nan2008",
    0xF00: "soft-float",
    0x1000: "double-float",
}
_LOONGARCH = {0x1100: "soft-float", 0x1200: "double-float"}
_IA64 = {0x200: "IA-64"}

_WITH_LOONGARCH: Version = (2, 38)
_WITHOUT_IA64: Version = (2, 39)
_ONLY_LIBC6: Version = (2, 37)
_WITHOUT_OS_ABI: Version = (2, 36)
_WITH_EXTENSION: Version = (2, 33)
_SYSTEMS = ("Linux", "Hurd", "Solaris", "FreeBSD", "kNetBSD", "Syllable", "Unknown OS")


def main(argv: list[str] | None = None) -> int:
    """Run `ldcache`. 0 done, 1 failed; argparse leaves with 2 on wrong usage."""
    arguments = _parser().parse_args(argv)
    try:
        sys.stdout.buffer.write(_print(arguments.cache, arguments.like))
        sys.stdout.flush()
    except NvhookError as error:
        print(f"nvhook: error: {error.what}\n  remedy: {error.remedy}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ldcache", description="Read glibc loader caches.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    show = verbs.add_parser(
        "print", help="print a cache as `ldconfig -p` does", description="Print a cache as `ldconfig -p` does."
    )
    show.add_argument("-C", dest="cache", metavar="FILE", default=DEFAULT_CACHE, help="the cache; %(default)s")
    show.add_argument(
        "--like",
        metavar="VERSION",
        type=_version,
        help="print what ldconfig of this glibc prints, such as 2.36; that of the ldconfig at hand, else 2.41",
    )
    return parser


def _version(text: str) -> Version:
    major, dot, minor = text.strip().partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no glibc version such as 2.36")
    return int(major), int(minor)


def _ldconfig_version() -> Version:
    """glibc version of this machine's ldconfig, DEFAULT_VERSION where there is none or it doesn't tell."""
    for path in LDCONFIG:
        try:
            run = subprocess.run([path, "--version"], capture_output=True, timeout=10, env={"LC_ALL": "C"})
            # ldconfig (Debian GLIBC 2.36-9+deb12u14) 2.36
            return _version(run.stdout.splitlines()[0].split()[-1].decode("ascii", "replace"))
        except (OSError, IndexError, subprocess.TimeoutExpired, argparse.ArgumentTypeError):
            continue
    return DEFAULT_VERSION


def _print(path: str, like: Version | None) -> bytes:
    data = _read(path)
    if not data:
        # ldconfig prints nothing at all for an empty file, and is content.
        return b""
    try:
        known = cache.parse(data)
    except InvalidLdCache as error:
        remedy = "rebuild the cache with ldconfig, or name another file with -C"
        raise NvhookError(f"cannot read the loader cache {path}: {error}", remedy) from error
    if known.marked and known.byteorder != sys.byteorder:
        what = f"the loader cache {path} is of a {known.byteorder}-endian machine"
        raise NvhookError(what, "print it on such a machine")
    return b"".join(_lines(known, data, os.fsencode(path), like or _ldconfig_version()))


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return cache.read(fd) if os.fstat(fd).st_size else b""
        finally:
            os.close(fd)
    except OSError as error:
        what = f"cannot read the loader cache {path}: {error.strerror}"
        raise NvhookError(what, "name a readable cache with -C") from error
    except InvalidLdCache as error:
        what = f"cannot read the loader cache {path}: {error}"
        raise NvhookError(what, "name a loader cache with -C") from error


def _lines(known: Cache, data: bytes, path: bytes, like: Version) -> Iterator[bytes]:
    yield b"%d libs found in cache `%b'\n" % (len(known.entries), path)
    texts = _hwcap_texts(known, data, like)
    for entry in known.entries:
        kind = (_type(entry, like) + _abi(entry, like)).encode()
        needs = _hwcap(entry, texts) + _os_abi(entry, like).encode()
        yield b"\t%b (%b%b) => %b\n" % (quoted(entry.soname), kind, needs, quoted(entry.path))
    if known.generator is not None and like >= _WITH_EXTENSION:
        yield b"Cache generated by: %b\n" % quoted(known.generator)


def _type(entry: Entry, like: Version) -> str:
    kind = entry.flags & 0xFF
    if like >= _ONLY_LIBC6:
        return "libc6" if kind == 3 else "unknown or unsupported flag"
    return _TYPES.get(kind, "unknown")


def _abi(entry: Entry, like: Version) -> str:
    abi = entry.flags & 0xFF00
    text = _ABIS.get(abi)
    if text is None and like >= _WITH_LOONGARCH:
        text = _LOONGARCH.get(abi)
    if text is None and like < _WITHOUT_IA64:
        text = _IA64.get(abi)
    return f",{text or abi}" if abi else ""


def _hwcap_texts(known: Cache, data: bytes, like: Version) -> dict[bytes, bytes | int]:
    """For each glibc-hwcaps name what ldconfig prints: a name, or the index within the number that it shows.

    In a combined file ldconfig takes the offsets from the wrong place, see `cache.parse`, and prints what stands there.
    """
    texts: dict[bytes, bytes | int] = {}
    for index, (name, offset) in enumerate(known.listed):
        if like < _WITH_EXTENSION or offset >= len(data):
            texts[name] = index
        elif known.form == "combined":
            texts[name] = data[offset : offset + cache.MAX_PATH].split(b"\0", 1)[0]
        else:
            texts[name] = name
    return texts


def _hwcap(entry: Entry, texts: dict[bytes, bytes | int]) -> bytes:
    value = entry.hwcap
    if entry.hwcaps is not None:
        text = texts[entry.hwcaps]
        if isinstance(text, bytes):
            return b', hwcap: "%b"' % quoted(text)
        value += text
    return b", hwcap: 0x%016x" % value if value else b""


def _os_abi(entry: Entry, like: Version) -> str:
    if not entry.osversion or like >= _WITHOUT_OS_ABI:
        return ""
    system = _SYSTEMS[min(entry.osversion >> 24, len(_SYSTEMS) - 1)]
    version = ".".join(str(entry.osversion >> shift & 0xFF) for shift in (16, 8, 0))
    return f", OS ABI: {system} {version}"


def quoted(name: bytes) -> bytes:
    """A name for a terminal or a log: what could move the cursor, end the line or hide is written `\\xNN`.

    Printable UTF-8, backslashes included, stays as it is.
    """
    text = name.decode("utf-8", "surrogateescape")
    if text.isprintable():
        return name
    return b"".join([_quoted_character(character) for character in text])


def _quoted_character(character: str) -> bytes:
    raw = character.encode("utf-8", "surrogateescape")
    return raw if character.isprintable() else b"".join([b"\\x%02x" % byte for byte in raw])

# SPDX-License-Identifier: Apache-2.0
"""In what ldconfig differs by its glibc version, and which version is meant.

Known in source and by trial from 2.36 on (Debian 12's; 2.39 is Ubuntu 24.04's, 2.41 Debian 13's). Debian's own patches,
which Ubuntu has too, are followed: system folders without `lib64`, and a link to the dynamic loader that stays.
"""

from __future__ import annotations

import platform
import subprocess

Version = tuple[int, int]

OLDEST: Version = (2, 36)
DEFAULT_VERSION: Version = (2, 41)
LDCONFIG = ("/sbin/ldconfig", "/usr/sbin/ldconfig")

X86 = ("x86_64", "i386", "i486", "i586", "i686")
ARM = ("aarch64", "armv7l", "armv8l", "armv6l")

# The path components that ldconfig takes for legacy hwcap folders, each with its bit in an entry's hwcap field.
LEGACY_BITS = {
    b"sse2": 0,
    b"x86_64": 1,
    b"avx512_1": 2,
    b"i586": 48,
    b"i686": 49,
    b"haswell": 50,
    b"xeon_phi": 51,
    b"tls": 63,
}
# What every architecture knows.
OTHER_LEGACY_BITS = {b"tls": 63}


class Rules:
    """What one version of ldconfig does on one machine (`platform.machine()`).

    `legacy_hwcaps`, `guesses_i386` (flags 1 for a library that needs no libc) and `folder_types` (a `=libc6` suffix in
    ld.so.conf) hold up to 2.36; `skips_package_managers` (temporary names of dpkg and rpm) since 2.39.
    """

    __slots__ = ("folder_types", "guesses_i386", "legacy_hwcaps", "machine", "skips_package_managers", "version")

    def __init__(self, version: Version, machine: str | None = None) -> None:
        old = version <= (2, 36)
        self.version = version
        self.machine = machine or platform.machine()
        self.legacy_hwcaps = old
        self.guesses_i386 = old
        self.folder_types = old
        self.skips_package_managers = version >= (2, 39)

    @property
    def x86(self) -> bool:
        """Whether the machine is of the x86 family."""
        return self.machine in X86

    @property
    def aout_flags(self) -> int:
        """The flags of what begins like an a.out library."""
        return 0 if self.version <= (2, 36) else 3

    def legacy_bits(self, folder: bytes) -> int:
        """The hwcap field of a plain folder's entries: a bit for each trailing component that is a legacy name."""
        value = 0
        head, slash, name = folder.rpartition(b"/")
        while slash and self.is_legacy_folder(name):
            # One name twice is an addition, not an OR; beyond 64 bits it vanishes.
            value += 1 << LEGACY_BITS[name]
            head, slash, name = head.rpartition(b"/")
        return value & (1 << 64) - 1

    def is_legacy_folder(self, name: bytes) -> bool:
        """Whether ldconfig descends into a sub-folder of this name."""
        return self.legacy_hwcaps and name in (LEGACY_BITS if self.x86 else OTHER_LEGACY_BITS)


def version_of(text: str) -> Version:
    """The glibc version that a text such as `2.36` says. ValueError for any other."""
    major, dot, minor = text.strip().partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal() and len(text) < 16):
        raise ValueError(f"{text!r} is no glibc version such as 2.36")
    return int(major), int(minor)


def ldconfig_version() -> Version:
    """glibc version of this machine's ldconfig, DEFAULT_VERSION where there is none or it doesn't tell."""
    for path in LDCONFIG:
        try:
            run = subprocess.run([path, "--version"], capture_output=True, timeout=10, env={"LC_ALL": "C"})
            # ldconfig (Debian GLIBC 2.36-9+deb12u14) 2.36
            return version_of(run.stdout.splitlines()[0].split()[-1].decode("ascii", "replace"))
        except (OSError, IndexError, subprocess.TimeoutExpired, ValueError):
            continue
    return DEFAULT_VERSION

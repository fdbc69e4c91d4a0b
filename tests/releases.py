# SPDX-License-Identifier: Apache-2.0
"""Roots of other Debian releases, each made once by debootstrap and kept in the tests' cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.containers import SYSTEM_PATH, find_program

# What each has besides the minimal system: Debian 13's are real runtimes of a later release, with an interpreter.
PACKAGES = {
    "bullseye": "",
    "bookworm": "",
    "trixie": "crun,runc,python3-minimal,python3-cffi-backend",
}
GLIBC = {"bullseye": "2.31", "bookworm": "2.36", "trixie": "2.41"}


def debian(cache: Path, release: str) -> Path:
    """The root of that release. Raises RuntimeError where it can't be made."""
    folder = cache / f"debian-{release}"
    if folder.exists():
        return folder
    debootstrap = find_program("debootstrap")
    if debootstrap is None:
        raise RuntimeError("needs debootstrap, which is not installed")
    if os.geteuid() != 0:
        raise RuntimeError(f"needs root, to make Debian {release} by debootstrap")
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    include = [f"--include={PACKAGES[release]}"] if PACKAGES[release] else []
    command = [debootstrap, "--variant=minbase", *include, release, str(partial)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PATH": SYSTEM_PATH})
    if done.returncode != 0:
        raise RuntimeError(f"debootstrap {release} failed: {done.stdout[-500:]}{done.stderr[-500:]}")
    partial.rename(folder)
    return folder

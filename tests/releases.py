# SPDX-License-Identifier: Apache-2.0
"""Roots of other Debian releases, each made once by debootstrap and kept in the tests' cache folder."""

from __future__ import annotations

import fcntl
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


# A second root of a release, for tests that want what most don't and what takes a minute more to make.
ENGINES = "podman,containerd,docker.io,docker-cli,conmon,ca-certificates"


def debian(cache: Path, release: str, engines: bool = False) -> Path:
    """The root of that release, with container engines if they are wanted. Raises RuntimeError where it can't be
    made."""
    folder = cache / (f"debian-{release}-engines" if engines else f"debian-{release}")
    # Two processes run tests: the second to want a root waits for the first to have made it.
    with open(folder.with_suffix(".lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return folder if folder.exists() else _debootstrap(folder, release, engines)


def _debootstrap(folder: Path, release: str, engines: bool) -> Path:
    debootstrap = find_program("debootstrap")
    if debootstrap is None:
        raise RuntimeError("needs debootstrap, which is not installed")
    if os.geteuid() != 0:
        raise RuntimeError(f"needs root, to make Debian {release} by debootstrap")
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    packages = ",".join(name for name in (PACKAGES[release], ENGINES if engines else "") if name)
    include = [f"--include={packages}"] if packages else []
    command = [debootstrap, "--variant=minbase", *include, release, str(partial)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PATH": SYSTEM_PATH})
    if done.returncode != 0:
        raise RuntimeError(f"debootstrap {release} failed: {done.stdout[-500:]}{done.stderr[-500:]}")
    partial.rename(folder)
    return folder

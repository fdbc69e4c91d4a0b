# SPDX-License-Identifier: Apache-2.0
"""Compiles the few C files of the fixtures, each once per test process and set of definitions."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-std=gnu11", "-Os", "-Wall", "-Wextra", "-Werror")


@functools.cache
def cache_folder() -> Path:
    """A folder for what is built once per test process; it goes when that process ends, not with a fork."""
    folder = tempfile.mkdtemp(prefix="nvhook-tests-")
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder)


@functools.cache
def program(source: str) -> Path:
    """A dynamically linked program from tests/simhost/`source`."""
    return _compile(source, f"{source}.program")


@functools.cache
def musl_program(source: str) -> Path:
    """The same, linked with musl."""
    return _compile(source, f"{source}.musl", compiler="musl-gcc")


@functools.cache
def library(source: str, soname: str, version: str = "", cuda: int = 0) -> Path:
    """A shared object of that SONAME; `version` and `cuda` reach its source as macros."""
    definitions = (
        f'-DDRIVER_VERSION="{version}"',
        f'-DNVML_VERSION="{cuda // 1000}.{version}"',
        f"-DCUDA_VERSION={cuda}",
    )
    return _compile(
        source,
        f"{source}.{soname}.{version}.{cuda}",
        "-fPIC",
        "-shared",
        f"-Wl,-soname,{soname}",
        *definitions,
    )


def _compile(source: str, name: str, *flags: str, compiler: str = "gcc") -> Path:
    gcc = shutil.which(compiler)
    if gcc is None:
        raise RuntimeError(f"{compiler} is not there: the test fixtures need gcc, libc6-dev and musl-tools")
    out = cache_folder() / name
    # -ldl: dlopen and dladdr moved into libc with glibc 2.34.
    command = [gcc, *FLAGS, *flags, "-o", str(out), str(SOURCES / source), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return out

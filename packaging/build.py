# SPDX-License-Identifier: Apache-2.0
"""Compile nvhook's native parts: two cffi modules, one program, one static launcher.

One function makes all of them. The wheel and the editable install call it through hatchling's hook at the
end; the Debian package, the tests and a developer run it as a script: `python packaging/build.py`.
"""

from __future__ import annotations

import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple


class Part(NamedTuple):
    """A native file: how it is built, and from what. The first input says what is compiled."""

    kind: str
    inputs: tuple[str, ...]


PARTS = {
    "ldcache/_sys.abi3.so": Part("module", ("ldcache/_sys_build.py", "ldcache/sys.c", "ldcache/sys.h")),
    "hook/_cuda.abi3.so": Part("module", ("hook/_cuda_build.py", "hook/cuda.c", "hook/cuda.h")),
    "hook/bin/cuda-check": Part("program", ("hook/cuda.c", "hook/cuda.h")),
    "hook/bin/launch": Part("static", ("packaging/launcher.c",)),
}


def stale(root: Path) -> list[str]:
    """Outputs that are missing or older than one of their inputs."""

    def fresh(output: str, part: Part) -> bool:
        path = root / output
        if not path.exists():
            return False
        newest = max((root / name).stat().st_mtime_ns for name in part.inputs)
        return path.stat().st_mtime_ns >= newest

    return [output for output, part in PARTS.items() if not fresh(output, part)]


def flags(name: str, default: str = "") -> list[str]:
    """Words of an environment variable, as dpkg-buildflags and rpm set them."""
    return shlex.split(os.environ.get(name, default))


def run(command: list[str]) -> None:
    """Run a compiler; its own messages say what is wrong."""
    subprocess.run(command, check=True)


def compile_flags(root: Path, temporary: Path) -> list[str]:
    """Flags without the building folder's name in the result, so that two builds give the same bytes."""
    return [
        *flags("CPPFLAGS"),
        *flags("CFLAGS", "-O2 -Wall -Wextra -s"),
        f"-ffile-prefix-map={temporary}=.",
        f"-ffile-prefix-map={root}=.",
    ]


def build_module(root: Path, output: Path, part: Part, temporary: Path) -> None:
    """A cffi API-mode module for the stable ABI of Python 3.10 and newer."""
    script, source = (root / name for name in part.inputs[:2])
    emitted = temporary / "module.c"
    runpy.run_path(str(script))["ffibuilder"].emit_c_code(str(emitted))
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").exists():
        raise SystemExit(f"{include}/Python.h is missing: install Python's development files (Debian: python3-dev)")
    run(
        [
            *flags("CC", "cc"),
            *compile_flags(root, temporary),
            *["-shared", "-fPIC", "-DPy_LIMITED_API=0x030a0000"],
            # The code that cffi emits casts and ignores parameters freely.
            *["-Wno-unused-parameter", "-Wno-cast-function-type", "-Wno-missing-field-initializers"],
            *[f"-I{include}", f"-I{source.parent}", str(emitted), str(source)],
            *["-o", str(output), *flags("LDFLAGS"), "-ldl"],
        ]
    )


def old_glibc_flags() -> list[str]:
    """Link flags of a program that must start in images older than the machine it is built on.

    Its own `_start` and versioned symbols ask for glibc 2.2.5 alone; the start files of glibc 2.34 would
    ask for 2.34.
    """
    if platform.machine() != "x86_64":
        return []
    return ["-nostartfiles", "-Wl,--no-as-needed", "-l:libdl.so.2"]


def build_program(root: Path, output: Path, part: Part, temporary: Path) -> None:
    """A stand-alone program that runs inside other people's images."""
    source = root / part.inputs[0]
    run(
        [
            *flags("CC", "cc"),
            *compile_flags(root, temporary),
            *["-DNV_STANDALONE", str(source), "-o", str(output)],
            *[*flags("LDFLAGS"), *old_glibc_flags(), "-ldl"],
        ]
    )


def build_static(root: Path, output: Path, part: Part, temporary: Path) -> None:
    """The launcher. musl's start code reads no environment and makes two system calls; glibc's does more."""
    compiler = flags("CC_STATIC") or (["musl-gcc"] if shutil.which("musl-gcc") else flags("CC", "cc"))
    source = root / part.inputs[0]
    static = ["-static", "-no-pie", str(source), "-o", str(output)]
    run([*compiler, *compile_flags(root, temporary), *flags("LDFLAGS"), *static])


BUILDERS = {"module": build_module, "program": build_program, "static": build_static}


def build(root: Path, outputs: list[str]) -> None:
    """Make the named outputs; each appears whole or not at all."""
    for output in outputs:
        part = PARTS[output]
        target = root / output
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="nvhook-build-") as name:
            made = Path(name, target.name)
            BUILDERS[part.kind](root, made, part, Path(name))
            beside = target.with_name(f".{target.name}.new")
            shutil.copy(made, beside)
            os.replace(beside, target)


if __name__ == "__main__":
    tree = Path(__file__).resolve().parent.parent
    build(tree, stale(tree))
    sys.exit(0)
else:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class NativeParts(BuildHookInterface):  # type: ignore[type-arg]
        """hatchling's hook: without it the wheel would be tagged pure and hold no native file."""

        def initialize(self, version: str, build_data: dict[str, object]) -> None:
            """Build everything, and tag the wheel for any Python with this stable ABI."""
            build(Path(self.root), list(PARTS))
            system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"cp310-abi3-{system}"

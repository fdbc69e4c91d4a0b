# SPDX-License-Identifier: Apache-2.0
"""The host of tests/data/h200 as a tree: every file that was there, by its name, as a small stand-in.

Not on record, and chosen here: what lies in the json files, that the links of /usr/lib and /usr/bin lead
to the same name in /usr/local/nvidia, and that the kernel was told of that firmware folder (the peer found
it there, and looks nowhere else).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.simhost import compiler, driver, elfwriter, kernel
from tests.simhost.host import Gpu, Host, Library
from tests.simhost.simulated import SimulatedHost
from tests.simhost.tree import Tree, merged_usr

DATA = Path(__file__).parent.parent / "data" / "h200"
DRIVER = "/usr/local/nvidia"
LIBRARIES = f"{DRIVER}/lib64"
VERSION = "580.159.04"
GPU = Gpu("0000:00:06.0", 0, "GPU-11111111-2222-3333-4444-555555555555")
HOST = Host(
    version=VERSION,
    gpus=(GPU,),
    layout="h200",
    modules=("nvidia", "nvidia_uvm"),
    uvm_major=238,
    caps_major=241,
)
# SONAMEs of driver libraries that CUDA ships too, in its compat and stubs folders.
MAJORS = {"libcuda": 1, "libnvidia-ml": 1, "libnvidia-ptxjitcompiler": 1, "libnvidia-nvvm": 4}


def build_h200(directory: Path) -> SimulatedHost:
    """Builds the H200 host below `directory`. Its loader cache is the real one, byte for byte."""
    directory.mkdir(parents=True, exist_ok=True)
    tree = Tree(directory)
    merged_usr(tree)
    libraries = _driver_files(tree)
    _other_files(tree)
    tree.copy(DATA / "ld.so.cache", "/etc/ld.so.cache")
    _cached_files(tree)
    tree.write("/etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n")
    tree.write("/etc/ld.so.conf.d/nvidia.conf", f"{LIBRARIES}\n/usr/local/cuda/targets/x86_64-linux/lib\n")
    tree.write("/etc/os-release", 'ID=ubuntu\nVERSION_ID="24.04"\n')
    tree.write("/etc/debian_version", "trixie/sid\n")
    tree.folder("/tmp", 0o1777)
    tree.folder("/run")
    tree.link("/var/run", "../run")
    _proc(tree)
    _sys(tree)
    _dev(tree)
    built = SimulatedHost(tree, HOST, libraries, LIBRARIES)
    built.set_nvml(HOST.nvml)
    # Last, for each file made in a folder gives the folder a new time.
    _constant_times(tree.path(DRIVER))
    return built


def rows(name: str) -> Iterator[str]:
    """The lines of a data file without those that are a comment."""
    return (line for line in (DATA / name).read_text().splitlines() if line and not line.startswith("#"))


def section(text: str, begin: str, end: str) -> str:
    """The part of `text` from where `begin` stands up to where `end` stands first after it."""
    start = text.index(begin)
    return text[start : text.index(end, start + len(begin))]


def _driver_files(tree: Tree) -> tuple[Library, ...]:
    facts = {
        file: (soname, needed.split()) for file, soname, _, needed in (row.split(" | ") for row in rows("sonames.txt"))
    }
    sonames = {soname for soname, _ in facts.values()}
    installed = []
    for row in rows("driver-files.txt"):
        described, target = row.split(" -> ")
        kind, mode, _, _, _, path = described.split()
        name = path.rsplit("/", 1)[1]
        if kind == "d":
            tree.folder(path, int(mode, 8))
        elif kind == "l":
            tree.link(path, target)
        elif name in facts:
            soname, needed = facts[name]
            # As in the simulated driver: of DT_NEEDED what the driver brings itself, and libc.
            mine = tuple(one for one in needed if one in sonames or one == "libc.so.6")
            _library(tree, path, soname, mine, int(mode, 8))
            installed.append(Library(path, soname, 64))
        else:
            _stand_in(tree, path, int(mode, 8))
    return tuple(installed)


def _library(tree: Tree, path: str, soname: str, needed: tuple[str, ...], mode: int) -> None:
    source = {"libcuda.so.1": "cuda.c", "libnvidia-ml.so.1": "nvml.c"}.get(soname)
    if source:
        tree.copy(compiler.library(source, soname, VERSION, HOST.cuda_version), path, mode)
    else:
        tree.write(path, elfwriter.shared_object(soname, needed=needed), mode)


def _stand_in(tree: Tree, path: str, mode: int = 0o644) -> None:
    """A small file of the kind that its name promises."""
    name = path.rsplit("/", 1)[1]
    if name == "nvidia-smi":
        tree.copy(compiler.program("smi.c"), path, mode)
    elif ".so" in name:
        stem = name.split(".so")[0]
        soname = f"{stem}.so.{MAJORS[stem]}" if stem in MAJORS else name
        tree.write(path, elfwriter.shared_object(soname), mode)
    elif name.endswith(".a"):
        tree.write(path, "!<arch>\n", mode)
    elif name == "version":
        tree.write(path, VERSION, mode)
    elif name == "nvidia_layers.json":
        tree.write(path, driver.LAYER, mode)
    elif name.endswith(".json"):
        library = "libEGL_nvidia.so.0" if "egl" in path else "libGLX_nvidia.so.0"
        tree.write(path, driver.ICD.format(form="1.0.0", library=library, more=""), mode)
    elif "/bin/" in path:
        tree.write(path, f"#!/bin/sh\necho {name} {VERSION}\n", mode)
    else:
        tree.write(path, f"{name}\n", mode)


def _other_files(tree: Tree) -> None:
    """Driver-like files elsewhere: links into the driver, data files, CUDA with its compat folder."""
    tree.folder("/usr/local/cuda-13.0")
    tree.link("/usr/local/cuda", "cuda-13.0")
    paths = list(rows("other-files.txt"))
    for path in paths:
        folder, name = path.rsplit("/", 1)
        in_driver = {"/usr/lib": f"{LIBRARIES}/{name}", "/usr/bin": f"{DRIVER}/bin/{name}"}.get(folder)
        real = re.compile(rf"{re.escape(folder)}/({re.escape(name.split('.so')[0])}\.so\.\d+\.\d+\.\d+)")
        versions = [found[1] for found in map(real.fullmatch, paths) if found]
        if in_driver and os.path.lexists(tree.path(in_driver)):
            tree.link(path, in_driver)
        elif versions and name not in versions:
            tree.link(path, versions[0])
        else:
            _stand_in(tree, path)


def _cached_files(tree: Tree) -> None:
    """What else the loader cache lists, so that no entry of it is stale."""
    for soname, path in tree.cached():
        in_driver = f"{LIBRARIES}/{soname}"
        if os.path.lexists(tree.path(path)):
            continue
        if path == f"/lib/{soname}" and os.path.lexists(tree.path(in_driver)):
            tree.link(path, in_driver)
        else:
            tree.write(path, elfwriter.shared_object(soname), 0o755)


def _proc(tree: Tree) -> None:
    kernel.proc(tree, replace(HOST, gpus=()))
    text = (DATA / "proc-driver.txt").read_text() + "-- "
    for name in ("version", "params"):
        headed = section(text, f"-- /proc/driver/nvidia/{name}\n", "-- ")
        tree.write(f"/proc/driver/nvidia/{name}", headed.split("\n", 1)[1], 0o444)
    information = section(text, "Model:", "Character devices:")
    tree.write(f"/proc/driver/nvidia/gpus/{GPU.bus_id}/information", information, 0o444)
    tree.write("/proc/devices", section(text, "Character devices:", "nvidia_uvm "), 0o444)
    tree.write("/proc/modules", section(text, "nvidia_uvm ", "DeviceFileMinor"), 0o444)
    for row in (DATA / "proc-driver-tree.txt").read_text().split("-- ", 1)[0].splitlines():
        kind, mode, _, path = row.split()
        if kind == "d":
            tree.folder(path)
        elif not tree.path(path).exists():
            tree.write(path, "", int(mode, 8))


def _sys(tree: Tree) -> None:
    for row in rows("sysfs.txt"):
        found = re.fullmatch(r"/sys/bus/pci/devices/(\S+) (\S+) (\S+) (\S+)(?: \S+/drivers/(\S+))? numa (\S+)", row)
        if found:
            bus_id, vendor, device, pci_class, bound, numa = found.groups()
            kernel.pci_device(tree, bus_id, int(vendor, 16), int(device, 16), int(pci_class, 16), bound, int(numa))
    for module in ("libnvdimm", *HOST.modules):
        tree.folder(f"/sys/module/{module}")
    tree.write("/sys/module/nvidia/version", f"{VERSION}\n", 0o444)
    tree.write("/sys/module/firmware_class/parameters/path", f"{DRIVER}/firmware\n")


def _dev(tree: Tree) -> None:
    folder = "/dev"
    tree.folder(folder)
    for row in rows("dev.txt"):
        if row.endswith(":"):
            folder = row[:-1]
        elif row.startswith("c"):
            found = re.search(r"(\d+), +(\d+) .* (\S+)$", row)
            assert found is not None
            bits = sum(1 << 8 - i for i, letter in enumerate(row[1:10]) if letter != "-")
            tree.node(f"{folder}/{found[3]}", int(found[1]), int(found[2]), bits)


def _constant_times(top: Path) -> None:
    """The first second of 1970 on every file of the driver, as on each image that is built reproducibly."""
    for folder, names, files in os.walk(top):
        for name in (*names, *files):
            os.utime(Path(folder, name), (1, 1), follow_symlinks=False)

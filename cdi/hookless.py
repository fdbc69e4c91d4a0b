# SPDX-License-Identifier: Apache-2.0
"""A CDI file without a hook: each library is mounted under each name that something loads.

For engines that run no hooks, and for the fastest start. Links can't be made then, and the loader cache stays as it
is: the loader finds our files because they lie in its default folders, which it searches after the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cdi.host import table

# The default folders of each family's loader, for 64- and 32-bit libraries; {0} and {1} are Debian's names of the
# machine. Debian's glibc and Fedora's have no folder in common; musl's (ldso/dynlink.c) has one with neither.
FOLDERS = {
    "debian": ("/usr/lib/{0}", "/usr/lib/{1}"),
    "lib64": ("/usr/lib64", "/usr/lib"),
    "musl": ("/usr/lib", "/usr/lib32"),
}
LAYOUTS = {"debian": ("debian",), "lib64": ("lib64",), "musl": ("musl",), "both": ("debian", "lib64")}
MACHINES = {number: name for name, numbers in table.ELF_MACHINES.items() for number in numbers}


def places(inventory: dict[str, Any], layout: str) -> Iterator[tuple[str, str]]:
    """Host path and container path of each mount that stands for a library or for a link to a file."""
    for library in inventory["libraries"]:
        triplets = table.MULTIARCH[MACHINES[library["machine"]]]
        for family in LAYOUTS[layout]:
            folder = FOLDERS[family][library["class"] == 32].format(*triplets)
            for name in names(library):
                yield library["path"], f"{folder}/{name}"
    for item in inventory["files"]:
        folder = item["container_path"].rpartition("/")[0]
        for name in item["links"]:
            yield item["path"], f"{folder}/{name}"


def names(library: dict[str, Any]) -> list[str]:
    """What a library is loaded by: its SONAME, and what programs and other libraries open besides."""
    known = table.BY_STEM.get(library["name"].partition(".so")[0])
    return [library["soname"], *(known.links if known else ())]


def notes(inventory: dict[str, Any], count: int) -> list[str]:
    """What such a file costs and can't do, a line each. `count` is the number of its mounts."""
    libraries = inventory["libraries"]
    left = sorted(
        {link for library in libraries for link in library["links"]} - {n for x in libraries for n in names(x)}
    )
    lines = [
        f"{count} mounts and no hook",
        "an image whose loader cache lists a driver library of its own goes on using that one",
        "what an image requires (NVIDIA_REQUIRE_*) is not checked",
        "an image's libraries for forward compatibility are not used",
        "/proc/driver/nvidia is not masked: a container sees the bus ids of all GPUs",
    ]
    if any(library["soname"].startswith("libEGL_") for library in libraries):
        lines.append("EGL and Vulkan list all GPUs of the host, those without a node in the container too")
    if left:
        lines.append(f"names for compilers are left out: {' '.join(left)}")
    return lines

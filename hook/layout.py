# SPDX-License-Identifier: Apache-2.0
"""Layout: where a Selection lands in a container whose root is known.

Hot. Reads a few facts in the container's root (`probe`), then places each file (`layout`). NVIDIA's files
land where users of NVIDIA's hook find them: the image's own library folder, flat, and /usr/bin.
"""

from __future__ import annotations

import posix

from cdi.capabilities import NEEDED_LIBRARIES
from hook import loader
from hook.loader import TRIPLETS
from hook.plan import Plan
from hook.selection import DATA_OPTIONS, LIBRARY_OPTIONS, SOCKET_OPTIONS
from ldcache import root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hook.selection import Selection

# A GPU does its work without these nodes: they are for debuggers and for displays.
OPTIONAL_ROLES = ("uvm-tools", "drm")
PROGRAMS = "/usr/bin"
# Each folder that is missing costs a descriptor until the end.
DEPTH_MAX = 16


class Target:
    """Folders of one container root: libraries of both ELF classes, and programs."""

    __slots__ = ("library_folder", "library_folder_32", "program_folder")

    def __init__(self, library_folder: str, library_folder_32: str, program_folder: str) -> None:
        self.library_folder = library_folder
        self.library_folder_32 = library_folder_32
        self.program_folder = program_folder


def probe(base: int, env: dict[str, str], machine: str | None = None) -> Target:
    """The Target of the container root that `base` is open on.

    Debian and its descendants keep libraries below the multiarch triplet; a root without
    /etc/debian_version that has its C library there was made of Debian's files (distroless, where /usr need not be
    merged). musl searches /usr/lib. Everybody else: /usr/lib64, by its name /usr/lib where that is the same (Arch).
    """
    machine = machine or posix.uname().machine
    if loader.is_musl(base, machine):
        return Target("/usr/lib", "/usr/lib32", program_folder(env))
    triplet, triplet_32 = TRIPLETS.get(machine, ("", ""))
    debian = [f"/usr/lib/{triplet}/libc.so.6", f"/lib/{triplet}/libc.so.6", "/etc/debian_version"]
    if triplet and any(root.exists(base, path) for path in debian):
        return Target(f"/usr/lib/{triplet}", f"/usr/lib/{triplet_32}", program_folder(env))
    folder = "/usr/lib" if loader.same_place(base, "/usr/lib", "/usr/lib64") else "/usr/lib64"
    return Target(folder, _other_library_folder_32(base), program_folder(env))


def _other_library_folder_32(base: int) -> str:
    # libnvidia-container's rule: /usr/lib32, else /usr/lib unless that is /usr/lib64 under another name.
    if root.exists(base, "/usr/lib32") or not root.exists(base, "/usr/lib"):
        return "/usr/lib32"
    return "/usr/lib32" if loader.same_place(base, "/usr/lib", "/usr/lib64") else "/usr/lib"


def program_folder(env: dict[str, str]) -> str:
    """/usr/bin where the container's PATH has it, since scripts call /usr/bin/nvidia-smi by that name; else the
    first folder of PATH below /usr, or /bin; else /usr/bin."""
    folders = [folder.rstrip("/") for folder in env.get("PATH", "").split(":")]
    if PROGRAMS in folders:
        return PROGRAMS
    for folder in folders:
        parts = folder.split("/")[1:]
        usable = not {"", ".", ".."} & set(parts) and len(parts) <= DEPTH_MAX
        if usable and (folder.startswith("/usr/") or folder == "/bin"):
            return folder
    return PROGRAMS


def layout(selection: Selection, target: Target) -> Plan:
    """The Plan that puts a Selection into a Target."""
    plan = Plan()
    for library in selection.libraries:
        _library(plan, library, target.library_folder if library["class"] == 64 else target.library_folder_32)
    for program in selection.programs:
        plan.mount(program["path"], f"{target.program_folder}/{program['name']}", LIBRARY_OPTIONS, False)
    for item in selection.files:
        plan.mount(item["path"], item["container_path"], DATA_OPTIONS, False)
        folder, name = root.split(item["container_path"])
        for link in item["links"]:
            plan.link(f"{folder}/{link}", name)
    for item in selection.firmware:
        plan.mount(item["path"], item["container_path"], DATA_OPTIONS, False)
    for socket in selection.sockets:
        plan.mount(socket["path"], socket["container_path"], SOCKET_OPTIONS, False)
    for node in selection.nodes:
        plan.node(node, node["role"] not in OPTIONAL_ROLES)
    # libnvidia-container writes the profile for graphics and display, which bring EGL.
    if any(library["soname"].startswith("libEGL_") for library in selection.libraries):
        plan.profile = [gpu["minor"] for gpu in selection.gpus]
    plan.proc_mask = [gpu["bus_id"] for gpu in selection.gpus]
    return plan


def _library(plan: Plan, library: dict[str, Any], folder: str) -> None:
    """One real file, the link that its SONAME asks for, and the further names that something opens."""
    name, soname = library["name"], library["soname"]
    needed = library["class"] == 64 and soname in NEEDED_LIBRARIES.values()
    plan.mount(library["path"], f"{folder}/{name}", LIBRARY_OPTIONS, needed)
    if soname != name:
        plan.link(f"{folder}/{soname}", name)
    plan.cache_entry(soname, f"{folder}/{soname}", library["class"], library["machine"])
    for link in library["links"]:
        depth = link.count("/")
        plan.link(f"{folder}/{link}", "../" * depth + soname)
        # ldconfig's rule: `X.so` is a key of its own where the soname begins with `X.so`.
        if not depth and link.endswith(".so") and soname.startswith(link):
            plan.cache_entry(link, f"{folder}/{link}", library["class"], library["machine"])

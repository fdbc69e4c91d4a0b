# SPDX-License-Identifier: Apache-2.0
"""Where kinds of hosts keep the driver, and the links that lead there."""

from __future__ import annotations

from dataclasses import dataclass

from tests.simhost.host import Host, Layout, Library
from tests.simhost.tree import Tree


@dataclass(frozen=True, slots=True)
class Places:
    """Where a layout has things, as names below the driver root."""

    libraries: str
    libraries32: str
    programs: str
    share: str
    firmware: str = "/lib/firmware"
    vulkan: str = ""


def _below(top: str, vulkan: str = "") -> Places:
    """A driver that lies by itself."""
    return Places(f"{top}/lib64", f"{top}/lib32", f"{top}/bin", f"{top}/share", f"{top}/firmware", vulkan)


MULTIARCH, MULTIARCH32 = "/usr/lib/x86_64-linux-gnu", "/usr/lib/i386-linux-gnu"
STORE = "/nix/store/0c3xhn1a2d4f5g6h7i8j9k0l1m2n3p4q-nvidia-x11"

PLACES: dict[Layout, Places] = {
    "debian": Places(MULTIARCH, MULTIARCH32, "/usr/bin", "/usr/share"),
    "lib64": Places("/usr/lib64", "/usr/lib", "/usr/bin", "/usr/share"),
    "h200": _below("/usr/local/nvidia"),
    # Debian's own packages: the names that programs open lead there by way of /etc/alternatives.
    "alternatives": Places(
        f"{MULTIARCH}/nvidia/current", f"{MULTIARCH32}/nvidia/current", "/usr/lib/nvidia/current", "/usr/share"
    ),
    "flatcar": Places("/opt/nvidia/lib64", "/opt/nvidia/lib32", "/opt/bin", "/opt/nvidia/share"),
    "bottlerocket": Places(
        "/usr/lib/nvidia/tesla", "/usr/lib/nvidia/tesla32", "/usr/libexec/nvidia/tesla/bin", "/usr/share"
    ),
    "talos": Places(
        "/usr/local/glibc/usr/lib", "/usr/local/glibc/usr/lib32", "/usr/local/bin", "/usr/local/glibc/usr/share"
    ),
    "nixos": Places(
        f"{STORE}/lib", f"{STORE}-lib32/lib", f"{STORE}-bin/bin", f"{STORE}/share", f"{STORE}-firmware/lib/firmware"
    ),
    "gke": _below("/home/kubernetes/bin/nvidia", vulkan="/home/kubernetes/bin/nvidia/vulkan"),
}

# Where a driver outside /lib/firmware has told the kernel to look.
FIRMWARE_PATHS: dict[Layout, str] = {
    "h200": PLACES["h200"].firmware,
    "gke": PLACES["gke"].firmware,
    "nixos": "/run/current-system/firmware",
}
DISTRIBUTIONS: dict[Layout, str] = {
    "lib64": "fedora",
    "h200": "debian",
    "alternatives": "debian",
    "gke": "cos",
}


def finish(tree: Tree, host: Host, installed: tuple[Library, ...]) -> None:
    """The links by which the rest of the system finds the driver."""
    if host.layout == "alternatives":
        _alternatives(tree, installed)
    if host.layout == "nixos":
        _nixos(tree, installed)


def _alternatives(tree: Tree, installed: tuple[Library, ...]) -> None:
    for library in installed:
        folder = library.path.rpartition("/")[0]
        if library.soname in library.path or not folder.endswith("/current"):
            continue
        above = folder.removesuffix("/nvidia/current")
        name = f"/etc/alternatives/nvidia--{library.soname}-{above.rpartition('/')[2]}"
        tree.link(name, f"{folder}/{library.soname}")
        tree.link(f"{above}/{library.soname}", name)
    programs = PLACES["alternatives"].programs
    for path in sorted(tree.path(programs).glob("nvidia-*")):
        tree.link(f"/etc/alternatives/nvidia--{path.name}", f"{programs}/{path.name}")
        tree.link(f"/usr/bin/{path.name}", f"/etc/alternatives/nvidia--{path.name}")


def _nixos(tree: Tree, installed: tuple[Library, ...]) -> None:
    """/run/opengl-driver leads to a folder of links into the driver's own place in the store."""
    for name, bits in (("opengl-driver", 64), ("opengl-driver-32", 32)):
        union = f"/nix/store/9z8y7x6w5v4u3t2s1r0q9p8n7m6l5k4j-graphics-drivers-{bits}"
        folders = {library.path.rpartition("/")[0] for library in installed if library.bits == bits}
        for folder in sorted(folders):
            inside = folder.removeprefix(PLACES["nixos"].libraries if bits == 64 else PLACES["nixos"].libraries32)
            for path in sorted(tree.path(folder).iterdir()):
                if path.name.startswith("lib"):
                    tree.link(f"{union}/lib{inside}/{path.name}", f"{folder}/{path.name}")
        if folders:
            tree.link(f"/run/{name}", union)
    tree.link("/run/current-system/sw/bin", PLACES["nixos"].programs)
    tree.link("/run/current-system/firmware", PLACES["nixos"].firmware)

# SPDX-License-Identifier: Apache-2.0
"""What each driver capability brings: groups of libraries and files, and roles of device nodes.

Hot. Decided here and nowhere else, for containers (hook.selection) and for CDI files (cdi.generate). The groups are
libnvidia-container's.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Without these a capability does nothing, so their absence ends a start, and the making of a CDI file.
NEEDED_LIBRARIES = {"compute": "libcuda.so.1", "utility": "libnvidia-ml.so.1"}
# NVDEC and NVENC need libcuda, a display needs GL.
LIBRARY_GROUPS = {
    "compute": ("compute",),
    "display": ("graphics",),
    "graphics": ("graphics",),
    "ngx": ("ngx",),
    "utility": ("utility",),
    "video": ("video", "compute"),
}
NODE_ROLES = {
    "compute": ("uvm", "uvm-tools"),
    "display": ("modeset",),
    "graphics": ("modeset",),
    "video": ("uvm", "uvm-tools"),
}
DRM = ("display", "graphics")


def groups(capabilities: tuple[str, ...]) -> set[str]:
    """The groups of libraries and files that these capabilities bring."""
    return {group for name in capabilities for group in LIBRARY_GROUPS.get(name, ())}


def node_roles(capabilities: tuple[str, ...]) -> set[str]:
    """The roles of the nodes that belong to no GPU."""
    return {role for name in capabilities for role in NODE_ROLES.get(name, ())} | {"control"}


def gpu_roles(capabilities: tuple[str, ...]) -> tuple[str, ...]:
    """The roles of each GPU's own nodes."""
    return ("gpu", "drm") if any(name in DRM for name in capabilities) else ("gpu",)


def draws(profile: str | None) -> bool:
    """Whether a MIG device of that profile draws: one in whose name there is `+gfx`. Without it, or where NVML has not
    told the profile, it has no use for DRM nodes."""
    return "+gfx" in (profile or "")


def classes(capabilities: tuple[str, ...]) -> tuple[int, ...]:
    """ELF classes of the libraries."""
    return (32, 64) if "compat32" in capabilities else (64,)


def missing_library(
    inventory: dict[str, Any], libraries: list[dict[str, Any]], capabilities: tuple[str, ...]
) -> str | None:
    """Which 64-bit library is missing among these that one of the capabilities can't do without, in one line: the
    loaded module's version, the places searched, and the versions that lie there instead. None if none is."""
    have = {item["soname"] for item in libraries if item["class"] == 64}
    for capability, soname in NEEDED_LIBRARIES.items():
        if capability in capabilities and soname not in have:
            places, others = inventory.get("searched"), inventory.get("other_versions")
            where = f"was found in {', '.join(places)}" if places else "is on the host"
            instead = f"; there are libraries of {' and '.join(others)}" if others else ""
            version = inventory["driver"]["version"]
            return f"no {soname} of the loaded driver {version} {where}{instead}; capability `{capability}` needs it"
    return None

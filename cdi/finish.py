# SPDX-License-Identifier: Apache-2.0
"""The one hook of a CDI file, which does what containerEdits can't say.

Its arguments are an interface: they stand in files that outlive an update of nvhook, and other software reads them.
Each part of the work can be left out. All that the hook has to know of the host stands there too, so that it opens no
inventory in the container's namespaces.
"""

from __future__ import annotations

from typing import Any

from cdi.host import settings

HOOK_NAME = "nvhook-create-container"

# A hook entry without env runs, under runc, in runc's own environment, and once ran in the image's
# (CVE-2025-23266). The launcher needs none of this; an entry that says nothing is what must not be.
HOOK_ENV = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]

PARTS = ("links", "forward-compatibility", "loader-cache", "proc-mask", "application-profile", "requirements")
# What nvidia-ctk calls the same, for whoever is used to its --disable-hook.
NVIDIAS = {
    "create-symlinks": "links",
    "enable-cuda-compat": "forward-compatibility",
    "update-ldcache": "loader-cache",
    "disable-device-node-modification": "proc-mask",
    "update-application-profile": "application-profile",
}


def chosen_parts(disabled: list[str], enabled: list[str]) -> tuple[str, ...]:
    """The parts less the disabled ones; `all` disables every one that is not enabled by name.

    Raises ValueError for a name that is none.
    """
    for name in [item for item in disabled if item != "all"] + enabled:
        if NVIDIAS.get(name, name) not in PARTS:
            raise ValueError(f"{name!a} is no part of the hook: {', '.join(PARTS)}, or nvidia-ctk's name for one")
    off, on = ({NVIDIAS.get(name, name) for name in names} for names in (disabled, enabled))
    return tuple(part for part in PARTS if part in on or not off & {part, "all"})


def hook(inventory: dict[str, Any], hook_path: str, parts: tuple[str, ...]) -> list[dict[str, Any]]:
    """The hook's entry, or nothing where no part of its work is left. The inventory has what the file has.

    The launcher takes its verb from args[0], whatever file `hook_path` is.
    """
    arguments = _facts(inventory, parts)
    if "links" in parts:
        for target, link in links(inventory):
            arguments += ["--link", f"{target}::{link}"]
        arguments += [word for text in node_links(inventory) for word in ("--node-link", text)]
    if "loader-cache" in parts:
        for folder in dict.fromkeys(library["folder"] for library in inventory["libraries"]):
            arguments += ["--folder", folder]
    if not arguments:
        return []
    arguments = [HOOK_NAME, "--driver", inventory["driver"]["version"], *arguments]
    return [{"hookName": "createContainer", "path": hook_path, "args": arguments, "env": HOOK_ENV}]


def _facts(inventory: dict[str, Any], parts: tuple[str, ...]) -> list[str]:
    """What is done beside links and the loader cache, and the facts for it."""
    configured = settings.of(inventory)
    arguments = []
    if "forward-compatibility" not in parts or not configured["compat.forward-compatibility"]:
        # Only of use to what reads the cache, and a file without it needs no word on it.
        arguments += ["--no-forward-compatibility"] if "loader-cache" in parts else []
    judged = "requirements" in parts and not configured["disable-require"]
    if judged and configured["compat.requirements"] != "off":
        arguments += ["--requirements", configured["compat.requirements"]]
        if inventory["driver"]["cuda"]:
            arguments += ["--cuda", inventory["driver"]["cuda"]]
    if "proc-mask" in parts:
        arguments.append("--proc-mask")
    if "application-profile" in parts and any(item["soname"].startswith("libEGL_") for item in inventory["libraries"]):
        arguments.append("--application-profile")
    if "--requirements" in arguments or "--proc-mask" in arguments:
        arguments += [word for gpu in inventory["gpus"] for word in ("--gpu", _gpu(gpu))]
    return arguments


def _gpu(gpu: dict[str, Any]) -> str:
    """`MINOR=BUS_ID,ARCH,BRAND`, as far as it is known."""
    return f"{gpu['minor']}={gpu['bus_id']},{gpu['arch'] or ''},{gpu['brand'] or ''}".rstrip(",")


def links(inventory: dict[str, Any]) -> list[tuple[str, str]]:
    """Target and absolute place of each link: the SONAME leads to the file, further names to the SONAME."""
    made: dict[str, str] = {}
    for library in inventory["libraries"]:
        if library["soname"] != library["name"]:
            made.setdefault(inside(library, library["soname"]), library["name"])
        for name in library["links"]:
            made.setdefault(inside(library, name), "../" * name.count("/") + library["soname"])
    for item in inventory["files"]:
        folder, _, own = item["container_path"].rpartition("/")
        for name in item["links"]:
            made.setdefault(f"{folder}/{name}", own)
    return [(target, place) for place, target in made.items()]


def node_links(inventory: dict[str, Any]) -> list[str]:
    """`TARGET::LINK` of each link to a node that the file may bring; the hook makes those whose node has come."""
    mine = {gpu["bus_id"] for gpu in inventory["gpus"]}
    nodes = [node for node in inventory["nodes"] if node["role"] == "drm" and node["gpu"] in mine]
    return [f"../{node['path'].rpartition('/')[2]}::{link}" for node in nodes for link in node.get("links", ())]


def inside(library: dict[str, Any], name: str) -> str:
    """A name beside a library, as the container has it."""
    return f"{library['folder'].rstrip('/')}/{name}"

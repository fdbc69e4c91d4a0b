# SPDX-License-Identifier: Apache-2.0
"""The Plan: what will be done to one container, before anything is.

Hot. `edits` is a CDI containerEdits value (CDI specification, "containerEdits"); `finish` is what those
cannot say: links, loader-cache entries, what the image's loader is told, the proc mask, EGL's application profile. Host
paths are names below the host root.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


# Lines on an image's files of one kind, and of all that a Plan says.
FEW = 3
WARNINGS_MAX = 40


def few(lines: list[str], kind: str, most: int = FEW) -> list[str]:
    """The first of the lines, and one that says how many more there are: an image may have 60,000 files for each of
    which there would be one."""
    if len(lines) <= most:
        return lines
    return [*lines[:most], f"and {len(lines) - most} more {kind}"]


class Plan:
    """Edits and finish. `proc_mask` holds the bus ids left visible, or None where no mask is set; `proc_access` what
    is left visible below /proc/driver/nvidia/capabilities. `profile` are the minor numbers of the GPUs that EGL lists,
    none where nothing of EGL's is brought.

    `node_links` are links to nodes, below /dev as these are; nobody has to have them.
    `optional` are the container paths of what may fail without ending the start, `covers` the links in whose
    place the library itself is mounted. `cache_needed`: without the cache the loader finds nothing of ours.
    `drop_in` are the folders of our file in ld.so.conf.d, `drop_in_line` whether ld.so.conf must be told of it
    first, `drop_in_there` whether an earlier start has left one. `musl_path` is musl's path file, or "", and
    `musl_folders` what has to stand in it.
    """

    __slots__ = (
        "cache_entries",
        "cache_needed",
        "compat_folder",
        "compat_reason",
        "covers",
        "drop_in",
        "drop_in_line",
        "drop_in_there",
        "links",
        "mounts",
        "musl_folders",
        "musl_path",
        "node_links",
        "nodes",
        "optional",
        "proc_access",
        "proc_mask",
        "profile",
        "stale_folders",
        "warnings",
    )

    def __init__(self) -> None:
        self.cache_needed = False
        self.compat_folder = ""
        self.compat_reason = ""
        self.covers: set[str] = set()
        self.drop_in: list[str] = []
        self.drop_in_line = False
        self.drop_in_there = False
        self.musl_folders: list[str] = []
        self.musl_path = ""
        self.optional: set[str] = set()
        self.profile: list[int] = []
        self.stale_folders: list[str] = []
        self.warnings: list[str] = []
        self.node_links: list[dict[str, str]] = []
        self.nodes: list[dict[str, Any]] = []
        self.mounts: list[dict[str, Any]] = []
        self.links: list[dict[str, str]] = []
        self.cache_entries: list[dict[str, Any]] = []
        self.proc_access: list[str] = []
        self.proc_mask: list[str] | None = None

    def mount(self, host_path: str, container_path: str, options: tuple[str, ...], needed: bool = True) -> None:
        """Bind a host file; a second one for the same place is dropped, as one name can show one file."""
        if all(mount["containerPath"] != container_path for mount in self.mounts):
            self.mounts.append({"hostPath": host_path, "containerPath": container_path, "options": list(options)})
            if not needed:
                self.optional.add(container_path)

    def node(self, node: dict[str, Any], needed: bool = True) -> None:
        """A device node of the inventory. Reading and writing is all that the driver's user space does."""
        if not needed:
            self.optional.add(node["path"])
        entry = {"path": node["path"]}
        if node["host_path"] != node["path"]:
            entry["hostPath"] = node["host_path"]
        entry |= {"type": "c", "major": node["major"], "minor": node["minor"], "fileMode": node["mode"]}
        entry |= {"permissions": "rw", "uid": node["uid"], "gid": node["gid"]}
        self.nodes.append(entry)
        for link in node.get("links", ()):
            # `/dev/dri/card0` from `/dev/dri/by-path/…`.
            self.node_links.append({"path": link, "target": f"../{node['path'].rpartition('/')[2]}"})

    def link(self, path: str, target: str) -> None:
        """A symbolic link, once per path."""
        if all(link["path"] != path for link in self.links):
            self.links.append({"path": path, "target": target})

    def cache_entry(self, soname: str, path: str, elf_class: int, machine: int) -> None:
        """A loader-cache entry: `soname` is found at `path`."""
        self.cache_entries.append({"soname": soname, "path": path, "class": elf_class, "machine": machine})

    def edits(self) -> dict[str, Any]:
        """The CDI containerEdits object, without empty members."""
        edits = {"deviceNodes": self.nodes, "mounts": self.mounts}
        return {name: value for name, value in edits.items() if value}

    def finish(self) -> dict[str, Any]:
        """The rest, as `nvhook plan` prints it."""
        mask = None if self.proc_mask is None else {"gpus": self.proc_mask}
        if mask is not None and self.proc_access:
            mask["access"] = self.proc_access
        links = [link | {"covered": True} if link["path"] in self.covers else link for link in self.links]
        links += self.node_links
        search: dict[str, Any] = {"drop_in": self.drop_in, "stale_folders": self.stale_folders}
        if self.musl_path:
            search = {"musl_path": self.musl_path, "folders": self.musl_folders}
        compat = {"used": bool(self.compat_folder), "folder": self.compat_folder or None, "reason": self.compat_reason}
        return {
            "links": links,
            "loader_cache": self.cache_entries,
            "search": search,
            "forward_compatibility": compat if self.compat_reason else None,
            "proc_mask": mask,
            "application_profile": {"gpus": self.profile} if self.profile else None,
            "warnings": self.warnings,
        }

# SPDX-License-Identifier: Apache-2.0
"""The Plan: what will be done to one container, before anything is.

Hot. `edits` is a CDI containerEdits value (CDI specification, "containerEdits"); `finish` is what those
cannot say: links, loader-cache entries, the proc mask. Host paths are names below the host root.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Plan:
    """Edits and finish. `proc_mask` holds the bus ids left visible, or None where no mask is set."""

    __slots__ = ("cache_entries", "links", "mounts", "nodes", "proc_mask")

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.mounts: list[dict[str, Any]] = []
        self.links: list[dict[str, str]] = []
        self.cache_entries: list[dict[str, Any]] = []
        self.proc_mask: list[str] | None = None

    def mount(self, host_path: str, container_path: str, options: tuple[str, ...]) -> None:
        """Bind a host file; a second one for the same place is dropped, as one name can show one file."""
        if all(mount["containerPath"] != container_path for mount in self.mounts):
            self.mounts.append({"hostPath": host_path, "containerPath": container_path, "options": list(options)})

    def node(self, node: dict[str, Any]) -> None:
        """A device node of the inventory. Reading and writing is all that the driver's user space does."""
        entry = {"path": node["path"]}
        if node["host_path"] != node["path"]:
            entry["hostPath"] = node["host_path"]
        entry |= {"type": "c", "major": node["major"], "minor": node["minor"], "fileMode": node["mode"]}
        entry |= {"permissions": "rw", "uid": node["uid"], "gid": node["gid"]}
        self.nodes.append(entry)

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
        return {"links": self.links, "loader_cache": self.cache_entries, "proc_mask": mask}

# SPDX-License-Identifier: Apache-2.0
"""Spec folders: which file defines a device, and which files do not count and why.

Hot. As the library does it (`pkg/cdi/cache.go`): a folder's index in the list is its priority, a device of a
higher one shadows those of lower ones, and two files of one folder that define one name make it unresolvable, in
whatever folder it is defined besides. A bad file is dropped whole and stops nothing else.
"""

from __future__ import annotations

import posix

from cdi import source, validate
from ldcache import root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    # What a file's path leads to. Raises OSError, or a ValueError that says what is wrong with the text.
    Load = Callable[[str], validate.Checked]

# Lowest priority first. /etc/cdi is for what an administrator wrote, the other for what is generated at boot.
FOLDERS = ("/etc/cdi", "/var/run/cdi")
SUFFIXES = (".json", ".yaml")
# Names that an error lists.
OTHERS = 20


class SpecFile:
    """A file that is read: its `path`, its folder's index as `priority`, its `spec`."""

    __slots__ = ("path", "priority", "spec")

    def __init__(self, path: str, priority: int, spec: dict[str, Any]) -> None:
        self.path = path
        self.priority = priority
        self.spec = spec


class Registry:
    """What a list of folders holds.

    `devices` maps a qualified name to the file that defines it and its entry there; `shadowed` to the files of
    lower priority that define it too; `conflicts` to those files for which it is unresolvable. `failed` maps a
    path to all reasons why its file, or the folder, is not read; `skipped` to why it is no spec file. Of the
    failed ones, `unparsed` are those that `cdi.reader` might read, where `load_plain` did not.
    """

    __slots__ = ("conflicts", "devices", "failed", "files", "shadowed", "skipped", "unparsed")

    def __init__(self) -> None:
        self.files: list[SpecFile] = []
        self.devices: dict[str, tuple[SpecFile, dict[str, Any]]] = {}
        self.shadowed: dict[str, list[str]] = {}
        self.conflicts: dict[str, list[str]] = {}
        self.failed: dict[str, list[str]] = {}
        self.skipped: dict[str, str] = {}
        self.unparsed: list[str] = []

    def _add(self, file: SpecFile) -> None:
        self.files.append(file)
        for device in file.spec["devices"]:
            name = f"{file.spec['kind']}={device['name']}"
            other = self.devices.get(name)
            if other is None:
                self.devices[name] = (file, device)
            elif file.priority > other[0].priority:
                self.shadowed.setdefault(name, []).append(other[0].path)
                self.devices[name] = (file, device)
            else:
                paths = self.conflicts.setdefault(name, [])
                paths += [path for path in (other[0].path, file.path) if path not in paths]

    def _drop_conflicts(self) -> None:
        for name in self.conflicts:
            del self.devices[name]


def scan(folders: tuple[str, ...] | list[str], load: Load) -> Registry:
    """Read all spec files of these folders, the one of lowest priority first. Raises nothing for what it finds.

    A folder that is not there is no error. One that is a link is followed, as the library does after release
    1.1.0; up to that release its files are not seen.
    """
    found = Registry()
    for priority, folder in enumerate(folders):
        for path in _spec_paths(folder, found):
            try:
                checked = load(path)
            except OSError as error:
                found.failed[path] = [error.strerror or str(error)]
                continue
            except ValueError as error:
                found.failed[path] = [str(error)]
                if isinstance(error, source.NotPlain):
                    found.unparsed.append(path)
                continue
            problems = checked.problems()
            if problems:
                found.failed[path] = [str(problem) for problem in problems]
            else:
                found._add(SpecFile(path, priority, checked.spec))
    found._drop_conflicts()
    return found


def _spec_paths(folder: str, found: Registry) -> list[str]:
    try:
        names = sorted(posix.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        found.failed[folder] = [error.strerror or str(error)]
        return []
    paths = []
    for name in names:
        path = f"{folder.rstrip('/')}/{name}"
        if _is_folder(path):
            found.skipped[path] = "is a folder; sub-folders are not read"
        elif not name.endswith(SUFFIXES):
            found.skipped[path] = "its name ends neither in .json nor in .yaml"
        else:
            paths.append(path)
    return paths


def _is_folder(path: str) -> bool:
    try:
        return root.file_type(posix.lstat(path).st_mode) == root.S_IFDIR
    except OSError:
        return False


def load_plain(path: str) -> validate.Checked:
    """A spec file of plain JSON. Raises OSError, and `source.NotPlain` for all that needs `cdi.reader`."""
    return validate.check(source.plain_json(source.read_file(path)))


def resolve(found: Registry, names: list[str]) -> list[dict[str, Any]]:
    """The containerEdits of devices, in the order in which they are to be applied.

    Those at a file's top come once, before the first of its devices. A name that is asked for twice counts
    twice. Raises NvhookError naming all names that can't be resolved.
    """
    missing = [name for name in names if name not in found.devices]
    if missing:
        shown = ", ".join(_describe(found, name) for name in missing)
        raise NvhookError(f"unresolvable CDI devices: {shown}", "see `cdi list` for what there is, and what failed")
    edits: list[dict[str, Any]] = []
    met: set[str] = set()
    for name in names:
        file, device = found.devices[name]
        if file.path not in met:
            met.add(file.path)
            edits.append(file.spec.get("containerEdits", {}))
        edits.append(device["containerEdits"])
    return edits


def _describe(found: Registry, name: str) -> str:
    paths = found.conflicts.get(name)
    return f"{name} (defined by each of {' and '.join(paths)})" if paths else name


def table(found: Registry, names: list[str]) -> dict[str, Any]:
    """The part of a registry that these names are about, as JSON can carry it: `entries` by name, with the file, its
    edits and the device's own; `conflicts`; and, where a name is in neither, `others` of its kind, at most OTHERS."""
    entries = {}
    for name in names:
        if name in found.devices:
            file, device = found.devices[name]
            entries[name] = [file.path, file.spec.get("containerEdits", {}), device["containerEdits"]]
    conflicts = {name: found.conflicts[name] for name in names if name in found.conflicts}
    kinds = {name.partition("=")[0] for name in names if name not in entries and name not in conflicts}
    others = [name for name in found.devices if name.partition("=")[0] in kinds]
    return {"entries": entries, "conflicts": conflicts, "others": others[:OTHERS]}

# SPDX-License-Identifier: Apache-2.0
"""The driver's libraries: real files of exactly the loaded module's version, with their SONAMEs.

Where: folders that the caller names, folders that the loader cache leads to, the usual ones. What: every
`lib*.so.<version>` there, and the few libraries of the driver that have a version of their own. A folder may
hold two drivers at once; nothing of another version is ever taken.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cdi.host import fingerprint, table
from cdi.host.driver import Driver
from ldcache import cache, elf, root

LD_SO_CACHE = "/etc/ld.so.cache"
LD_SO_CONF = ("/etc/ld.so.conf", "/etc/ld.so.conf.d")

NAME = re.compile(r"(lib[^/]+?)\.so\.([0-9][0-9.]*)")

# CUDA's and NVML's: no driver is without them, whatever else a host leaves out.
ESSENTIAL = {"libcuda", "libnvidia-ml"}

# A library folder's own sub-folders that hold libraries; what is there is looked for by its own loader.
SUBFOLDERS = ("vdpau",)


@dataclass(frozen=True, slots=True)
class Library:
    """One library. `path` and `folder` are inside the base that it was found in.

    `links` are further names to make in the folder, each a link to the SONAME.
    """

    base: fingerprint.Base
    path: str
    soname: str
    links: tuple[str, ...]
    known: table.Library
    elf_class: int
    machine: int

    @property
    def name(self) -> str:
        """The file's own name, which ends in the version."""
        return self.path.rpartition("/")[2]

    @property
    def folder(self) -> str:
        """The folder as a container has it."""
        return self.path.rpartition("/")[0] or "/"

    def to_json(self) -> dict[str, Any]:
        """As an inventory holds it."""
        return {
            "path": self.base.prefix + self.path,
            "folder": self.folder,
            "name": self.name,
            "soname": self.soname,
            "links": list(self.links),
            "capability": self.known.group,
            "also": list(self.known.also),
            "class": self.elf_class,
            "machine": self.machine,
        }


@dataclass(slots=True)
class Search:
    """One search: what it needs, what it found, what it has to say."""

    recorder: fingerprint.Recorder
    driver: Driver
    bases: list[tuple[fingerprint.Base, str]] = field(default_factory=list)
    found: dict[tuple[int, str], Library] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    listings: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    searched: list[str] = field(default_factory=list)

    def listing(self, base: fingerprint.Base, folder: str) -> list[str]:
        """The names in a real folder, or none."""
        key = base.prefix, folder
        if key not in self.listings:
            try:
                self.listings[key] = root.listdir(base.fd, folder)
            except OSError:
                self.listings[key] = []
        return self.listings[key]


@dataclass(frozen=True, slots=True)
class Found:
    """All libraries, 64-bit ones first, then by name; the real folders that hold driver libraries; warnings.

    `searched`: every place looked at, where libcuda or libnvidia-ml of the driver's version was not found. `others`:
    the versions of which one of the two was found instead of, or beside, that. A 32-bit twin alone counts for nothing.
    """

    libraries: list[Library]
    folders: list[str]
    warnings: list[str]
    searched: list[str]
    others: list[str]

    @property
    def stems(self) -> set[str]:
        """The names of the libraries up to `.so`."""
        return {library.known.stem for library in self.libraries}


def read(
    recorder: fingerprint.Recorder,
    driver: Driver,
    base: fingerprint.Base,
    host: fingerprint.Base,
    search_path: tuple[str, ...] = (),
) -> Found:
    """The libraries inside `base`, the driver root, and in the `search_path`, whose folders are host paths."""
    search = Search(recorder, driver)
    _choose_folders(search, base, host, search_path)
    for where, folder in list(search.bases):
        _take_versioned(search, where, folder)
    if not _essential(search):
        usual = len(search.bases)
        for folder in table.PLATFORM_FOLDERS:
            _add_folder(search, base, folder)
        for where, folder in search.bases[usual:]:
            _take_versioned(search, where, folder)
    others = _other_versions(search)
    searched = [] if len(_essential(search)) == len(ESSENTIAL) else list(dict.fromkeys(search.searched))
    if not any(elf_class == 64 for elf_class, _ in search.found):
        # What has a version of its own is of another driver then.
        return Found([], [], [*search.warnings, nothing(driver.version, searched, others)], searched, others)
    taken = {library.folder for library in search.found.values()}
    for where, folder in search.bases:
        _take_own_versions(search, where, folder, folder in taken)
    _expect(search)
    libraries = sorted(search.found.values(), key=lambda item: (-item.elf_class, item.name, item.path))
    folders = list(dict.fromkeys(item.folder for item in libraries if item.base is base))
    return Found(libraries, folders, search.warnings, searched, others)


def _essential(search: Search) -> set[str]:
    """Which of the two libraries that everything needs are found."""
    return {library.known.stem for (elf_class, _), library in search.found.items() if elf_class == 64} & ESSENTIAL


def nothing(version: str, searched: list[str], others: list[str]) -> str:
    """That no library of the driver is anywhere, in one line."""
    instead = f"; there are libraries of {' and '.join(others)}" if others else ""
    return f"no library of the loaded driver {version} was found in {', '.join(searched)}{instead}"


def _other_versions(search: Search) -> list[str]:
    """Of which other drivers the two libraries that everything needs are there."""
    found = set()
    for base, folder in search.bases:
        for name in search.listing(base, folder):
            library = NAME.fullmatch(name)
            # A driver's version has a dot; libcuda.so.1 is a link's name.
            if library and library[1] in ESSENTIAL and "." in library[2].strip("."):
                found.add(library[2])
    return sorted(found - {search.driver.version})


def _choose_folders(
    search: Search, base: fingerprint.Base, host: fingerprint.Base, search_path: tuple[str, ...]
) -> None:
    """Real folders in the order of trust: the caller's, the loader cache's, the usual ones."""
    for folder in search_path:
        where, inside = place(base, host, folder)
        if not _add_folder(search, where, inside):
            search.warnings.append(f"--library-search-path {folder} is no folder")
    for path in LD_SO_CONF:
        search.recorder.file(base, path)
    search.searched.append(f"the folders of {base.prefix}{LD_SO_CACHE}")
    for folder in _cached_folders(search, base):
        _add_folder(search, base, folder)
    for folder in table.library_folders(search.driver.machine or os.uname().machine):
        _add_folder(search, base, folder)
    if base.prefix:
        # A driver root that is nothing but the driver has its libraries at the top.
        _add_folder(search, base, "/")


def place(base: fingerprint.Base, host: fingerprint.Base, path: str) -> tuple[fingerprint.Base, str]:
    """A host path as the base that holds it and the name there: inside the driver root where it is below that."""
    if path == base.prefix or path.startswith(base.prefix + "/"):
        return base, path[len(base.prefix) :] or "/"
    return host, path


def _add_folder(search: Search, base: fingerprint.Base, folder: str) -> bool:
    search.searched.append(base.prefix + folder)
    real = search.recorder.file(base, folder)
    if real is None or not search.listing(base, real):
        return False
    known = {(where.prefix + name) for where, name in search.bases}
    for name in (real, *(f"{real.rstrip('/')}/{inner}" for inner in SUBFOLDERS if inner in search.listing(base, real))):
        if base.prefix + name not in known:
            search.bases.append((base, name))
            if name != real:
                search.recorder.file(base, name)
    return True


def _cached_folders(search: Search, base: fingerprint.Base) -> Iterator[str]:
    """Folders where the loader cache has libraries of this driver: those it names, and those its links lead to."""
    search.recorder.file(base, LD_SO_CACHE)
    try:
        data = root.read_file(base.fd, LD_SO_CACHE, cache.MAX_FILE)
    except FileNotFoundError:
        return
    except OSError as error:
        search.warnings.append(f"{base.prefix}{LD_SO_CACHE} can't be read: {error.strerror}")
        return
    try:
        entries = cache.parse(data).entries if data else []
    except cache.InvalidLdCache as error:
        search.warnings.append(f"{base.prefix}{LD_SO_CACHE} can't be read: {error}")
        return
    for path in dict.fromkeys(entry.path for entry in entries if _is_ours(entry.soname)):
        name = os.fsdecode(path)
        # The links on the way are remembered: one that is led to this driver's file later is then noticed.
        real = search.recorder.file(base, name)
        if real is None:
            # Stale: the loader would not find it either.
            continue
        if _version_of(real) == search.driver.version:
            yield real.rpartition("/")[0] or "/"
            yield name.rpartition("/")[0] or "/"


def _is_ours(soname: bytes) -> bool:
    stem = os.fsdecode(soname).partition(".so")[0]
    return stem in table.BY_STEM or stem.startswith("libnvidia-")


def _version_of(path: str) -> str | None:
    """What stands behind the last `.so.`, whole: 0.10 is not the version of libcuda.so.550.10."""
    found = NAME.fullmatch(path.rpartition("/")[2])
    return found[2] if found else None


def _take_versioned(search: Search, base: fingerprint.Base, folder: str) -> None:
    for name in search.listing(base, folder):
        found = NAME.fullmatch(name)
        if found and found[2] == search.driver.version:
            known = table.BY_STEM.get(found[1]) or table.Library(found[1], table.DEFAULT_GROUP)
            _take(search, base, f"{folder.rstrip('/')}/{name}", known)


def _take_own_versions(search: Search, base: fingerprint.Base, folder: str, beside: bool) -> None:
    """Libraries whose version is not the driver's: of several, the one that the loader would take."""
    candidates: dict[str, list[str]] = {}
    for name in search.listing(base, folder):
        found = NAME.fullmatch(name)
        known = table.BY_STEM.get(found[1]) if found else None
        if found and known and known.own and (beside or not known.beside) and re.fullmatch(known.own, found[2]):
            candidates.setdefault(known.stem, []).append(found[2])
    for stem, versions in candidates.items():
        # ldconfig lets the SONAME's link lead to the greatest version.
        version = max(versions, key=lambda text: [int(part) for part in text.split(".") if part])
        _take(search, base, f"{folder.rstrip('/')}/{stem}.so.{version}", table.BY_STEM[stem])


def _take(search: Search, base: fingerprint.Base, path: str, known: table.Library) -> None:
    real = search.recorder.file(base, path)
    odd = next((name for name in (path, real) if name is not None and not name.isprintable()), None)
    if odd is not None:
        search.warnings.append(f"{base.prefix}{ascii(odd)[1:-1]} is left out: no CDI file could name it")
        return
    if real is None:
        search.warnings.append(f"{base.prefix}{path} leads nowhere")
        return
    version = _version_of(real)
    if version != _version_of(path):
        search.warnings.append(f"{base.prefix}{path} is left out: it leads to {real}, of another version")
        return
    facts = _facts(search, base, real)
    if facts is None:
        return
    soname = os.fsdecode(facts.soname) if facts.soname else real.rpartition("/")[2]
    if not soname.isprintable():
        search.warnings.append(f"{base.prefix}{path} is left out: no CDI file could hold its SONAME, {soname!a}")
        return
    links = _links(search, base, real, soname, known)
    library = Library(base, real, soname, links, known, facts.elf_class, facts.machine)
    search.found.setdefault((library.elf_class, library.name), library)


def _facts(search: Search, base: fingerprint.Base, path: str) -> elf.ElfFacts | None:
    try:
        fd = root.open_file(base.fd, path)
    except OSError as error:
        search.warnings.append(f"{base.prefix}{path} is left out: {error.strerror}")
        return None
    try:
        facts = elf.read(fd)
    except (elf.InvalidElf, OSError) as error:
        search.warnings.append(f"{base.prefix}{path} is left out: {error}")
        return None
    finally:
        os.close(fd)
    machines = table.ELF_MACHINES.get(search.driver.machine or "")
    if machines and facts.machine != machines[facts.elf_class == 32]:
        search.warnings.append(f"{base.prefix}{path} is left out: it is for ELF machine {facts.machine}")
        return None
    return facts


def _links(search: Search, base: fingerprint.Base, path: str, soname: str, known: table.Library) -> tuple[str, ...]:
    """Names besides the file's and its SONAME: those that are always wanted, and those that the host has."""
    folder, _, own = path.rpartition("/")
    links = {name for name in known.links if name != soname}
    for name in search.listing(base, folder or "/"):
        similar = name.startswith(f"{known.stem}.so") and name not in (own, soname)
        if similar and name.isprintable() and _leads_to(base, f"{folder}/{name}", path):
            links.add(name)
    return tuple(sorted(links))


def _leads_to(base: fingerprint.Base, link: str, path: str) -> bool:
    try:
        return root.real_path(base.fd, link) == path
    except OSError:
        return False


def _expect(search: Search) -> None:
    version = search.driver.version
    branch = int(version.partition(".")[0])
    have = {library.known.stem for library in search.found.values() if library.elf_class == 64}
    for known in table.LIBRARIES:
        if known.expected and branch >= (known.since or 0) and known.stem not in have:
            search.warnings.append(f"{known.stem}.so.{version} is in no library folder")

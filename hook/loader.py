# SPDX-License-Identifier: Apache-2.0
"""What an image's loader and its ldconfig search: read from the image, never guessed by the name of a distribution.

Hot. A glibc loader holds its default folders as text; ldconfig's further ones stand in /etc/ld.so.conf. Where
our folder is in neither, or another folder has a library that would be found before ours, one drop-in file
names ours first, so that a later ldconfig (each package installation runs one) finds what we put into the
cache. musl's loader has no cache: its folders stand in /etc/ld-musl-ARCH.path, or are built in.
"""

from __future__ import annotations

import errno
import posix

from hook import compat
from hook.plan import WARNINGS_MAX, few
from ldcache import cache, imageconf, kernel, root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hook.plan import Plan

CACHE_PATH = "/etc/ld.so.cache"
DROP_IN = "/etc/ld.so.conf.d/00-nvhook.conf"
LOADERS = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}
TRIPLETS = {
    "x86_64": ("x86_64-linux-gnu", "i386-linux-gnu"),
    "aarch64": ("aarch64-linux-gnu", "arm-linux-gnueabihf"),
}
# The loader itself: 0.2 MB, and in the builds with everything in one file below 2.
LOADER_MAX = 4 << 20
# Folders that the cache does not know, of which one start reads the libraries.
STALE_MAX = 64
# Bytes of the cache that are searched for folders, all together: a second, of a cache of 16 MiB for each of sixteen.
SEARCH_MAX = 256 << 20
# Names of one library folder that are looked at for the image's own driver files.
NAMES_MAX = 1 << 16
# Of those, names of the driver's libraries whose files are looked at; further ones count as files.
LOOKED_MAX = 1024


class Loader:
    """`defaults` of the image's glibc loader, `conf` of its ldconfig without our drop-in, `stale` folders that the
    cache does not know as they are, `places` device and inode of those of `conf` that are there. `musl_path` is musl's
    path file, "" where the image is no musl one."""

    __slots__ = ("conf", "defaults", "glibc", "musl_path", "places", "stale")

    def __init__(self) -> None:
        self.glibc = False
        self.defaults: tuple[str, ...] = ()
        self.conf = imageconf.Conf()
        self.places: dict[str, tuple[int, int]] = {}
        self.stale: list[str] = []
        self.musl_path = ""

    def searches(self, base: int, folder: str) -> bool:
        """Whether the folder is one of the loader's default ones, by name or as the same place."""
        return folder in self.defaults or any(same_place(base, folder, other) for other in self.defaults)

    def configured(self, base: int, folder: str) -> bool:
        """Whether ld.so.conf names the folder, by this name or another."""
        return folder in self.conf.folders or place(base, folder) in self.places.values()


def probe(base: int, machine: str | None = None) -> Loader:
    """The facts of the image whose root `base` is open on."""
    machine = machine or posix.uname().machine
    made = Loader()
    if is_musl(base, machine):
        made.musl_path = f"/etc/ld-musl-{machine}.path"
        return made
    made.glibc = root.exists(base, LOADERS.get(machine, ""))
    made.defaults = default_folders(base, machine)
    made.conf = imageconf.read(base, DROP_IN)
    made.stale = stale(base, made)
    return made


def is_musl(base: int, machine: str) -> bool:
    """Whether musl is the image's C library. A glibc image may hold musl too, for its compiler; a musl image may
    hold a glibc loader that is a mere shim (gcompat), but no libc.so.6 where glibc keeps it."""
    if not root.exists(base, f"/lib/ld-musl-{machine}.so.1"):
        return False
    triplet = TRIPLETS.get(machine, ("",))[0]
    folders = ("/lib64", "/usr/lib64", f"/lib/{triplet}", f"/usr/lib/{triplet}")
    return not any(root.exists(base, f"{folder}/libc.so.6") for folder in folders)


def default_folders(base: int, machine: str) -> tuple[str, ...]:
    """The folders that the image's loader searches without being told: glibc keeps them in it, each with a
    slash at its end, between NULs (`elf/dl-load.c`, system_dirs). Empty without a readable loader."""
    try:
        fd = root.open_file(base, LOADERS.get(machine, ""), stored=True)
        text = root.read_open(fd, LOADER_MAX, LOADERS[machine])
    except OSError:
        return ()
    triplet = TRIPLETS[machine][0]
    known = (f"/lib/{triplet}", f"/usr/lib/{triplet}", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
    return tuple([folder for folder in known if f"\0{folder}/\0".encode() in text])


def same_place(base: int, one: str, other: str) -> bool:
    """Whether two names lead to one folder of the image."""
    try:
        first, second = root.stat(base, one), root.stat(base, other)
    except OSError:
        return False
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def stale(base: int, facts: Loader) -> list[str]:
    """Folders of ld.so.conf that the cache does not know as they are: newer than it, or with none of their libraries
    in it. Default folders don't matter, since the loader searches them after the cache.

    Of a huge cache only so many folders are looked for, the others count as known: whoever built the image chose how
    many there are, too."""
    data, changed = cache_file(base)
    left = SEARCH_MAX
    known = {place(base, folder) for folder in facts.defaults}
    found: list[str] = []
    for folder in facts.conf.folders:
        status = folder_status(base, folder, facts.conf.links)
        if status is None:
            continue
        where = facts.places[folder] = status.st_dev, status.st_ino
        if where in known:
            continue
        # ldconfig too reads a folder once, by its first name.
        known.add(where)
        if status.st_mtime_ns > changed:
            found.append(folder)
            continue
        left -= len(data)
        if left >= 0 and b"\0" + kernel.encode(folder) + b"/" not in data:
            found.append(folder)
    return found


def cache_file(base: int) -> tuple[bytes, int]:
    """The image's cache and its time; nothing, of the year 1970, where there is none to be read."""
    try:
        fd = root.open_file(base, CACHE_PATH, stored=True)
    except OSError:
        return b"", 0
    try:
        return cache.read(fd), posix.fstat(fd).st_mtime_ns
    except (OSError, cache.InvalidLdCache):
        return b"", 0
    finally:
        posix.close(fd)


def place(base: int, folder: str) -> tuple[int, int] | None:
    """Device and inode of a folder of the image; None where it has none."""
    status = folder_status(base, folder)
    return (status.st_dev, status.st_ino) if status is not None else None


def folder_status(base: int, folder: str, links: root.Budget | None = None) -> posix.stat_result | None:
    """The folder's status; None where there is none, or none that `links` pays for."""
    try:
        status = root.stat(base, folder, budget=links)
    except OSError:
        return None
    return status if root.file_type(status.st_mode) == root.S_IFDIR else None


def complete(plan: Plan, base: int, facts: Loader, folders: list[str], paths: list[str]) -> None:
    """Put into a Plan what the image's loader and ldconfig need to find its libraries, which lie in `folders`; the most
    important one first. `paths` is where files of the host are or will be mounted. Raises NvhookError."""
    for folder in folders:
        check_links(base, folder)
    ours = set(paths)
    plan.stale_folders = facts.stale[:STALE_MAX]
    if len(facts.stale) > STALE_MAX:
        what = f"{facts.stale[STALE_MAX]} of the container is not read into {CACHE_PATH}"
        plan.warnings.append(f"{what}: it knows {len(facts.stale)} folders too few; run ldconfig in the image")
    if facts.musl_path:
        plan.cache_entries = []
        plan.musl_path, plan.musl_folders = facts.musl_path, folders
        return
    for folder in folders:
        own_versions(plan, base, folder, ours, facts.conf.links)
    rivals = rival_folders(plan, base, facts)
    hidden = [folder for folder in folders if not facts.searches(base, folder)]
    plan.cache_needed = facts.glibc and bool(folders) and folders[0] in hidden
    compat = [plan.compat_folder] if plan.compat_folder else []
    # Without a loader nothing reads the drop-in.
    if facts.glibc:
        unnamed = [folder for folder in hidden if not facts.configured(base, folder)]
        plan.drop_in = compat + (folders if rivals else unnamed)
    plan.drop_in_there = root.exists(base, DROP_IN)
    before = facts.conf.before
    ahead = facts.conf.folders[: max(before, 0)]
    plan.drop_in_line = before < 0 or bool(compat and ahead) or bool(set(rivals) & set(ahead))
    if facts.conf.links.parts < 0:
        plan.warnings.append(f"the image has too many links to follow: not all that {imageconf.PATH} names is read")
    plan.warnings = few(plan.warnings, "warnings on the image", WARNINGS_MAX)


def check_links(base: int, folder: str) -> None:
    """Refuse a library folder behind links that take long to follow: each mount in it would have to, by us and by the
    runtime, and so would each library that a program loads. Raises NvhookError."""
    try:
        posix.close(root.open_path(base, folder, budget=root.Budget(root.PARTS_MAX)))
    except OSError as error:
        if error.errno == errno.ELOOP:
            what = f"{folder} in the container is too long, or has too many links, to be followed"
            raise NvhookError(what, "repair the links in the image") from error


def own_versions(plan: Plan, base: int, folder: str, ours: set[str], budget: root.Budget) -> None:
    """Where the folder has another version of a library of ours, ldconfig would lead the soname's link to the greater
    one; a file it leaves. So ours is mounted at its soname too, and a warning names the image's file."""
    stems = {}
    for link in plan.links:
        where, name = root.split(link["path"])
        if where == folder and f"{folder}/{link['target']}" in ours:
            stems[name.partition(".so")[0]] = link["path"]
    links = {link["path"] for link in plan.links}
    try:
        opened = root.Folder(base, folder, budget)
    except OSError:
        return
    looked = 0
    found: list[str] = []
    try:
        for name in sorted(opened.names(NAMES_MAX)):
            path = f"{folder}/{name}"
            stem = name.partition(".so.")[0]
            if stem == name or stem not in stems or path in ours or path in links:
                continue
            looked += 1
            if looked <= LOOKED_MAX and not has_content(opened, name):
                continue
            plan.covers.add(stems[stem])
            found.append(f"{path} of the image is another driver's; {stems[stem]} leads past it to the host's")
    except OSError:
        pass
    finally:
        opened.close()
    plan.warnings += few(found, f"files of another driver's in {folder} of the image")


def has_content(folder: root.Folder, name: str) -> bool:
    """Whether a name leads to a file with anything in it. An empty one, as earlier starts leave them in images that
    were committed, ldconfig passes over."""
    try:
        status = folder.stat(name)
    except OSError:
        return False
    return root.file_type(status.st_mode) == root.S_IFREG and status.st_size > 0


def rival_folders(plan: Plan, base: int, facts: Loader) -> list[str]:
    """Folders of ld.so.conf beside ours that hold a soname of ours: a later ldconfig would list them first."""
    ours = {root.split(entry["path"])[0] for entry in plan.cache_entries}
    sonames = {entry["soname"] for entry in plan.cache_entries}
    places = {place(base, folder) for folder in ours}
    if plan.compat_folder:
        places.add(place(base, plan.compat_folder))
    found = []
    warnings = []
    for folder in facts.conf.folders:
        if folder not in facts.places or facts.places[folder] in places:
            continue
        names = present(base, folder, sonames, facts.conf.links)
        for name in names:
            warnings.append(f"{folder}/{name} of the image is another driver's; the loader finds the host's")
        if names:
            found.append(folder)
    plan.warnings += few(warnings, f"files of another driver's in folders of {imageconf.PATH}")
    return found


def present(base: int, folder: str, sonames: set[str], links: root.Budget) -> list[str]:
    """Those of the sonames that the folder has a file for, by name."""
    try:
        opened = root.Folder(base, folder, links)
    except OSError:
        return []
    try:
        return sorted([soname for soname in sonames if has_content(opened, soname)])
    finally:
        opened.close()


def forward(plan: Plan, base: int, driver: str, cuda: str = "", place: str = "") -> None:
    """Decide on forward compatibility with the image's libcuda, by `compat.decide`; before `complete`."""
    decision = compat.decide(base, driver, cuda, place or compat.FOLDER)
    plan.compat_folder, plan.compat_reason = decision.folder, decision.reason
    plan.warnings += decision.warnings

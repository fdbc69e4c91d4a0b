# SPDX-License-Identifier: Apache-2.0
"""CUDA's forward compatibility: whether an image's newer libcuda is to be used on the host's older driver.

Hot. Images bring it in /usr/local/cuda/compat. It is never mounted and nothing of it is: that folder goes first
in the loader's cache, or it does not. What decides is the note that NVIDIA puts into the library (section
`.note.cuda.fwd_compatibility`: JSON that lists the driver branches it works on, as nvidia-cdi-hook 1.20 reads
it), and version numbers compared as numbers. Libraries from before the note: the greater branch decides.
"""

from __future__ import annotations

import posix

from cdi import jsontext
from ldcache import elf, root

FOLDER = "/usr/local/cuda/compat"
STEM = "libcuda.so."
SECTION = b".note.cuda.fwd_compatibility"
OWNER = b"NVIDIA Corporation"
NOTE_MAX = 1 << 16
NAMES_MAX = 4096
PARTS_MAX = 4


class Compat:
    """The decision. `folder` is the container's, free of links, where it is `used`; `reason` says why or why not, ""
    where the image has no such libraries; `version` is theirs."""

    __slots__ = ("folder", "reason", "used", "version", "warnings")

    def __init__(self) -> None:
        self.folder = ""
        self.reason = ""
        self.used = False
        self.version = ""
        self.warnings: list[str] = []


def decide(base: int, driver: str) -> Compat:
    """Look into the image whose root `base` is open on, for a host driver of that version. Never raises."""
    made = Compat()
    try:
        names = sorted(root.names(base, FOLDER, NAMES_MAX))
    except OSError:
        return made
    found = []
    for name in names:
        text = name[len(STEM) :]
        if not name.startswith(STEM) or text.isdigit() or not is_plain(base, f"{FOLDER}/{name}"):
            continue
        if version(text) is None:
            made.warnings.append(f"{FOLDER}/{name} of the image is ignored: its name ends in no version")
        else:
            found.append(text)
    if len(found) > 1:
        made.reason = f"{FOLDER} holds several versions: {', '.join(found)}"
        made.warnings.append(f"forward compatibility is off: {made.reason}")
    elif found:
        made.version = found[0]
        made.used, made.reason = judge(base, f"{FOLDER}/{STEM}{found[0]}", found[0], driver, made.warnings)
        if made.used:
            locate(base, made)
    return made


def locate(base: int, made: Compat) -> None:
    """The folder without the links of its path, inside the root: what the loader is told must last."""
    try:
        made.folder = root.real_path(base, FOLDER)
    except OSError as error:
        made.used, made.reason = False, f"{FOLDER} cannot be followed: {error.strerror}"


def is_plain(base: int, path: str) -> bool:
    """Whether it is a file itself: links are other names of one that is."""
    try:
        return root.file_type(root.stat(base, path, follow=False).st_mode) == root.S_IFREG
    except OSError:
        return False


def version(text: str) -> tuple[int, ...] | None:
    """A driver version as numbers, leading zeros being nothing (570.04); None for anything else."""
    parts = text.split(".")
    if not 1 < len(parts) <= PARTS_MAX or not all(
        part.isascii() and part.isdigit() and len(part) < 6 for part in parts
    ):
        return None
    return tuple([int(part) for part in parts])


def judge(base: int, path: str, name: str, driver: str, warnings: list[str]) -> tuple[bool, str]:
    """Whether to use the libcuda at `path`, of version `name`, and why."""
    theirs, ours = version(name), version(driver)
    if theirs is None or ours is None:
        return False, f"the host's driver version {driver} cannot be compared"
    try:
        branches = read_branches(base, path)
    except (OSError, ValueError) as error:
        warnings.append(f"{path} of the image: its note on forward compatibility cannot be read: {error}")
        branches = None
    if theirs <= ours:
        return False, f"the image's {name} is not newer than the host's driver {driver}"
    if branches is None:
        if theirs[0] > ours[0]:
            return True, f"the image's {name} is of a newer branch than the host's driver {driver}, and has no note"
        return False, f"the image's {name} is of the host driver's own branch {ours[0]}, and has no note"
    if ours[0] in branches:
        return True, f"the image's {name} names the host driver's branch {ours[0]} among those it works on"
    listed = ", ".join(map(str, branches)) or "none"
    return False, f"the image's {name} works on the branches {listed}, not on the host driver's {ours[0]}"


def read_branches(base: int, path: str) -> list[int] | None:
    """The driver branches of the library's note; None where it has none. Raises OSError, ValueError."""
    fd = root.open_file(base, path, stored=True)
    try:
        found = elf.note(fd, SECTION, NOTE_MAX)
    finally:
        posix.close(fd)
    if found is None:
        return None
    owner, text = found
    if owner != OWNER:
        raise ValueError(f"it is {owner[:80]!r}'s")
    value = jsontext.loads(text.rstrip(b"\0"))
    branches = value.get("driver") if isinstance(value, dict) else None
    if not isinstance(branches, list) or not all(type(branch) is int for branch in branches):
        raise ValueError("it lists no driver branches")
    return branches

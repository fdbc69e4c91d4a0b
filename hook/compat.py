# SPDX-License-Identifier: Apache-2.0
"""CUDA's forward compatibility: whether an image's newer libcuda is to be used on the host's older driver.

Hot. Images bring it in /usr/local/cuda/compat. It is never mounted and nothing of it is: that folder goes first
in the loader's cache, or it does not. What decides is the note that NVIDIA puts into the library (section
`.note.cuda.fwd_compatibility`: JSON that lists the driver branches it works on, as nvidia-cdi-hook 1.20 reads
it), and version numbers compared as numbers. Libraries from before the note: the greater branch decides. Tegra's driver
has no such number; there the CUDA version of the note is compared with the host's, as nvidia-cdi-hook does.
"""

from __future__ import annotations

import posix

from cdi import jsontext
from hook.plan import few
from ldcache import elf, root

FOLDER = "/usr/local/cuda/compat"
STEM = "libcuda.so."
SECTION = b".note.cuda.fwd_compatibility"
OWNER = b"NVIDIA Corporation"
NOTE_MAX = 1 << 16
NAMES_MAX = 4096
PARTS_MAX = 4

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


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


def decide(base: int, driver: str, cuda: str = "", place: str = FOLDER) -> Compat:
    """Look into the folder `place` of the image whose root `base` is open on, for a host driver of that version, or, ""
    being its version, of that CUDA version. Never raises."""
    made = Compat()
    found, others = [], []
    for text in versions(base, place):
        if version(text) is None:
            others.append(f"{place}/{STEM}{text} of the image is ignored: its name ends in no version")
        else:
            found.append(text)
    made.warnings += few(others, f"such files in {place}")
    if len(found) > 1:
        made.reason = f"{place} holds several versions: {', '.join(few(found, 'versions'))}"
        made.warnings.append(f"forward compatibility is off: {made.reason}")
    elif found:
        made.version = found[0]
        path = f"{place}/{STEM}{found[0]}"
        if driver:
            made.used, made.reason = judge(base, path, found[0], driver, made.warnings)
        else:
            made.used, made.reason = judge_by_cuda(base, path, cuda, made.warnings)
        if made.used:
            locate(base, made, place)
    return made


def locate(base: int, made: Compat, place: str) -> None:
    """The folder without the links of its path, inside the root: what the loader is told must last."""
    try:
        made.folder = root.real_path(base, place)
    except OSError as error:
        made.used, made.reason = False, f"{place} cannot be followed: {error.strerror}"


def versions(base: int, place: str) -> list[str]:
    """What the names of the folder's files say behind `libcuda.so.`; links are other names of a file that is there."""
    try:
        folder = root.Folder(base, place)
    except OSError:
        return []
    try:
        names = [name for name in sorted(folder.names(NAMES_MAX)) if name.startswith(STEM)]
        texts = [name[len(STEM) :] for name in names if is_plain(folder, name)]
    except OSError:
        return []
    finally:
        folder.close()
    return [text for text in texts if not text.isdigit()]


def is_plain(folder: root.Folder, name: str) -> bool:
    """Whether it is a file itself."""
    try:
        return root.file_type(folder.stat(name, follow=False).st_mode) == root.S_IFREG
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
    branches = read(base, path, branches_of, warnings)
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


def judge_by_cuda(base: int, path: str, cuda: str, warnings: list[str]) -> tuple[bool, str]:
    """Likewise, for a host of that CUDA version. A library without a note tells none."""
    told = read(base, path, cuda_of, warnings)
    theirs, ours = version(told or ""), version(cuda)
    if theirs is None or ours is None:
        return False, f"the CUDA version of the image's {path} cannot be compared with the host's, {cuda!a}"
    how = "newer" if theirs > ours else "not newer"
    return theirs > ours, f"the image's {path} is of CUDA {told}, {how} than the host's {cuda}"


def read(base: int, path: str, part: Callable[[Any], Any], warnings: list[str]) -> Any:
    """A part of the library's note; None, and a warning, where it can't be read."""
    try:
        value = read_note(base, path)
        return None if value is None else part(value)
    except (OSError, ValueError) as error:
        warnings.append(f"{path} of the image: its note on forward compatibility cannot be read: {error}")
        return None


def read_note(base: int, path: str) -> Any:
    """The value of the library's note; None where it has none. Raises OSError, ValueError."""
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
    return jsontext.loads(text.rstrip(b"\0"))


def branches_of(value: Any) -> list[int]:
    """The driver branches of a note. Raises ValueError."""
    branches = value.get("driver") if isinstance(value, dict) else None
    if not isinstance(branches, list) or not all(type(branch) is int for branch in branches):
        raise ValueError("it lists no driver branches")
    return branches


def cuda_of(value: Any) -> str:
    """The CUDA version of a note; nvidia-cdi-hook takes its name in any letter case. Raises ValueError."""
    members = value.items() if isinstance(value, dict) else ()
    cuda = next((text for name, text in members if name.lower() == "cuda version"), None)
    if not isinstance(cuda, str):
        raise ValueError("it names no CUDA version")
    return cuda

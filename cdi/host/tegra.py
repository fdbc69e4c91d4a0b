# SPDX-License-Identifier: Apache-2.0
"""Tegra (Jetson): no module tells what containers need, so lists on the host do, one `kind, path` a line.

Kinds as in NVIDIA's files: `dev` a device node, `dir` a folder, `lib` a library, `sym` a link, which the container gets
as a link together with what it leads to. Paths may have `*`, `?` and `[…]`, none of which matches a slash.
"""

from __future__ import annotations

import fnmatch
import re
import stat
from collections.abc import Iterator

from cdi.host import fingerprint, platform
from cdi.host.platform import Parts
from cdi.host.wsl import soname_of
from ldcache import root
from ldcache.errors import NvhookError

FOLDER = "/etc/nvidia-container-runtime/host-files-for-container.d"
FILES = tuple(f"{FOLDER}/{name}.csv" for name in ("devices", "drivers", "l4t"))
KINDS = ("dev", "dir", "lib", "sym")
FILE_MAX = 1 << 20
MATCHES_MAX = 10_000
# A list serves many releases and boards: that a part of it is not there is the rule, and worth one line.
SHOWN = 3

# L4T's releases and the CUDA version of their libcuda, by JetPack's release notes; the first that fits counts.
RELEASE = re.compile(r"# R(\d{1,4}) \(release\), REVISION: (\d{1,4})")
CUDA = (((38, 0), "13.0"), ((36, 4), "12.6"), ((36, 0), "12.2"), ((34, 0), "11.4"), ((32, 0), "10.2"))
# The machine's own name of its system-on-chip, strings that end in a zero byte; Orin is Tegra 234.
COMPATIBLE = "/proc/device-tree/compatible"
ORIN = "nvidia,tegra234"
# Where images have a libcuda for Orin, beside that for servers of the same architecture.
ORIN_FOLDER = "/usr/local/cuda/compat_orin"


def read(root_fd: int, files: tuple[str, ...] = (), ignored: tuple[str, ...] = ()) -> Parts:
    """What the lists bring. `files` instead of the usual ones; `ignored` are patterns of links to leave out.

    Raises NvhookError where there is no list, or no node.
    """
    parts = Parts()
    entries = list(_entries(root_fd, files or FILES, bool(files), parts))
    if not entries:
        what = f"nothing is listed in {', '.join(files or FILES)}"
        raise NvhookError(what, "install nvidia-l4t-init, or give --csv.file")
    missing: list[str] = []
    for kind, pattern in entries:
        if kind == "sym" and any(_is_ignored(pattern, one) for one in ignored):
            continue
        paths = list(_matches(root_fd, pattern))
        taken = [path for path in paths if _take(root_fd, kind, path, parts)]
        if not taken:
            missing.append(f"{kind} {pattern}")
    if not parts.nodes:
        raise NvhookError(f"no device that is listed is there: {', '.join(missing[:SHOWN])}", "see `ls -l /dev/nv*`")
    if missing:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        parts.warnings.append(f"listed and not there: {', '.join(missing[:SHOWN])}{more}")
    if platform.is_file(root_fd, platform.TEGRA_RELEASE):
        parts.mounts.append((platform.TEGRA_RELEASE, platform.TEGRA_RELEASE))
    parts.cuda = cuda(fingerprint.text(root_fd, platform.TEGRA_RELEASE))
    if ORIN in fingerprint.text(root_fd, COMPATIBLE).split("\0"):
        parts.compat_folder = ORIN_FOLDER
    _settle(parts)
    return parts


def cuda(release: str) -> str:
    """The CUDA version of the driver of an L4T release, by the text of nv_tegra_release; "" for an unknown one."""
    found = RELEASE.match(release)
    numbers = (int(found[1]), int(found[2])) if found else (0, 0)
    if numbers[0] > CUDA[0][0][0]:
        return ""
    return next((version for first, version in CUDA if numbers >= first), "")


def _entries(root_fd: int, files: tuple[str, ...], needed: bool, parts: Parts) -> Iterator[tuple[str, str]]:
    """Kind and path of each line; what is none is a warning."""
    for path in files:
        try:
            text = root.read_file(root_fd, path, FILE_MAX).decode("utf-8", "replace")
        except FileNotFoundError:
            if needed:
                raise NvhookError(f"{path} is missing", "give existing files as --csv.file") from None
            continue
        except OSError as error:
            raise NvhookError(f"cannot read {path}: {error.strerror}", "repair the file, or remove it") from error
        for number, line in enumerate(text.splitlines(), 1):
            kind, comma, place = (part.strip() for part in line.partition(","))
            if kind in KINDS and comma and place.startswith("/") and place.isprintable():
                yield kind, place
            elif line.strip() and not line.lstrip().startswith("#"):
                parts.warnings.append(f"{path} line {number} is no `kind, path`: {line[:80]!a}")


def _is_ignored(path: str, pattern: str) -> bool:
    """`**/NAME` is that name in any folder."""
    if pattern.startswith("**/"):
        return fnmatch.fnmatchcase(path.rpartition("/")[2], pattern[3:])
    return fnmatch.fnmatchcase(path, pattern)


def _matches(root_fd: int, pattern: str) -> Iterator[str]:
    """The paths that a pattern means, in order; without one, the path itself."""
    paths = [""]
    for part in pattern.strip("/").split("/"):
        if not any(sign in part for sign in "*?["):
            paths = [f"{path}/{part}" for path in paths]
            continue
        found = []
        for path in paths:
            try:
                names = root.listdir(root_fd, path or "/")
            except OSError:
                continue
            # As a shell: a name with a dot in front is not meant by `*`.
            hidden = part.startswith(".")
            found += [
                f"{path}/{name}"
                for name in sorted(names)
                if name.isprintable() and (hidden or not name.startswith(".")) and fnmatch.fnmatchcase(name, part)
            ]
        paths = found[:MATCHES_MAX]
    yield from paths


def _take(root_fd: int, kind: str, path: str, parts: Parts) -> bool:
    """Add a path; False if it is not what its kind says."""
    if kind == "dev":
        node = platform.node(root_fd, path)
        parts.nodes += [node] if node else []
        return node is not None
    try:
        mode = root.stat(root_fd, path).st_mode
        links, end = platform.chain(root_fd, path)
        real = root.real_path(root_fd, end)
    except OSError:
        return False
    if kind == "dir":
        parts.mounts += [(real, path)] if stat.S_ISDIR(mode) else []
        return stat.S_ISDIR(mode)
    if not real.isprintable() or not all(target.isprintable() for target, _ in links):
        return False
    if not (stat.S_ISREG(mode) or (kind == "sym" and stat.S_ISDIR(mode))):
        return False
    parts.links += links
    parts.mounts.append((real, end))
    if ".so" in end.rpartition("/")[2]:
        _library(root_fd, end, parts)
    return True


def _library(root_fd: int, path: str, parts: Parts) -> None:
    """Its folder for the loader, a link by its SONAME, and its development name where the host has that."""
    folder, _, name = path.rpartition("/")
    parts.folders.append(folder)
    soname = soname_of(root_fd, path)
    if soname and "/" not in soname and soname != name:
        parts.links.append((name, f"{folder}/{soname}"))
    bare = name.partition(".so")[0] + ".so"
    try:
        target = root.readlink(root_fd, f"{folder}/{bare}")
    except OSError:
        return
    if platform.joined(folder, target) in (path, f"{folder}/{soname}"):
        parts.links.append((target, f"{folder}/{bare}"))


def _settle(parts: Parts) -> None:
    """Each thing once; a place that is mounted on is no link."""
    parts.nodes = list({node["path"]: node for node in parts.nodes}.values())
    parts.mounts = [(host, place) for place, host in {place: host for host, place in reversed(parts.mounts)}.items()]
    mounted = {place for _, place in parts.mounts}
    places: dict[str, str] = {}
    for target, place in parts.links:
        if place not in mounted:
            places.setdefault(place, target)
    parts.links = [(target, place) for place, target in places.items()]
    parts.folders = list(dict.fromkeys(parts.folders))

# SPDX-License-Identifier: Apache-2.0
"""`/etc/ld.so.conf` of a root: the folders that its ldconfig reads besides the default ones.

Hot. ldconfig's rules (glibc `elf/ldconfig.c`, parse_conf): `#` to the end of the line, `include` and patterns
globbed in C order without hidden files, included text standing where the include stands. Everything is
opened inside the root and counted, since whoever built the image wrote it.
"""

from __future__ import annotations

from ldcache import root

PATH = "/etc/ld.so.conf"

# Of all files together, as are the other bounds: a hundred includes of one folder may not cost a hundred times as much.
TEXT_MAX = 1 << 18
FILES_MAX = 256
FOLDERS_MAX = 256
DEPTH_MAX = 8
NAMES_MAX = 4096
# What a pattern and a name may have at most, and what matching them costs: a step for each, and one for every so many
# pairs of their characters.
PART_MAX = 255
PAIRS = 64
STEPS_MAX = 1 << 16


class Conf:
    """`folders` as they are spelled, each once, in order, without those of the file `ours`. `before` counts those that
    come ahead of that file, which need not be there; -1 where no include would read it. `steps` and `text` are what may
    still be spent on patterns and on reading."""

    __slots__ = ("before", "files", "folders", "known", "ours", "steps", "text")

    def __init__(self, ours: str = "") -> None:
        self.folders: list[str] = []
        self.known: set[str] = set()
        self.steps = STEPS_MAX
        self.text = TEXT_MAX
        self.files = 0
        self.ours = ours
        self.before = -1


def read(base: int, ours: str = "") -> Conf:
    """The configuration of the root that `base` is open on; for `ours`, see Conf.

    Never raises for what the image holds: what can't be read says nothing, and past a bound reading stops.
    """
    conf = Conf(ours)
    _parse(base, conf, PATH, _text(base, conf, PATH), 0)
    return conf


def _text(base: int, conf: Conf, path: str) -> str:
    try:
        fd = root.open_file(base, path, stored=True)
        text = root.read_open(fd, conf.text, path)
    except OSError:
        return ""
    conf.text -= len(text)
    return text.decode("utf-8", "surrogateescape")


def _parse(base: int, conf: Conf, path: str, text: str, depth: int) -> None:
    for whole in text.split("\n"):
        line = whole.partition("#")[0].strip(" \t\r\f\v")
        words = line.split()
        if not words or words[0] == "hwcap":
            continue
        if words[0] == "include":
            for pattern in words[1:]:
                _include(base, conf, path, pattern, depth + 1)
        elif line.startswith("/") and len(conf.folders) < FOLDERS_MAX and "\0" not in line:
            # `=libc6` behind a folder: up to glibc 2.36.
            folder = line.partition("=")[0].rstrip(" \t/") or "/"
            if folder not in conf.known:
                conf.known.add(folder)
                conf.folders.append(folder)


def _include(base: int, conf: Conf, path: str, pattern: str, depth: int) -> None:
    conf.steps -= 1
    if "\0" in pattern or depth > DEPTH_MAX or conf.steps < 0:
        return
    if not pattern.startswith("/"):
        pattern = f"{root.split(path)[0]}/{pattern}"
    ours = conf.before < 0 and matches_path(pattern, conf.ours)
    for name in expand(base, conf, pattern):
        if ours and conf.before < 0 and name >= conf.ours:
            conf.before = len(conf.folders)
        if name != conf.ours and conf.files < FILES_MAX:
            conf.files += 1
            _parse(base, conf, name, _text(base, conf, name), depth)
    if ours and conf.before < 0:
        conf.before = len(conf.folders)


def expand(base: int, conf: Conf, pattern: str) -> list[str]:
    """The paths in the root that a pattern names, in C order; at most FILES_MAX, and what `conf` has steps for."""
    found = [""]
    for part in [part for part in pattern.split("/") if part]:
        if len(part) > PART_MAX:
            return []
        if not set("*?[") & set(part):
            found = [f"{folder}/{part}" for folder in found]
            continue
        wider: list[str] = []
        for folder in found:
            wider += [f"{folder}/{name}" for name in _matching(base, conf, folder, part)]
        found = wider[:FILES_MAX]
    return [path for path in found if len(path) < root.PATH_MAX and path]


def _matching(base: int, conf: Conf, folder: str, part: str) -> list[str]:
    """The names in a folder that one part of a pattern matches, sorted."""
    conf.steps -= 1
    if conf.steps < 0:
        return []
    try:
        names = sorted(root.names(base, folder or "/", NAMES_MAX))
    except OSError:
        return []
    hidden = part.startswith(".")
    found = []
    for name in names:
        conf.steps -= 1 + len(part) * len(name) // PAIRS
        if conf.steps < 0:
            break
        if (hidden or not name.startswith(".")) and matches(part, name):
            found.append(name)
    return found


def matches_path(pattern: str, path: str) -> bool:
    """Whether a pattern names a path, part by part."""
    parts = [part for part in pattern.split("/") if part]
    names = [name for name in path.split("/") if name]
    return len(parts) == len(names) and all(matches(part, name) for part, name in zip(parts, names, strict=True))


def matches(pattern: str, name: str) -> bool:
    """glob(3) of one path component. Takes at most pattern times name steps: one star is retried at a time."""
    at = place = 0
    star = mark = -1
    while place < len(name):
        if pattern[at : at + 1] == "*":
            star, mark = at, place
            at += 1
            continue
        end = _one(pattern, at, name[place]) if at < len(pattern) else 0
        if end:
            at, place = end, place + 1
        elif star >= 0:
            mark += 1
            at, place = star + 1, mark
        else:
            return False
    return not pattern[at:].strip("*")


def _one(pattern: str, at: int, character: str) -> int:
    """Where the pattern goes on if the item at `at` matches this character, else 0."""
    item = pattern[at]
    if item == "?":
        return at + 1
    if item == "\\" and at + 1 < len(pattern):
        return at + 2 if pattern[at + 1] == character else 0
    end = pattern.find("]", at + 2 + pattern.startswith("[!", at) + pattern.startswith("[^", at))
    if item != "[" or end < 0:
        return at + 1 if item == character else 0
    inside = pattern[at + 1 : end]
    negated = inside[0] in "!^"
    return end + 1 if _in_set(inside[negated:], character) != negated else 0


def _in_set(inside: str, character: str) -> bool:
    at = 0
    while at < len(inside):
        if inside[at + 1 : at + 2] == "-" and at + 2 < len(inside):
            if inside[at] <= character <= inside[at + 2]:
                return True
            at += 3
        elif inside[at] == character:
            return True
        else:
            at += 1
    return False

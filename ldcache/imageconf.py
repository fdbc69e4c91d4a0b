# SPDX-License-Identifier: Apache-2.0
"""`/etc/ld.so.conf` of a root: the folders that its ldconfig reads besides the default ones.

Hot. ldconfig's rules (glibc `elf/ldconfig.c`, parse_conf): `#` to the end of the line, `include` and patterns
globbed in C order without hidden files, included text standing where the include stands. Everything is
opened inside the root and counted, since whoever built the image wrote it.
"""

from __future__ import annotations

from ldcache import kernel, names, root

PATH = "/etc/ld.so.conf"

# Of all files together, as are the other bounds: a hundred includes of one folder may not cost a hundred times as much.
TEXT_MAX = 1 << 18
FILES_MAX = 256
FOLDERS_MAX = 256
DEPTH_MAX = 8
NAMES_MAX = 4096
# What one component may have.
PART_MAX = 255
# Of all patterns, a listing's characters times the pattern's at the most: a second.
STEPS_MAX = 10_000_000
_LISTING = 10_000


class Conf:
    """`folders` as they are spelled, each once, in order, without those of the file `ours`. `before` counts those that
    come ahead of that file, which need not be there; -1 where no include would read it. `steps`, `text` and `links` are
    what may still be spent on patterns, on reading and on links, also those of the folders."""

    __slots__ = ("before", "files", "folders", "known", "links", "ours", "steps", "text")

    def __init__(self, ours: str = "") -> None:
        self.folders: list[str] = []
        self.known: set[str] = set()
        self.links = root.Budget()
        self.text = TEXT_MAX
        self.steps = STEPS_MAX
        self.files = 0
        self.ours = ours
        self.before = -1


def read(base: int, ours: str = "") -> Conf:
    """The configuration of the root that `base` is open on; for `ours`, see Conf.

    Never raises for what the image holds: what can't be read says nothing, and past a bound reading stops.
    """
    conf = Conf(ours)
    _parse(base, conf, PATH, 0)
    return conf


def _text(base: int, conf: Conf, path: str) -> str:
    try:
        fd = root.open_file(base, path, stored=True, budget=conf.links)
        content = root.read_open(fd, conf.text, path)
    except OSError:
        return ""
    conf.text -= len(content)
    return content.decode("utf-8", "surrogateescape")


def _parse(base: int, conf: Conf, path: str, depth: int) -> None:
    for whole in _text(base, conf, path).split("\n"):
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
            _parse(base, conf, name, depth)
    if ours and conf.before < 0:
        conf.before = len(conf.folders)


def expand(base: int, conf: Conf, pattern: str) -> list[str]:
    """The paths in the root that a pattern names, in C order; at most FILES_MAX, and none once `conf.steps` are used
    up."""
    found = [""]
    for part in [part for part in pattern.split("/") if part]:
        if len(part) > PART_MAX:
            return []
        if not names.is_pattern(kernel.encode(part)):
            found = [f"{folder}/{part}" for folder in found]
            continue
        wanted = names.Pattern(kernel.encode(part))
        wider: list[str] = []
        for folder in found:
            if conf.steps <= 0:
                return []
            conf.steps -= _LISTING
            try:
                listed = [kernel.encode(name) for name in root.names(base, folder or "/", NAMES_MAX, conf.links)]
            except OSError:
                continue
            conf.steps -= sum(map(len, listed)) * len(wanted.tokens)
            if conf.steps <= 0:
                return []
            wider += [f"{folder}/{name.decode('utf-8', 'surrogateescape')}" for name in wanted.among(listed)]
        found = wider[:FILES_MAX]
    return [path for path in found if len(path) < root.PATH_MAX and path]


def matches_path(pattern: str, path: str) -> bool:
    """Whether a pattern names a path, part by part."""
    parts = [part for part in kernel.encode(pattern).split(b"/") if part]
    wanted = [name for name in kernel.encode(path).split(b"/") if name]
    return len(parts) == len(wanted) and all(
        names.Pattern(part).matches(name) for part, name in zip(parts, wanted, strict=True)
    )

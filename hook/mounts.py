# SPDX-License-Identifier: Apache-2.0
"""The mount table of the namespace that a container was given: which of its mounts are the host's too.

Hot. Before the runtime changes the root directory, a container's mount namespace is a copy of the host's tree
with the container's own mounts below its root folder. So one reading of /proc/self/mountinfo (proc(5)) tells
both: a file system that is also mounted outside of that folder is somebody else's, and a mount that shares a
peer group with one outside hands everything that is mounted on it on to the host.
"""

from __future__ import annotations

import posix

from ldcache import root

TABLE = "/proc/self/mountinfo"
TABLE_MAX = 64 << 20
# A chain of processes above a hook is a handful.
ANCESTORS_MAX = 64


class MountTable:
    """Lines of mountinfo; `top` is the container's root folder, free of links."""

    __slots__ = ("_text", "_top")

    def __init__(self, text: str, top: str) -> None:
        self._text = "\n" + text
        self._top = escape(top.rstrip("/"))

    def is_foreign(self, device: int) -> bool:
        """Whether the file system of this st_dev is mounted outside of the container's root, too."""
        number = f"{posix.major(device)}:{posix.minor(device)}"
        return any(words[2] == number and self._outside(words[4]) for words in self._lines_with(f" {number} "))

    def leaks(self, mount_id: int) -> bool:
        """Whether what is mounted on this mount appears outside of the container's root, too."""
        for words in self._lines_with(f"\n{mount_id} "):
            for group in (word for word in words[6 : words.index("-")] if word.startswith("shared:")):
                if any(group in other[6:] and self._outside(other[4]) for other in self._lines_with(f" {group} ")):
                    return True
        return False

    def inside(self) -> list[str]:
        """The places below the container's root where something is mounted, as the container names them."""
        places = [line.split(" ")[4] for line in self._text.split("\n") if line.count(" ") > 4]
        return [unescape(place[len(self._top) :]) for place in places if place.startswith(self._top + "/")]

    def is_shared(self, mount_id: int) -> bool:
        """Whether what is mounted on this mount is handed on to anyone, other namespaces included."""
        found = self._lines_with(f"\n{mount_id} ")
        return any(word.startswith("shared:") for words in found for word in words[6 : words.index("-")])

    def _outside(self, place: str) -> bool:
        return place != self._top and not place.startswith(self._top + "/")

    def _lines_with(self, part: str) -> list[list[str]]:
        # A node with a thousand containers has tens of thousands of lines: only those that matter are split.
        found = []
        at = self._text.find(part)
        while at >= 0:
            start = self._text.rfind("\n", 0, at + 1) + 1
            end = self._text.find("\n", at + 1)
            end = len(self._text) if end < 0 else end
            found.append(self._text[start:end].split(" "))
            at = self._text.find(part, end)
        return found


def read(top: str) -> MountTable:
    """The table of the namespace that we are in."""
    fd = posix.open(TABLE, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        text = root.read(fd, TABLE_MAX, TABLE)
    finally:
        posix.close(fd)
    return MountTable(text.decode("utf-8", "surrogateescape"), top)


def escape(path: str) -> str:
    """A path as mountinfo writes it: blank, tab, newline and backslash in octal."""
    for character in "\\ \t\n":
        path = path.replace(character, f"\\{ord(character):03o}")
    return path


def unescape(text: str) -> str:
    """The path that `escape` made that text of."""
    for character in "\n\t \\":
        text = text.replace(f"\\{ord(character):03o}", character)
    return text


def is_separate() -> bool:
    """Whether our mount namespace is not that of the machine whose /proc this is, where no config.json says so.

    Proof is a process above us that is in another one, as the runtime is above a container's first process. From a
    user namespace none of those may be looked at; what is mounted in such a one is never the host's
    (user_namespaces(7)).
    """
    own, above = posix.readlink("/proc/self/ns/mnt"), "self"
    for _ in range(ANCESTORS_MAX):
        try:
            above = parent_of(above)
            if posix.readlink(f"/proc/{above}/ns/mnt") != own:
                return True
        except PermissionError:
            continue
        except OSError:
            break
    return text_of("/proc/self/uid_map") != text_of("/proc/1/uid_map")


def parent_of(pid: str) -> str:
    """The number of a process's parent (proc_pid_stat(5)); the name before it may hold blanks and brackets."""
    return text_of(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1].decode()


def text_of(path: str) -> bytes:
    """A small file of /proc."""
    fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        return root.read(fd, 1 << 16, path)
    finally:
        posix.close(fd)

# SPDX-License-Identifier: Apache-2.0
"""A spec file's bytes, and its value where it is JSON that YAML reads the same way.

Hot. Whoever can write into a spec folder may put anything there, so a file is bounded before it is read.
The library parses every file as YAML. JSON is YAML almost: not with a surrogate pair, a DEL, a duplicate key or a
long one, so JSON without any of these is read here, and all else by `cdi.reader`, which is cold.
"""

from __future__ import annotations

import errno
import posix

from cdi import jsontext
from ldcache import kernel, root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Engines know no bounds; 112 MIG instances by two names are 170 KB.
SIZE_MAX = 4 << 20
VALUES_MAX = 100_000

# A key of YAML's flow style ends within so many characters.
KEY_MAX = 1000


class NotPlain(ValueError):
    """Not JSON of the plain sort; another reader has to say what it is."""


def read_file(path: str) -> bytes:
    """The content of a regular file, links on the way followed as the library does.

    Raises OSError: EINVAL for what is no regular file (a FIFO would block), EFBIG for one of more than
    SIZE_MAX bytes, ESTALE for one that was written to while it was read.
    """
    fd = posix.open(path, posix.O_RDONLY | posix.O_NONBLOCK | posix.O_NOCTTY | posix.O_CLOEXEC)
    try:
        before = posix.fstat(fd)
        if root.file_type(before.st_mode) != root.S_IFREG:
            raise kernel.error("not a regular file", errno.EINVAL, path)
        if before.st_size > SIZE_MAX:
            raise kernel.error("read", errno.EFBIG, path)
        data = root.read(fd, SIZE_MAX, path)
        after = posix.fstat(fd)
        # A rename over the name leaves this descriptor on the old file, which is whole.
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or len(data) != after.st_size:
            raise kernel.error("written to while it was read", errno.ESTALE, path)
        return data
    finally:
        posix.close(fd)


def plain_json(data: bytes) -> Any:
    """The value of a JSON object. Raises NotPlain where YAML might read something else in it."""
    if not data.startswith(b"{") or not data.isascii() or b"\\" in data or b"\x7f" in data:
        raise NotPlain("not plain JSON")
    # At least as many as there are values, keys included, for these may stand in strings too.
    if sum(map(data.count, (b",", b":", b"{", b"["))) > VALUES_MAX:
        raise NotPlain("too large for plain JSON")
    try:
        return jsontext.loads(data, _members)
    except ValueError as error:
        raise NotPlain(str(error)) from None


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise NotPlain("a key stands twice")
    if any(len(key) > KEY_MAX for key in members):
        raise NotPlain("a key is long")
    return members

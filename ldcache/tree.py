# SPDX-License-Identifier: Apache-2.0
"""The files that ldconfig looks at, by names inside a root, as bytes.

A thin layer over `ldcache.root`: every name is looked up as if the root were `/`, nothing is joined to the root's own
path and opened.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from ldcache import root
from ldcache.errors import NvhookError


class Tree:
    """A root that is open. Relative names count from its `/`, or, where it is the machine's own, from where we are."""

    __slots__ = ("_base", "fd", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.fd = root.open_root(path)
        except OSError as error:
            what = f"cannot open the root {path}: {error.strerror}"
            raise NvhookError(what, "name an existing folder with -r") from error
        self._base = os.fsencode(os.getcwd()) + b"/" if os.path.samefile(path, "/") else b""

    def close(self) -> None:
        """Close the root's descriptor."""
        os.close(self.fd)

    def _inside(self, name: bytes) -> str:
        return os.fsdecode(name if name.startswith(b"/") else self._base + name)

    def open_path(self, name: bytes, *, follow: bool = True) -> int:
        """An O_PATH descriptor of what the name leads to. Raises OSError."""
        return root.open_path(self.fd, self._inside(name), follow)

    def status(self, name: bytes, *, follow: bool = True) -> os.stat_result:
        """stat of what the name leads to, or of a final link itself. Raises OSError."""
        fd = self.open_path(name, follow=follow)
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def open_file(self, name: bytes) -> int:
        """A readable descriptor of a regular file; nothing else is ever opened for reading. Raises OSError."""
        return root.open_file(self.fd, self._inside(name))

    def open_folder(self, name: bytes) -> int:
        """A descriptor of a folder, readable. Raises OSError."""
        fd = self.open_path(name)
        try:
            if not stat.S_ISDIR(os.fstat(fd).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fsdecode(name))
            return root.reopen(fd, os.O_RDONLY | os.O_DIRECTORY)
        finally:
            os.close(fd)

    def read_file(self, name: bytes, limit: int) -> bytes:
        """A regular file's content. Raises OSError, EFBIG beyond the limit."""
        return root.read_file(self.fd, self._inside(name), limit)

    @contextmanager
    def folder_of(self, name: bytes) -> Iterator[tuple[int, bytes]]:
        """The folder that holds this name, as an O_PATH descriptor, and the name's last component. Raises OSError."""
        folder, slash, base = name.rpartition(b"/")
        fd = self.open_path(folder or (b"/" if slash else b"."))
        try:
            yield fd, base
        finally:
            os.close(fd)

    def replace_file(self, name: bytes, data: bytes) -> None:
        """Put a file with this content and mode 0644 in place of the name, in one step. Raises OSError.

        Running loaders map the old file, so it is never written to; a link of that name is replaced, not followed.
        """
        with self.folder_of(name) as (folder, base):
            if base in (b"", b".", b".."):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fsdecode(name))
            # Whoever made the root could have put something where the name can be told beforehand.
            temporary = b".%b.%b~" % (base[:200], os.urandom(8).hex().encode())
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
            try:
                with open(fd, "wb", closefd=True) as file:
                    file.write(data)
                    file.flush()
                    os.fchmod(fd, 0o644)
                    os.fsync(fd)
                os.rename(temporary, base, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.unlink(temporary, dir_fd=folder)
                raise


@contextmanager
def opened(path: str) -> Iterator[Tree]:
    """The root at a path of this machine."""
    tree = Tree(path)
    try:
        yield tree
    finally:
        tree.close()

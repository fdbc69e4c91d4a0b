# SPDX-License-Identifier: Apache-2.0
"""A bundle's configuration, read and replaced whole.

Hot. The bundle's folder is opened once; what is written goes beside the old file and is renamed over it, with its
owner and mode, so that an engine or a runtime that reads meanwhile sees the one or the other.
"""

from __future__ import annotations

import posix

from cdi import jsontext
from hook import state
from ldcache import root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME = "config.json"


class Bundle:
    """`config` is the configuration's object, `container` what nvhook needs of it, `path` the file's for people."""

    __slots__ = ("_folder", "_name", "_status", "config", "container", "path")

    def __init__(self, place: str, name: str | None = None) -> None:
        """Raises NvhookError for a folder or file that can't be read, or that is no configuration."""
        folder, _, self._name = (name or NAME).rpartition("/")
        where = place if not folder else folder if name and name.startswith("/") else f"{place}/{folder}"
        self.container = state.Container(_absolute(place))
        self.path = f"{_absolute(where)}/{self._name}"
        try:
            self._folder = posix.open(where, root.PATH | posix.O_DIRECTORY)
            flags = posix.O_RDONLY | posix.O_CLOEXEC | posix.O_NONBLOCK | posix.O_NOCTTY
            fd = posix.open(self._name, flags, dir_fd=self._folder)
        except OSError as error:
            remedy = "give the bundle's folder, the one that holds config.json"
            raise NvhookError(f"cannot open {self.path}: {error.strerror}", remedy) from error
        try:
            self._status = posix.fstat(fd)
            self.config: dict[str, Any] = state.parse(self.path, state.read_text(fd, self.path))
        finally:
            posix.close(fd)
        state.fill(self.container, self.path, self.config)

    def write(self) -> None:
        """Put `config` in the file's place. Raises NvhookError, the old file being there as it was."""
        text = jsontext.dumps(self.config).encode()
        temporary = f".{self._name}.nvhook-{posix.getpid()}"
        try:
            flags = posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_NOFOLLOW | posix.O_CLOEXEC
            fd = posix.open(temporary, flags, 0o600, dir_fd=self._folder)
            try:
                left = memoryview(text)
                while left:
                    left = left[posix.write(fd, left) :]
                if (self._status.st_uid, self._status.st_gid) != (posix.geteuid(), posix.getegid()):
                    posix.fchown(fd, self._status.st_uid, self._status.st_gid)
                posix.fchmod(fd, self._status.st_mode & 0o7777)
                posix.rename(temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            except BaseException:
                posix.unlink(temporary, dir_fd=self._folder)
                raise
            finally:
                posix.close(fd)
        except OSError as error:
            remedy = "let the engine keep bundles where root can write"
            raise NvhookError(f"cannot write {self.path}: {error.strerror}", remedy) from error


def _absolute(path: str) -> str:
    """The path from the root, without `/` and `/.` at its end; a folder's own name may end in dots."""
    whole = path if path.startswith("/") else f"{posix.getcwd()}/{path}"
    while whole.endswith(("/", "/.")):
        whole = whole[: whole.rindex("/")]
    return whole or "/"

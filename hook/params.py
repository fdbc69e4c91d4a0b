# SPDX-License-Identifier: Apache-2.0
"""The driver's parameters as a container sees them: with ModifyDeviceFiles 0, and all else below /proc left alone.

Hot, but only for `nvidia-cdi-hook disable-device-node-modification`, whose CDI files do not tell which GPU has which
bus id; where that is known the proc mask does more.
"""

from __future__ import annotations

import posix

from hook.step import Step
from hook.steps import DRIVER_FOLDER, MASK_ATTRIBUTES, MASK_OPTIONS
from ldcache import kernel, root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hook.namespace import Namespace

PATH = f"{DRIVER_FOLDER}/params"
ON, OFF = b"ModifyDeviceFiles: 1\n", b"ModifyDeviceFiles: 0\n"
TEXT_MAX = 1 << 16


class Params(Step):
    """A mount of one file over the parameters. Nothing is done where they say 0 already, or there are none."""

    __slots__ = ()

    def describe(self) -> str:
        return f"mount a copy of {PATH} over it: {OFF.decode().strip()}"

    def execute(self, namespace: Namespace) -> None:
        try:
            text = root.read_file(namespace.base, PATH, TEXT_MAX)
        except (FileNotFoundError, NotADirectoryError):
            return
        lines = text.splitlines(keepends=True)
        if ON not in lines:
            return
        mark = namespace.mark()
        mount = self._file(namespace, b"".join([OFF if line == ON else line for line in lines]))
        # The file's own mount keeps the file system alive.
        namespace.undo(mark)
        target = root.open_path(namespace.base, PATH)
        try:
            namespace.attach(mount, target, PATH)
        finally:
            posix.close(target)

    def _file(self, namespace: Namespace, text: bytes) -> int:
        """A detached mount of a file with that text. Before Linux 6.15 only what is attached somewhere can be cloned,
        so its file system is mounted for a moment, over the folder where the file will be."""
        made = namespace.tmpfs(MASK_OPTIONS, MASK_ATTRIBUTES)
        kernel.mount_setattr(made, 0, propagation=kernel.MS_PRIVATE)
        flags = posix.O_CREAT | posix.O_EXCL | posix.O_WRONLY | posix.O_CLOEXEC
        fd = posix.open("params", flags, 0o444, dir_fd=made)
        posix.write(fd, text)
        posix.close(fd)
        target = root.open_path(namespace.base, DRIVER_FOLDER)
        namespace.attach(made, target, DRIVER_FOLDER)
        posix.close(target)
        file = posix.open("params", root.PATH | posix.O_NOFOLLOW, dir_fd=made)
        mount = kernel.open_tree(file, PATH)
        posix.close(file)
        attributes = MASK_ATTRIBUTES | kernel.MOUNT_ATTR_RDONLY
        kernel.mount_setattr(mount, attributes, propagation=kernel.MS_PRIVATE, path=PATH)
        return mount

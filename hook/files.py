# SPDX-License-Identifier: Apache-2.0
"""Small files and links of an image, read, and replaced by rename in a way that can be taken back.

Hot. Nothing is written in place: running loaders have the old file mapped, and a start that is killed half-way
leaves the old one whole.
"""

from __future__ import annotations

import posix

from ldcache import root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hook.namespace import Namespace

# Of the files that we read whole; a loader cache has a bound of its own.
TEXT_MAX = 1 << 20


def read(namespace: Namespace, path: str) -> bytes | None:
    """A small file of the image; None where there is none. Raises OSError for anything else by that name."""
    try:
        fd = root.open_file(namespace.base, path, stored=True)
    except FileNotFoundError:
        return None
    return root.read_open(fd, TEXT_MAX, path)


def real_name(namespace: Namespace, path: str) -> str:
    """The name of what a link of the image leads to, so that the link stays; the path itself where it is none."""
    try:
        return root.real_path(namespace.base, path)
    except FileNotFoundError:
        return path


def remove(namespace: Namespace, path: str, old: bytes) -> None:
    """Take away a file that an earlier start made, as it is of no use to this one."""
    place, name = root.split(path)
    folder = namespace.folder(place)
    try:
        kept = namespace.writable(folder)
    finally:
        posix.close(folder)
    posix.unlink(name, dir_fd=kept)
    namespace.remember(lambda: make_file(namespace, kept, name, old, 0o644, *namespace.ids))


def replace(namespace: Namespace, path: str, old: bytes, new: bytes) -> None:
    """Write a file of the image beside the old one and rename: running loaders have a cache mapped. A link by that
    name gives way, as to ldconfig."""
    place, name = root.split(path)
    folder = namespace.folder(place)
    try:
        _replace(namespace, folder, name, old, new)
    finally:
        posix.close(folder)


def _replace(namespace: Namespace, folder: int, name: str, old: bytes, new: bytes) -> None:
    kept = posix.dup(folder)
    try:
        before = posix.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        namespace.swap(folder, name, lambda where, made: make_file(namespace, where, made, new, 0o644, *namespace.ids))
        namespace.remember(lambda: unlink(namespace, kept, name))
        return
    owner, mode = (before.st_uid, before.st_gid), before.st_mode & 0o7777
    if root.file_type(before.st_mode) == root.S_IFLNK:
        text = posix.readlink(name, dir_fd=folder)
        mode = 0o644

        def restore(where: int, made: str) -> None:
            make_link(namespace, where, made, text, *owner)

    else:

        def restore(where: int, made: str) -> None:
            make_file(namespace, where, made, old, mode, *owner)

    namespace.swap(folder, name, lambda where, made: make_file(namespace, where, made, new, mode, *owner))
    namespace.remember(lambda: namespace.swap(kept, name, restore))


def unlink(namespace: Namespace, folder: int, name: str) -> None:
    """Unlink what was made here, where the root may be read-only."""
    kept = namespace.writable(folder)
    posix.unlink(name, dir_fd=kept)
    posix.close(kept)


def make_link(namespace: Namespace, folder: int, name: str, target: str, uid: int, gid: int) -> None:
    """A new link with this text and owner."""
    namespace.create(lambda: posix.symlink(target, name, dir_fd=folder))
    posix.chown(name, uid, gid, dir_fd=folder, follow_symlinks=False)


def make_file(namespace: Namespace, folder: int, name: str, content: bytes, mode: int, uid: int, gid: int) -> None:
    """A new file with this content, mode and owner."""
    flags = posix.O_CREAT | posix.O_EXCL | posix.O_NOFOLLOW | posix.O_WRONLY | posix.O_CLOEXEC
    fd = namespace.create(lambda: posix.open(name, flags, mode, dir_fd=folder))
    try:
        written = 0
        while written < len(content):
            written += posix.write(fd, content[written:])
        posix.chown(fd, uid, gid)
        # chown takes set-id bits off, and the umask has had its say.
        posix.chmod(fd, mode)
    finally:
        posix.close(fd)

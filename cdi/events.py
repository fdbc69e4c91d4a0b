# SPDX-License-Identifier: Apache-2.0
"""What the kernel tells without being asked: uevents, by netlink, and changes in folders, by inotify(7).

Cold. Only uevents that the kernel itself sent count: any process of root's in the network namespace may send on that
socket, and udev does (lib/kobject_uevent.c; Documentation/ABI, netlink(7)). Neither mechanism is complete: a MIG
layout changes without an event, and both lose some when their buffers overflow, so whoever uses this looks at a
clock too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from pathlib import Path

from ldcache.errors import NvhookError

NETLINK_KOBJECT_UEVENT = 15
KERNEL_GROUP = 1
MESSAGE_MAX = 65536
BUFFER = 1 << 20

# Whose events may tell of a GPU, a module or a node. What comes of it is decided by the fingerprint.
SUBSYSTEMS = {b"module", b"pci", b"drm", b"nvidia", b"nvidia-uvm", b"nvidia-caps", b"nvidia-nvswitch", b"misc"}

IN_ATTRIB, IN_CLOSE_WRITE, IN_MOVED, IN_CREATE, IN_DELETE = 0x4, 0x8, 0xC0, 0x100, 0x200
IN_DELETE_SELF, IN_MOVE_SELF, IN_ONLYDIR = 0x400, 0x800, 0x1000000
# Without IN_CLOSE_WRITE and IN_ATTRIB for /dev: there every `> /dev/null` would count, and every login's tty.
CHANGES = IN_MOVED | IN_CREATE | IN_DELETE | IN_DELETE_SELF | IN_MOVE_SELF | IN_ONLYDIR
HEAD = struct.Struct("iIII")


class Uevents:
    """The kernel's uevents. Raises OSError where the kernel has none for this namespace."""

    def __init__(self) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self.socket = socket.socket(socket.AF_NETLINK, kind, NETLINK_KOBJECT_UEVENT)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        self.socket.bind((0, KERNEL_GROUP))

    def fileno(self) -> int:
        """For poll."""
        return self.socket.fileno()

    def read(self) -> list[dict[bytes, bytes]]:
        """All that have come, of the subsystems that matter; after an overflow one that says nothing."""
        found: list[dict[bytes, bytes]] = []
        while True:
            try:
                data, (sender, _) = self.socket.recvfrom(MESSAGE_MAX)
            except BlockingIOError:
                return found
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                found.append({b"ACTION": b"lost"})
                continue
            if sender != 0:
                continue
            # ACTION@DEVPATH, then KEY=VALUE, each ended by NUL.
            fields = dict(one.split(b"=", 1) for one in data.split(b"\0")[1:] if b"=" in one)
            if fields.get(b"SUBSYSTEM") in SUBSYSTEMS:
                found.append(fields)

    def close(self) -> None:
        """No more of them."""
        self.socket.close()


class Folders:
    """Changes in a set of folders. Raises OSError where the kernel has no inotify to give."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._watches: dict[str, int] = {}

    def fileno(self) -> int:
        """For poll."""
        return int(self.fd)

    def watch(self, paths: set[str]) -> None:
        """Watch just these folders from now on; one that is not there is left out."""
        for path in set(self._watches) - paths:
            self._libc.inotify_rm_watch(self.fd, self._watches.pop(path))
        for path in paths:
            mask = CHANGES if path.endswith("/dev") else CHANGES | IN_CLOSE_WRITE | IN_ATTRIB
            # Also for one that is watched: by that name there may be another folder by now.
            number = self._libc.inotify_add_watch(self.fd, os.fsencode(path), mask)
            if number >= 0:
                self._watches[path] = number
            else:
                self._watches.pop(path, None)

    def read(self) -> set[str]:
        """The names in those folders that changed; "" for a folder itself, and after an overflow."""
        found: set[str] = set()
        while True:
            try:
                data = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return found
            place = 0
            while place < len(data):
                _, _, _, length = HEAD.unpack_from(data, place)
                place += HEAD.size
                found.add(os.fsdecode(data[place : place + length].rstrip(b"\0")))
                place += length

    def close(self) -> None:
        """No more of them."""
        os.close(self.fd)


def tell_systemd(text: str) -> None:
    """sd_notify(3): one datagram to the socket that NOTIFY_SOCKET names, if a service manager wants it."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address or address[0] not in "@/":
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendto(text.encode(), "\0" + address[1:] if address[0] == "@" else address)
        except OSError:
            # Whoever asked to be told is gone.
            pass


def lock(folder: Path, name: str) -> int:
    """A lock's descriptor, held while this process lives. Raises NvhookError if another holds it."""
    import fcntl

    path = folder / name
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise NvhookError(f"cannot open {path}: {error.strerror}", "run this as root") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise NvhookError(f"another cdi watch holds {path}", "let one of them do it: see `systemctl status`") from None
    return fd

# SPDX-License-Identifier: Apache-2.0
"""How often the inventory is renewed, and NVML's library opened, by whichever process: counted by inotify(7)."""

from __future__ import annotations

import ctypes
import json
import os
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.device.machines import Machine

# inotify.h. Equal events one after the other are reported as one, so that what lies between two of a kind is asked for
# too: the closing, and the old name.
IN_CLOSE_NOWRITE, IN_OPEN, IN_MOVED_FROM, IN_MOVED_TO = 0x10, 0x20, 0x40, 0x80
BETWEEN = {IN_OPEN: IN_CLOSE_NOWRITE, IN_MOVED_TO: IN_MOVED_FROM}
HEAD = struct.Struct("iIII")
NVML = "libnvidia-ml.so.1"
FOLDER, FILE = "/run/nvhook", "inventory.json"


@contextmanager
def counted(path: Path, event: int) -> Iterator[Counter[str]]:
    """Counts one kind of event at a file (as "") or in a folder (by name); complete after the block. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    found: Counter[str] = Counter()
    fd = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0 or libc.inotify_add_watch(fd, os.fsencode(path), event | BETWEEN[event]) < 0:
        raise OSError(ctypes.get_errno(), f"inotify at {path}: {os.strerror(ctypes.get_errno())}")
    try:
        yield found
    finally:
        for data in iter(lambda: _read(fd), b""):
            place = 0
            while place < len(data):
                _, happened, _, length = HEAD.unpack_from(data, place)
                place += HEAD.size
                found[os.fsdecode(data[place : place + length].rstrip(b"\0"))] += happened == event
                place += length
        os.close(fd)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 20)
    except BlockingIOError:
        return b""


@contextmanager
def renewals(machine: Machine) -> Iterator[Counter[str]]:
    """Renewals of the machine's inventory, as the count of `FILE`: each is one rename into its place."""
    with counted(machine.path(FOLDER), IN_MOVED_TO) as found:
        yield found


def forget(machine: Machine) -> None:
    """Take the kept inventory away, so that the next start has to renew it."""
    (machine.path(FOLDER) / FILE).unlink(missing_ok=True)


def sessions(machine: Machine) -> int:
    """NVML's sessions in one renewal that asks it about each GPU: how much oftener its library is opened than by a
    renewal that does not ask. Each session has a process of its own, and the loader opens a library once a process.
    Raises SystemExit where an inventory can't be had."""
    inventory = json.loads(machine.nvhook("inventory", "--json").stdout)
    names = [item["path"] for item in inventory["libraries"] if item["soname"] == NVML and item["class"] == 64]
    opened = []
    for asked in ("never", "health"):
        with counted(machine.path(names[0]), IN_OPEN) as count:
            done = machine.nvhook("inventory", "--refresh", "--nvml", asked)
        if done.returncode:
            raise SystemExit(f"nvhook inventory failed:\n{done.stderr}")
        opened.append(count[""])
    return opened[1] - opened[0]

# SPDX-License-Identifier: Apache-2.0
"""A first prestart hook for machines without a driver: gives the container's proc a /proc/driver/nvidia.

No proc has that folder where no driver is loaded, and nothing can be made in a proc. A tmpfs over
/proc/driver, with a folder `nvidia`, is what the proc mask can be put on. That folder is empty or, where an argument
names one of the host, that one: then a container without the mask sees what it would with a driver. Started by path
with -I -S.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

CLONE_NEWNS = 0x20000
MS_BIND = 0x1000


def checked(value: int) -> None:
    """Raise what the last call of libc left."""
    if value != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def main() -> None:
    """The hook."""
    state = json.load(sys.stdin)
    with open(f"{state['bundle']}/config.json", encoding="utf-8") as file:
        root = os.path.join(state["bundle"], json.load(file)["root"]["path"])
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.readlink("/proc/self/ns/mnt")
    namespace = os.open(f"/proc/{state['pid']}/ns/mnt", os.O_RDONLY)
    checked(libc.setns(namespace, CLONE_NEWNS))
    if os.readlink("/proc/self/ns/mnt") == before:
        raise SystemExit("still in the host's mount namespace")
    target = f"{root}/proc/driver"
    checked(libc.mount(b"nvhook-test", os.fsencode(target), b"tmpfs", 0, b"mode=0555"))
    os.mkdir(f"{target}/nvidia", 0o555)
    for source in sys.argv[1:]:
        checked(libc.mount(os.fsencode(source), os.fsencode(f"{target}/nvidia"), None, MS_BIND, None))


if __name__ == "__main__":
    main()

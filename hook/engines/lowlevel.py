# SPDX-License-Identifier: Apache-2.0
"""`/run/nvhook/runtime.NAME`: which low-level runtime the launcher of that name passes verbs on to.

One line, an absolute path, owned by root and written by nobody else. `/run` is empty after a boot; each `create`
that chose a runtime writes the file again.
"""

from __future__ import annotations

import os

from cdi.host import store
from hook.engines.files import Host

NAMES = ("runc", "crun")
FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


def find() -> str | None:
    """The first of the usual runtimes that is installed, by its absolute path."""
    for name in NAMES:
        for folder in FOLDERS:
            path = f"{folder}/{name}"
            if os.access(path, os.X_OK):
                return path
    return None


def write(host: Host, name: str, path: str) -> bool:
    """Write the file for a launcher of this name. True if it was another. Raises OSError, NvhookError."""
    content = f"{path}\n".encode()
    folder = store.make_folder(host.fd, host.folder)
    try:
        if store.read_own(folder, f"runtime.{name}", 4096) == content:
            return False
        store.write_own(folder, f"runtime.{name}", content)
    finally:
        os.close(folder)
    return True

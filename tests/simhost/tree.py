# SPDX-License-Identifier: Apache-2.0
"""Writing a host's files below a folder, by their names on that host."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path


class Tree:
    """The files of a host below `top`. Names are absolute ("/etc/passwd"); what exists is replaced."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.refused: str | None = None

    def path(self, name: str) -> Path:
        return self.top / name.lstrip("/")

    def folder(self, name: str, mode: int = 0o755) -> None:
        path = self.path(name)
        path.mkdir(parents=True, exist_ok=True)
        if mode != 0o755:
            path.chmod(mode)

    def write(self, name: str, content: str | bytes, mode: int = 0o644) -> None:
        path = self._vacant(name)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        path.chmod(mode)

    def copy(self, source: Path, name: str, mode: int = 0o644) -> None:
        path = self._vacant(name)
        shutil.copyfile(source, path)
        path.chmod(mode)

    def link(self, name: str, target: str) -> None:
        # A host keeps /var/run during an upgrade of the driver, and readers are on their way through it.
        if not (self.path(name).is_symlink() and os.readlink(self.path(name)) == target):
            self._vacant(name).symlink_to(target)

    def node(self, name: str, major: int, minor: int, mode: int, uid: int = 0, gid: int = 0) -> bool:
        """A character device; False, and `refused` says why, where mknod is not allowed."""
        path = self._vacant(name)
        try:
            os.mknod(path, stat.S_IFCHR | mode, os.makedev(major, minor))
        except PermissionError as error:
            self.refused = self.refused or f"mknod {name}: {error.strerror}"
            return False
        path.chmod(mode)
        os.chown(path, uid, gid)
        return True

    def ldconfig(self, *folders: str) -> None:
        """Runs the machine's own ldconfig on the tree: the links of each SONAME and etc/ld.so.cache."""
        self.folder("/etc")
        ldconfig("-r", str(self.top), *folders)

    def cached(self) -> list[tuple[str, str]]:
        """(SONAME, path) of each entry of etc/ld.so.cache, as ldconfig prints it."""
        return re.findall(
            r"^\t(\S+) \(.*\) => (\S+)$", ldconfig("-p", "-C", str(self.path("/etc/ld.so.cache"))), re.MULTILINE
        )

    def _vacant(self, name: str) -> Path:
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        return path


def ldconfig(*arguments: str) -> str:
    """Runs the machine's ldconfig, which a plain user's PATH does not have, and returns what it printed."""
    program = shutil.which("ldconfig") or "/sbin/ldconfig"
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{program} {' '.join(arguments)}: {done.stderr}")
    return done.stdout


def merged_usr(tree: Tree) -> None:
    """The links of a merged /usr, which every current distribution has."""
    for name in ("bin", "sbin", "lib", "lib64"):
        tree.folder(f"/usr/{name}")
        tree.link(f"/{name}", f"usr/{name}")

# SPDX-License-Identifier: Apache-2.0
"""A host with container engines, as `nvhook configure` sees one: a folder of files."""

from __future__ import annotations

from pathlib import Path

from hook import cli


class Node:
    """A folder that stands for a host on which docker and nvhook are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemon_json = folder / "etc/docker/daemon.json"
        for name in ("dockerd", "nvhook-runtime", "nvhook-prestart"):
            self.place(f"/usr/bin/{name}", "")

    def place(self, path: str, text: str) -> Path:
        """Write a file of it, its bytes as they are given."""
        file = self.folder / path[1:]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
        return file

    def configure(self, *words: str) -> int:
        """The command."""
        return cli.main(["configure", *words, "--root", str(self.folder)])

    def state(self) -> dict[str, tuple[bytes, int, int]]:
        """Each file with its content, mode and time."""
        return {
            str(path.relative_to(self.folder)): (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns)
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }

    def text(self, path: str) -> str:
        """A file's text."""
        return (self.folder / path[1:]).read_bytes().decode()

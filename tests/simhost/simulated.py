# SPDX-License-Identifier: Apache-2.0
"""Builds a whole host with an NVIDIA driver below a folder, for `--host-root`."""

from __future__ import annotations

import os
import socket
import weakref
from pathlib import Path

from tests.simhost import driver, kernel, nvml, platforms
from tests.simhost.host import Host, Library, Nvml
from tests.simhost.host import Socket as SocketState
from tests.simhost.tree import Tree


class SimulatedHost:
    """A built host.

    `root` is what `--host-root` takes. `nodes_skipped` says why the nodes below /dev are not there (None:
    they are): mknod needs root. Sockets that answer do so while this object lives or until `close`.
    """

    def __init__(self, tree: Tree, host: Host, libraries: tuple[Library, ...], folder: str) -> None:
        self.root = tree.top
        self.host = host
        self.libraries = libraries
        self.library_folder = folder
        self.nodes_skipped = tree.refused
        self._listening: list[weakref.finalize[..., SimulatedHost]] = []

    def path(self, name: str) -> Path:
        """Where a file of the host really is. (An absolute link on the way leads out of the tree.)"""
        return self.root / name.lstrip("/")

    def library(self, soname: str, bits: int = 64) -> Path:
        """The real file of the driver's library of that SONAME."""
        return next(self.path(one.path) for one in self.libraries if (one.soname, one.bits) == (soname, bits))

    def set_nvml(self, behaviour: Nvml) -> None:
        """Changes what NVML does from its next nvmlInit on; the library's folder keeps its time stamps."""
        nvml.write(self._nvml_folder, self.host, behaviour)

    def nvml_calls(self) -> tuple[nvml.Call, ...]:
        """Every NVML call since the host was built or `clear_nvml_calls`, by whichever process."""
        return nvml.read_calls(self._nvml_folder)

    def clear_nvml_calls(self) -> None:
        (self._nvml_folder / "calls").write_text("")

    def close(self) -> None:
        """Stops answering on the sockets; their files stay, as those of a daemon that died."""
        for listening in self._listening:
            listening()

    def add_socket(self, name: str, state: SocketState) -> None:
        """A Unix socket: one that takes connections, or the file that a daemon which died left."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            # By way of its folder's descriptor: sun_path holds 108 bytes, and a test's folder may be longer.
            folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
            try:
                server.bind(f"/proc/self/fd/{folder}/{path.name}")
            finally:
                os.close(folder)
            if state == "answering":
                # connect() succeeds as soon as somebody listens: no thread has to accept.
                server.listen(64)
                self._listening.append(weakref.finalize(self, os.close, server.detach()))

    @property
    def _nvml_folder(self) -> Path:
        return self.path(self.library_folder) / nvml.FOLDER


def build(directory: Path, host: Host | None = None) -> SimulatedHost:
    """Builds `host` (None: the default one) below `directory`, which is made if need be.

    Built over an existing host it is an upgrade: what both have is replaced, the rest of the older one
    stays on disk. Raises RuntimeError naming the package where gcc is missing.
    """
    host = host or Host()
    directory.mkdir(parents=True, exist_ok=True)
    tree = Tree(directory)
    kernel.proc(tree, host)
    kernel.sys(tree, host)
    driver_tree, dev_tree = Tree(tree.path(host.driver_root)), Tree(tree.path(host.dev_root))
    libraries = driver.install(driver_tree, host)
    if host.driver_root != "/":
        driver.base(tree, host.layout, host.i386)
        if host.cache:
            tree.ldconfig()
    kernel.dev(dev_tree, host)
    tree.refused = dev_tree.refused
    prefix = host.driver_root.rstrip("/")
    libraries = tuple(Library(prefix + one.path, one.soname, one.bits) for one in libraries)
    built = SimulatedHost(tree, host, libraries, prefix + platforms.PLACES[host.layout].libraries)
    built.set_nvml(host.nvml)
    if host.persistenced:
        built.add_socket("/run/nvidia-persistenced/socket", host.persistenced)
    if host.fabricmanager:
        built.add_socket("/run/nvidia-fabricmanager/socket", host.fabricmanager)
    if host.mps:
        for name in ("control", "log"):
            tree.folder("/tmp/nvidia-mps")
            if not tree.path(f"/tmp/nvidia-mps/{name}").exists():
                os.mkfifo(tree.path(f"/tmp/nvidia-mps/{name}"), 0o666)
    return built

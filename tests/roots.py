# SPDX-License-Identifier: Apache-2.0
"""Small container roots (about 10 MB), made of this machine's own files.

A root has the C library, ldconfig with a cache of its own making, busybox under the name of each applet, a
library of the image's own that only the loader cache finds, and /usr/bin/resolve
(tests/simhost/resolve.c), which asks the loader. From a shell: `python -m tests.roots DIRECTORY`.
"""

from __future__ import annotations

import argparse
import functools
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Literal, get_args

from tests import cachewriter
from tests.simhost import compiler
from tests.simhost.tree import Tree, ldconfig, merged_usr

Flavour = Literal["debian", "lib64", "fedora", "centos7", "arch", "alpine", "distroless", "busybox", "scratch"]

LOADER = "ld-linux-x86-64.so.2"
LIBRARIES = (
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "libgcc_s.so.1",
    "libstdc++.so.6",
)
# No default folder of the loader: what is here is found through the cache or not at all.
IMAGE_FOLDER = "/opt/image/lib"
IMAGE_LIBRARY = "libimage.so.1"


# Where the C library lies in each.
FOLDERS: dict[Flavour, str] = {
    "debian": "/usr/lib/x86_64-linux-gnu",
    "lib64": "/usr/lib64",
    "fedora": "/usr/lib64",
    "centos7": "/usr/lib64",
    "arch": "/usr/lib",
    "distroless": "/lib/x86_64-linux-gnu",
    "busybox": "/lib",
}


def library_folder(flavour: Flavour) -> str:
    """The root's own library folder."""
    return FOLDERS[flavour]


def make_root(directory: Path, flavour: Flavour = "debian") -> Path:
    """Makes a container root at `directory`, which must not exist, and returns it.

    `debian` is multiarch and has an etc/debian_version; `lib64` is laid out like Fedora, and `fedora` has Fedora's
    default folders in its loader besides; `centos7` is that with a cache
    in the form of glibc 2.17; `arch` has all in /usr/lib; `alpine` is musl's. Without ldconfig, cache and
    ld.so.conf: `distroless` (Debian's files, unmerged, no shell), `busybox`, and `scratch`, which holds one static
    program. Built once per test process, then copied. Raises RuntimeError naming the package for what this machine
    lacks.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists already")
    directory.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", "--reflink=auto", str(_template(flavour)), str(directory)], check=True)
    return directory


@functools.cache
def _template(flavour: Flavour) -> Path:
    tree = Tree(compiler.cache_folder() / f"root-{flavour}")
    for name in ("dev", "proc", "sys"):
        tree.folder(f"/{name}")
    if flavour == "scratch":
        tree.copy(_busybox(), "/busybox", 0o755)
    elif flavour == "alpine":
        _alpine(tree)
    elif flavour in ("distroless", "busybox"):
        _bare(tree, flavour)
    else:
        _full(tree, flavour)
    return tree.top


def _full(tree: Tree, flavour: Flavour) -> None:
    """A distribution: a C library, ldconfig and its cache, a shell."""
    merged_usr(tree)
    if flavour == "arch":
        tree.path("/usr/lib64").rmdir()
        tree.link("/usr/lib64", "lib")
    for name in ("etc", "root", "run", "var/cache/ldconfig", "var/tmp"):
        tree.folder(f"/{name}")
    tree.folder("/tmp", 0o1777)
    _accounts(tree, flavour)
    _libraries(tree, library_folder(flavour))
    if flavour == "fedora":
        _fedora_loader(tree.path(f"{library_folder(flavour)}/{LOADER}").resolve())
    _programs(tree, _busybox())
    tree.copy(compiler.library("image.c", IMAGE_LIBRARY), f"{IMAGE_FOLDER}/{IMAGE_LIBRARY}.0.0")
    tree.write("/etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n")
    tree.write("/etc/ld.so.conf.d/image.conf", f"{IMAGE_FOLDER}\n")
    # Fedora's ldconfig and loader know lib64 by themselves; this machine's may be Debian's and have to be told.
    listed = {
        "debian": "/usr/local/lib/x86_64-linux-gnu\n/lib/x86_64-linux-gnu\n/usr/lib/x86_64-linux-gnu\n",
        "arch": "",
    }.get(flavour, "/lib64\n/usr/lib64\n")
    tree.write(f"/etc/ld.so.conf.d/{'x86_64-linux-gnu' if flavour == 'debian' else 'lib64'}.conf", listed)
    tree.ldconfig()
    if flavour == "centos7":
        rows = [cachewriter.Row(name.encode(), path.encode()) for name, path in tree.cached()]
        tree.write("/etc/ld.so.cache", cachewriter.combined(rows, generator=None))


def _alpine(tree: Tree) -> None:
    """musl, its loader being its C library, and static programs; libraries in /lib and /usr/lib."""
    musl = Path("/lib/ld-musl-x86_64.so.1")
    if not musl.exists():
        raise RuntimeError(f"{musl} is not there: install the package musl")
    for name in ("etc", "run", "tmp", "usr/lib", "usr/bin", "var"):
        tree.folder(f"/{name}")
    tree.copy(musl, "/lib/ld-musl-x86_64.so.1", 0o755)
    tree.link("/lib/libc.musl-x86_64.so.1", "ld-musl-x86_64.so.1")
    tree.write("/etc/alpine-release", "3.20.0\n")
    tree.write("/etc/os-release", "ID=alpine\n")
    tree.copy(_busybox(), "/bin/busybox", 0o755)
    for applet in ("sh", "ls", "stat", "readlink", "cat"):
        tree.link(f"/bin/{applet}", "busybox")
    tree.copy(compiler.musl_program("resolve.c"), "/usr/bin/resolve", 0o755)


def _bare(tree: Tree, flavour: Flavour) -> None:
    """A C library and a program, and nothing that keeps a loader's cache."""
    folder = library_folder(flavour)
    for name in (LOADER, *LIBRARIES):
        tree.copy(_on_this_machine(name), f"{folder}/{name}", 0o755)
    tree.copy(compiler.program("resolve.c"), "/bin/resolve" if flavour == "busybox" else "/usr/bin/resolve", 0o755)
    tree.folder("/etc")
    tree.folder("/tmp", 0o1777)
    if flavour == "distroless":
        tree.link(f"/lib64/{LOADER}", f"..{folder}/{LOADER}")
        tree.folder("/usr/lib/x86_64-linux-gnu")
        tree.write("/etc/os-release", "ID=debian\n")
        return
    tree.link("/lib64", "lib")
    tree.copy(_busybox(), "/bin/busybox", 0o755)
    tree.link("/bin/sh", "busybox")


def _accounts(tree: Tree, flavour: Flavour) -> None:
    tree.write("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n")
    tree.write("/etc/group", "root:x:0:\nnogroup:x:65534:\n")
    tree.write("/etc/nsswitch.conf", "passwd: files\ngroup: files\n")
    if flavour == "debian":
        tree.write("/etc/debian_version", "12.12\n")
    tree.write("/etc/os-release", "ID=debian\n" if flavour == "debian" else "ID=fedora\n")


def _fedora_loader(loader: Path) -> None:
    """Write Fedora's default folders over Debian's in a loader (glibc elf/dl-load.c: system_dirs). The code knows the
    lengths, so slashes fill them up."""
    content = loader.read_bytes()
    for old, top in ((b"/usr/lib/x86_64-linux-gnu/", b"/usr/"), (b"/lib/x86_64-linux-gnu/", b"/")):
        if old + b"\0" not in content:
            raise RuntimeError("this machine's loader has not the default folders of Debian's glibc")
        content = content.replace(old + b"\0", top.ljust(len(old) - len(b"lib64/"), b"/") + b"lib64/\0")
    loader.write_bytes(content)


def _libraries(tree: Tree, folder: str) -> None:
    for name in (LOADER, *LIBRARIES):
        source = _on_this_machine(name)
        real = source.resolve().name
        tree.copy(source, f"{folder}/{real}", 0o755)
        if real != name:
            tree.link(f"{folder}/{name}", real)
    if folder not in ("/usr/lib64", "/usr/lib"):
        tree.link(f"/usr/lib64/{LOADER}", f"..{folder.removeprefix('/usr')}/{LOADER}")


def _programs(tree: Tree, busybox: Path) -> None:
    # Ubuntu's /sbin/ldconfig is a script around the real one.
    real = Path("/sbin/ldconfig.real")
    tree.copy(real if real.exists() else Path("/sbin/ldconfig"), "/usr/sbin/ldconfig", 0o755)
    tree.copy(compiler.program("resolve.c"), "/usr/bin/resolve", 0o755)
    tree.copy(busybox, "/usr/bin/busybox", 0o755)
    applets = subprocess.run([str(busybox), "--list"], capture_output=True, text=True, check=True).stdout.split()
    for applet in applets:
        if applet not in ("busybox", "linuxrc"):
            tree.link(f"/usr/bin/{applet}", "busybox")


def _on_this_machine(soname: str) -> Path:
    """Where this machine's loader finds a 64-bit library."""
    found = re.search(rf"^\t{re.escape(soname)} \(libc6,x86-64.*\) => (\S+)$", _loader_cache(), re.MULTILINE)
    if not found:
        raise RuntimeError(f"{soname} is not in this machine's loader cache: the package libstdc++6 brings all of them")
    return Path(found[1])


@functools.cache
def _loader_cache() -> str:
    return ldconfig("-p")


def _busybox() -> Path:
    found = shutil.which("busybox")
    if found is None or _has_interpreter(Path(found)):
        raise RuntimeError(
            "a statically linked busybox is needed for container roots: install the package busybox-static"
        )
    return Path(found)


def _has_interpreter(program: Path) -> bool:
    """Whether a 64-bit ELF program has PT_INTERP, that is, needs a loader."""
    head = program.read_bytes()[:4096]
    start, size, count = struct.unpack_from("<Q", head, 32)[0], *struct.unpack_from("<HH", head, 54)
    return any(struct.unpack_from("<I", head, start + size * i)[0] == 3 for i in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.roots", description="Makes a small container root.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--flavour", choices=get_args(Flavour), default="debian")
    arguments = parser.parse_args()
    print(make_root(arguments.directory, arguments.flavour))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The driver's other files: programs, data files, firmware, and the sockets of its daemons."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from typing import Any

from cdi.host import fingerprint, table
from cdi.host.libraries import SUBFOLDERS, place
from ldcache import root

LINKED = "it is a link"
RELEASE = "/proc/sys/kernel/osrelease"
FIRMWARE_PATH = "/sys/module/firmware_class/parameters/path"

# Folders of a whole system, whose bin, share and firmware are looked into anyway.
SYSTEM_TOPS = ("", "/usr", "/usr/local")


def own_tops(folders: list[str]) -> list[str]:
    """Where a driver that lies by itself has its other files: /usr/local/nvidia for /usr/local/nvidia/lib64."""
    tops = []
    for folder in folders:
        top, _, name = folder.rpartition("/")
        if name in ("lib", "lib64", "lib32") and top not in SYSTEM_TOPS:
            tops.append(top)
    return list(dict.fromkeys(tops))


def programs(
    recorder: fingerprint.Recorder, base: fingerprint.Base, folders: list[str], stems: set[str]
) -> list[dict[str, Any]]:
    """The driver's programs. Where to look does not depend on the caller's PATH: that is another machine's.

    `folders` are those of its libraries, `stems` the names of those.
    """
    places = [f"{top}/bin" for top in own_tops(folders)] + list(table.PROGRAM_FOLDERS)
    found: list[dict[str, Any]] = []
    for program in table.PROGRAMS:
        beside = program.beside
        if beside and (_regular(recorder, base, beside) is None if beside.startswith("/") else beside not in stems):
            continue
        path = _first_program(recorder, base, places, program.name)
        if path is None and program is table.PROGRAMS[0]:
            # nvidia-smi, which every driver has.
            places += table.PLATFORM_PROGRAM_FOLDERS
            path = _first_program(recorder, base, places, program.name)
        if path is not None:
            found.append({"path": base.prefix + path, "name": program.name, "capability": program.group})
    return found


def _first_program(recorder: fingerprint.Recorder, base: fingerprint.Base, places: list[str], name: str) -> str | None:
    return next((real for folder in places if (real := _program(recorder, base, f"{folder}/{name}"))), None)


def _program(recorder: fingerprint.Recorder, base: fingerprint.Base, path: str) -> str | None:
    real = recorder.file(base, path)
    # A real name that is no text, where a link led to, is one that no CDI file can hold.
    if real is None or not real.isprintable():
        return None
    mode = root.stat(base.fd, real).st_mode
    return real if stat.S_ISREG(mode) and mode & 0o111 else None


def data_files(
    recorder: fingerprint.Recorder, base: fingerprint.Base, folders: list[str], stems: set[str], version: str
) -> list[dict[str, Any]]:
    """The files by which GLVND, EGL, Vulkan, OpenCL, OptiX and X.Org find the driver.

    The driver's own share comes first, since what is there is of its version. `links` are names to make beside
    the file, each a link to it.
    """
    tops = own_tops(folders)
    places = [f"{top}/{name}" for top in tops for name in ("share", "etc")]
    places += table.DATA_FOLDERS
    if base.prefix:
        # A driver root that is nothing but the driver.
        places.append("/share")
    # GKE's installer puts vulkan/ at the top, beside lib64.
    at_top = [*tops, ""] if base.prefix else tops
    found = []
    for item in table.DATA_FILES:
        if item.beside and item.beside not in stems:
            continue
        name = item.name.format(version=version)
        looks = [*places, *(at_top if name.startswith("vulkan/") else ())]
        real = next((real for folder in looks if (real := _regular(recorder, base, f"{folder}/{name}"))), None)
        if real is not None:
            found.append(_file(base.prefix + real, item.container_path.format(version=version), item.group))
    found += _xorg(recorder, base, folders, version)
    if "libnvidia-ngx" in stems:
        found += _wine(recorder, base, folders)
    gridd = _regular(recorder, base, table.GRIDD_CONF)
    # What a vGPU guest's licence daemon was told; not its token, which is a secret.
    return found + ([_file(base.prefix + gridd, table.GRIDD_CONF, "utility")] if gridd is not None else [])


def _file(path: str, container_path: str, group: str, links: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "path": path,
        "container_path": container_path,
        "capability": group,
        "kind": "graphics",
        "links": list(links),
    }


def _regular(recorder: fingerprint.Recorder, base: fingerprint.Base, path: str) -> str | None:
    real = recorder.file(base, path)
    if real is None or not real.isprintable():
        return None
    return real if stat.S_ISREG(root.stat(base.fd, real).st_mode) else None


def _xorg(
    recorder: fingerprint.Recorder, base: fingerprint.Base, folders: list[str], version: str
) -> Iterator[dict[str, Any]]:
    server = f"{table.XORG_SERVER}.{version}"
    whole = [folder for folder in folders if folder.rpartition("/")[2] not in SUBFOLDERS]
    tops = list(dict.fromkeys([*whole, *table.XORG_TOPS]))
    for name, links in ((table.XORG_DRIVER, ()), (server, (table.XORG_SERVER,))):
        paths = (f"{top}/{inner}/{name}" for top in tops for inner in table.XORG_FOLDERS)
        real = next((real for path in paths if (real := _regular(recorder, base, path))), None)
        if real is not None:
            yield _file(base.prefix + real, real, "graphics", links)


def _wine(recorder: fingerprint.Recorder, base: fingerprint.Base, folders: list[str]) -> Iterator[dict[str, Any]]:
    for folder in folders:
        for name in table.WINE_FILES:
            real = _regular(recorder, base, f"{folder}/{table.WINE_FOLDER}/{name}")
            if real is not None:
                yield _file(base.prefix + real, real, "ngx")


def firmware(
    recorder: fingerprint.Recorder,
    base: fingerprint.Base,
    host: fingerprint.Base,
    folders: list[str],
    version: str,
) -> list[dict[str, Any]]:
    """The GSP firmware of this driver, from all places where the kernel looks, and the driver's own.

    A container has it where the driver's user space would look for it, wherever the host keeps it.
    """
    found: dict[str, dict[str, Any]] = {}
    for where, folder in _firmware_folders(recorder.root_fd, base, host, folders):
        real = recorder.file(where, f"{folder}/nvidia/{version}")
        try:
            names = root.listdir(where.fd, real) if real is not None else []
        except OSError:
            names = []
        for name in names:
            if name.startswith("gsp") and name.endswith(".bin") and name not in found:
                path = _regular(recorder, where, f"{real}/{name}")
                if path is not None:
                    inside = f"/lib/firmware/nvidia/{version}/{name}"
                    found[name] = {"path": where.prefix + path, "container_path": inside}
    return [found[name] for name in sorted(found)]


def _firmware_folders(
    root_fd: int, base: fingerprint.Base, host: fingerprint.Base, folders: list[str]
) -> Iterator[tuple[fingerprint.Base, str]]:
    configured = fingerprint.text(root_fd, FIRMWARE_PATH).strip().rstrip("/")
    if configured.startswith("/"):
        yield place(base, host, configured)
    release = fingerprint.text(root_fd, RELEASE).strip()
    for pattern in table.FIRMWARE_FOLDERS:
        if release or "{" not in pattern:
            yield base, pattern.format(release=release)
    for top in own_tops(folders):
        yield base, f"{top}/firmware"


def sockets(
    recorder: fingerprint.Recorder, base: fingerprint.Base, host: fingerprint.Base
) -> tuple[list[dict[str, Any]], list[str]]:
    """Sockets that answer and the MPS folder, and warnings about sockets that do not.

    A daemon may run in the driver's container or on the host, so both are looked at.
    """
    bases = [base] if base.prefix == host.prefix else [base, host]
    found, warnings = [], []
    for name, group in table.SOCKETS:
        for where in bases:
            path = _place(recorder, where, [f"{run}/{name}" for run in table.RUN_FOLDERS])
            if path is None:
                continue
            reason = refusal(where.fd, path)
            if reason is not None:
                warnings.append(f"{where.prefix}{path} is left out: {reason}")
                continue
            found.append(_socket(where.prefix + path, f"/run/{name}", group, "socket"))
            break
    folder, warning = _mps(recorder, host)
    return found + folder, warnings + warning


def _place(recorder: fingerprint.Recorder, where: fingerprint.Base, paths: list[str]) -> str | None:
    """The first of these at which something is, with no link in the folders above.

    A link at its end stays one. Who may write in its folder could have it lead to any socket of the host's, and that
    would be mounted into containers. The folders above are root's.
    """
    for path in paths:
        real = recorder.unfollowed("entry", where, path)
        if real is not None and _status(where, real) is not None:
            return real
    return None


def _status(where: fingerprint.Base, path: str) -> os.stat_result | None:
    try:
        return root.stat(where.fd, path, follow=False)
    except OSError:
        return None


def _socket(path: str, container_path: str, group: str, kind: str) -> dict[str, Any]:
    return {"path": path, "container_path": container_path, "capability": group, "kind": kind}


def refusal(root_fd: int, path: str) -> str | None:
    """Why a socket can't be used, or None if somebody answers. A daemon that died leaves its file behind."""
    try:
        # Not followed: who may write in the folder could have put a link there since it was looked at.
        fd = root.open_path(root_fd, path, follow=False)
    except OSError as error:
        return error.strerror or "it can't be opened"
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISSOCK(mode):
            return LINKED if stat.S_ISLNK(mode) else "it is no socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.setblocking(False)
            # By way of the descriptor: sun_path holds 108 bytes, and the name can't change under us.
            client.connect(f"/proc/self/fd/{fd}")
    except OSError as error:
        # Somebody listens whose queue is full, or for another type of socket.
        return None if error.errno in (errno.EAGAIN, errno.EPROTOTYPE) else error.strerror
    finally:
        os.close(fd)
    return None


def _mps(recorder: fingerprint.Recorder, host: fingerprint.Base) -> tuple[list[dict[str, Any]], list[str]]:
    # Anybody can make a folder in /tmp and listen there for other users' CUDA programs, or put a link there, or take
    # it all away between two looks. Root's mode says nothing: MPS servers run as their clients' users, and have to make
    # their pipes in it.
    path = recorder.unfollowed("ours", host, table.MPS_FOLDER)
    status = None if path is None else _status(host, path)
    if path is None or status is None:
        return [], []
    if fingerprint.is_ours(status):
        return [_socket(host.prefix + path, table.MPS_FOLDER, "compute", "directory")], []
    if stat.S_ISDIR(status.st_mode):
        reason = f"it belongs to uid {status.st_uid}"
    else:
        reason = LINKED if stat.S_ISLNK(status.st_mode) else "it is no folder"
    return [], [f"{path} is left out: {reason}"]

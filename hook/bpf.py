# SPDX-License-Identifier: Apache-2.0
"""bpf(2) as far as device filters of cgroups need it: load, look at, attach and detach their programs.

Hot. Descriptors that come back are the caller's to close; they are close-on-exec. A failing call raises
OSError. The layouts are those of union bpf_attr and struct bpf_prog_info in linux/bpf.h, Linux 4.15.
"""

from __future__ import annotations

import errno
import posix
import struct

from ldcache import kernel
from ldcache.errors import NvhookError

PROG_LOAD = 5
PROG_ATTACH = 8
PROG_DETACH = 9
PROG_GET_FD_BY_ID = 13
OBJ_GET_INFO_BY_FD = 15
PROG_QUERY = 16

PROG_TYPE_CGROUP_DEVICE = 15
CGROUP_DEVICE = 6
F_ALLOW_MULTI = 2
F_REPLACE = 4
F_QUERY_EFFECTIVE = 1

# The kernel writes some results at their place in the union, however short a union it was given.
ATTRIBUTES_SIZE = 128
INSTRUCTION_SIZE = 8
INFO_SIZE = 80
LOG_SIZE = 1 << 16
# A cgroup has at most 64 programs of a kind; the effective list has those of all its ancestors.
PROGRAMS_MAX = 1024

NAME = "nvhook"
LICENCE = b"Apache-2.0\0"


def _call(command: int, call: str, form: str, *values: int | bytes) -> tuple[int, bytes]:
    attributes = struct.pack(form, *values).ljust(ATTRIBUTES_SIZE, b"\0")
    return kernel.bpf(command, attributes, call)


class Program:
    """An attached program: its id and descriptor, its tag (a hash of its instructions alone), its name."""

    __slots__ = ("fd", "id", "name", "tag")

    def __init__(self, identity: int) -> None:
        self.id = identity
        self.fd, _ = _call(PROG_GET_FD_BY_ID, "BPF_PROG_GET_FD_BY_ID", "=III", identity, 0, 0)
        self.tag, self.name = look(self.fd)[1:]


def load(program: bytes, name: str = NAME) -> int:
    """Load a device filter; the name says whose it is to whoever lists programs.

    Raises NvhookError with the verifier's first line where that refuses it.
    """
    try:
        return _load(program, name, 0, 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EACCES):
            raise
    log, address = kernel.buffer(LOG_SIZE)
    try:
        return _load(program, name, address, LOG_SIZE)
    except OSError as error:
        line = kernel.contents(log, LOG_SIZE).split(b"\0")[0].split(b"\n")[0].decode("ascii", "replace")
        what = f"the kernel refused nvhook's device filter: {error.strerror}: {line}"
        raise NvhookError(what, "report this kernel to nvhook's authors; a CDI file works without") from error


def _load(program: bytes, name: str, log: int, log_size: int) -> int:
    code, code_address = kernel.buffer(program)
    licence, licence_address = kernel.buffer(LICENCE)
    count = len(program) // INSTRUCTION_SIZE
    form = "=IIQQIIQII16s"
    head = (PROG_TYPE_CGROUP_DEVICE, count, code_address, licence_address)
    fd, _ = _call(PROG_LOAD, "BPF_PROG_LOAD", form, *head, int(log_size > 0), log_size, log, 0, 0, name.encode())
    # The kernel reads through the addresses, of which Python's collector knows nothing.
    del code, licence
    return fd


def look(fd: int) -> tuple[int, bytes, str]:
    """A loaded program's id, tag and name."""
    info, address = kernel.buffer(INFO_SIZE)
    _call(OBJ_GET_INFO_BY_FD, "BPF_OBJ_GET_INFO_BY_FD", "=IIQ", fd, INFO_SIZE, address)
    _, identity, tag, name = struct.unpack("=II8s48x16s", kernel.contents(info, INFO_SIZE))
    return identity, tag, name.split(b"\0")[0].decode("ascii", "replace")


def tag(program: bytes) -> bytes:
    """The tag that the kernel gives to a program: it is loaded for that, and let go. The hash differs by kernel."""
    fd = load(program)
    try:
        return look(fd)[1]
    finally:
        posix.close(fd)


def query(cgroup: int, effective: bool = False) -> tuple[list[int], int]:
    """The ids of the device filters attached to a cgroup, and its attach flags.

    With `effective` those that decide for its processes: also every ancestor's, in sight or not.
    """
    ids, address = kernel.buffer(4 * PROGRAMS_MAX)
    flags = F_QUERY_EFFECTIVE if effective else 0
    form = "=IIIIQI"
    _, result = _call(PROG_QUERY, "BPF_PROG_QUERY", form, cgroup, CGROUP_DEVICE, flags, 0, address, PROGRAMS_MAX)
    _, _, _, attach_flags, _, count = struct.unpack_from(form, result)
    return list(struct.unpack(f"={count}I", kernel.contents(ids, 4 * count))), attach_flags


def replace(cgroup: int, old: int, new: int) -> None:
    """Put one program in another's place, which no access falls between (Linux 5.6).

    ENOENT: the old one is no longer attached. EINVAL: the kernel can't replace.
    """
    _attach(cgroup, new, F_ALLOW_MULTI | F_REPLACE, old)


def add_then_drop(cgroup: int, old: int, new: int) -> None:
    """What `replace` does, in two steps: between them both programs must allow, so less is open, never more."""
    attach(cgroup, new)
    detach(cgroup, old)


def attach(cgroup: int, program: int) -> None:
    """Let one more program decide; all of them must allow."""
    _attach(cgroup, program, F_ALLOW_MULTI, 0)


def detach(cgroup: int, program: int) -> None:
    """Take a program away. ENOENT: it isn't attached."""
    _call(PROG_DETACH, "BPF_PROG_DETACH", "=III", cgroup, program, CGROUP_DEVICE)


def _attach(cgroup: int, program: int, flags: int, replaced: int) -> None:
    _call(PROG_ATTACH, "BPF_PROG_ATTACH", "=IIIII", cgroup, program, CGROUP_DEVICE, flags, replaced)

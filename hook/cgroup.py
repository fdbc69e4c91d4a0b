# SPDX-License-Identifier: Apache-2.0
"""Device rules of a container that exists already: its cgroup is told that some more nodes may be opened.

Hot. The runtime has its rules in force before it starts prestart hooks, and writes none afterwards. Version 1
takes further rules as text. On version 2 programs decide, and each one on the cgroup and above it must allow:
so the runtime's own is replaced by itself with our rules in front, if it certainly is the runtime's own.
Everything is opened, and all that can fail is tried, before the container's namespace is entered; `apply` and
`undo` use descriptors only.
"""

from __future__ import annotations

import errno
import posix

from hook import bpf, cgroupfs, devicefilter
from hook.cgroupfs import SHIM_OR_CDI
from ldcache import kernel
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from hook.cgroupfs import Place

    Node = tuple[int, int]

# How often to look again at a filter that changes under our hands.
ATTEMPTS = 8


class DeviceRules:
    """The device rules of the container whose init process is `pid`.

    `rules` and `devices` are `linux.resources.devices` and `linux.devices` of its config.json. In order:
    `prepare`, then in the container's namespace `apply`, and `undo` if something later fails. All raise
    NvhookError, `undo` OSError. What a person should know is in `warnings` after `prepare`.
    """

    __slots__ = ("_place", "_way", "warnings")

    def __init__(self, pid: int, rules: Sequence[dict[str, Any]], devices: Sequence[dict[str, Any]] = ()) -> None:
        self.warnings: list[str] = []
        self._place: Place | None = None
        self._way: Version1 | Version2 | None = None
        # Only root of the initial user namespace sets device rules; where we can't, the runtime could not.
        if not cgroupfs.rootless():
            self._place = place = cgroupfs.find(pid)
            self._way = Version1(place, pid, rules) if place.version == 1 else Version2(place, pid, rules, devices)

    def prepare(self, nodes: list[Node]) -> None:
        """Find out what is missing for these character devices (major, minor), and get it ready."""
        if self._place is None or self._way is None:
            return
        self._way.prepare(nodes)
        if self._way.change and self._place.in_scope():
            what = "is a systemd scope: a daemon-reload takes the device rules of the GPUs away again"
            self.warnings.append(f"{self._place.folder} {what}; {SHIM_OR_CDI}")

    def apply(self) -> None:
        """Allow the nodes."""
        if self._way is not None:
            self._way.apply()

    def undo(self) -> None:
        """Leave the rules as they were before `apply`, also where that failed half-way or was never called."""
        if self._way is not None:
            self._way.undo()

    def close(self) -> None:
        """Close what is open; `undo` needs it."""
        if self._way is not None:
            self._way.close()

    def describe(self) -> str:
        """What `apply` does after this `prepare`, in one line."""
        if self._place is None or self._way is None:
            return "no device cgroup is in force"
        return f"{self._place.folder}: {self._way.change or 'nothing to do'}"


def rule_text(node: Node) -> str:
    """The rule that a node gets, as devices.allow takes it and messages name it."""
    return f"c {node[0]}:{node[1]} rw"


def close(*descriptors: int) -> None:
    """Close what is open; -1 stands for nothing."""
    for fd in descriptors:
        if fd >= 0:
            posix.close(fd)


class Version1:
    """Rules as text, one a write: of two lines in one write the kernel drops the second without a word."""

    __slots__ = ("_allow", "_deny", "_done", "_folder", "_missing", "_name", "_rules", "change")

    def __init__(self, place: Place, pid: int, rules: Sequence[dict[str, Any]]) -> None:
        self.change = ""
        self._name = place.folder
        self._rules = rules
        # The letters that each node lacks; the nodes for which they have been written.
        self._missing: list[tuple[Node, int]] = []
        self._done: list[tuple[Node, int]] = []
        self._allow = self._deny = -1
        self._folder = cgroupfs.open_own(place.folder, pid)

    def prepare(self, nodes: list[Node]) -> None:
        """Compare with the rules in force."""
        table = self._table()
        try:
            lacking = [(node, table.lacks(*node)) for node in sorted(set(nodes))]
        except devicefilter.InvalidDeviceRule as error:
            what = f"cannot allow GPU devices in {self._name}: {error}"
            raise NvhookError(what, "deny less in linux.resources.devices of config.json") from error
        self._missing = [(node, access) for node, access in lacking if access]
        self.change = ", ".join(f"allow {rule_text(node)}" for node, _ in self._missing)
        if self._missing:
            self._open_writing()

    def _table(self) -> devicefilter.Table:
        """The rules in force. Of a cgroup that allows by default the kernel doesn't list what it denies."""
        listed = devicefilter.listed(cgroupfs.read(f"{self._name}/devices.list"))
        if not listed.default:
            return listed
        try:
            wanted = devicefilter.table(self._rules)
        except devicefilter.InvalidDeviceRule as error:
            raise NvhookError(f"config.json: {error}", "report this to whoever writes config.json") from error
        return wanted if wanted.default else listed

    def _open_writing(self) -> None:
        if cgroupfs.find("self").folder == self._name:
            what = f"the container shares the cgroup {self._name} with its runtime, so its device rules are not its own"
            raise NvhookError(what, "give the container a cgroup of its own")
        try:
            flags = posix.O_WRONLY | posix.O_CLOEXEC
            self._allow = posix.open("devices.allow", flags, dir_fd=self._folder)
            self._deny = posix.open("devices.deny", flags, dir_fd=self._folder)
        except OSError as error:
            what = f"cannot open the device rules of {self._name}: {error.strerror}"
            raise NvhookError(what, f"mount the cgroup file system writable, or {SHIM_OR_CDI}") from error

    def apply(self) -> None:
        """Write the rules."""
        for node, access in self._missing:
            try:
                posix.write(self._allow, rule_text(node).encode())
            except OSError as error:
                what = f"cannot allow {rule_text(node)} in {self._name}: {error.strerror}"
                remedy = SHIM_OR_CDI
                if error.errno == errno.EPERM:
                    what = f"{what}: the parent cgroup forbids it"
                    remedy = "allow the device in the cgroups above, and give the runtime CAP_SYS_ADMIN"
                raise NvhookError(what, remedy) from error
            self._done.append((node, access))

    def undo(self) -> None:
        """Take back the letters that were not there before."""
        while self._done:
            (major, minor), access = self._done.pop()
            rule = f"c {major}:{minor} {devicefilter.access_letters(access)}"
            try:
                posix.write(self._deny, rule.encode())
            except OSError as error:
                raise kernel.error(f"deny {rule}", error.errno or errno.EIO, f"{self._name}/devices.deny") from error

    def close(self) -> None:
        """Close the cgroup's files."""
        close(self._folder, self._allow, self._deny)
        self._folder = self._allow = self._deny = -1


class Version2:
    """A program that decides: the runtime's is replaced by ours, which is the same with our rules in front."""

    __slots__ = (
        "_cgroup",
        "_devices",
        "_effective",
        "_new",
        "_nodes",
        "_old",
        "_own",
        "_place",
        "_replaced",
        "_rules",
        "change",
    )

    def __init__(
        self, place: Place, pid: int, rules: Sequence[dict[str, Any]], devices: Sequence[dict[str, Any]]
    ) -> None:
        self.change = ""
        self._place = place
        self._rules = rules
        self._devices = devices
        self._nodes: list[Node] = []
        # The container's own cgroups by folder; under systemd crun from 1.23 has its filter on the scope.
        self._own = {place.folder: cgroupfs.open_own(place.folder, pid)}
        if place.in_crun_scope():
            scope = place.folder.rpartition("/")[0]
            self._own[scope] = cgroupfs.open_folder(scope)
        # Descriptors: the cgroup that has the runtime's program (one of _own), that program, and ours.
        self._cgroup = self._old = self._new = -1
        self._effective: set[int] = set()
        self._replaced = False

    def prepare(self, nodes: list[Node]) -> None:
        """Recognise the runtime's program, load ours. Raises NvhookError if any other may deny the nodes."""
        self._nodes = nodes
        for _ in range(ATTEMPTS):
            try:
                self._look()
                return
            except FileNotFoundError:
                # A program was detached between its id and its descriptor.
                continue
            except OSError as error:
                raise self._error(error) from error
        raise self._unsteady()

    def _look(self) -> None:
        close(self._old, self._new)
        self._cgroup = self._old = self._new = -1
        self.change = ""
        effective, _ = bpf.query(self._own[self._place.folder], effective=True)
        self._effective = set(effective)
        programs: list[bpf.Program] = []
        try:
            programs += (bpf.Program(identity) for identity in effective)
            self._choose(programs)
        finally:
            close(*(program.fd for program in programs if program.fd != self._old))

    def _choose(self, programs: list[bpf.Program]) -> None:
        """Find the runtime's program among those in force, and make ours of it. No program: all is allowed."""
        for folder, cgroup in self._own.items():
            ids, flags = bpf.query(cgroup)
            for program in programs:
                found = self._recognise(program) if program.id in ids else None
                if found is not None:
                    self._check_open([other for other in programs if other is not program])
                    made, missing = found
                    if missing and not flags & bpf.F_ALLOW_MULTI:
                        raise NvhookError(f"the device filter of {folder} allows no other in its place", SHIM_OR_CDI)
                    if missing:
                        self._make(cgroup, program, made, missing)
                    return
        self._check_open(programs)

    def _make(self, cgroup: int, program: bpf.Program, made: devicefilter.Filter, missing: list[Node]) -> None:
        self._new = bpf.load(made.extended(missing))
        self._cgroup, self._old = cgroup, program.fd
        rules = ", ".join(rule_text(node) for node in missing)
        self.change = f"replace the filter of {made.runtime} by itself with {rules}"

    def _recognise(self, program: bpf.Program) -> tuple[devicefilter.Filter, list[Node]] | None:
        """If a program is the runtime's: what it does, and the nodes that it doesn't allow.

        None of these are left if it is the one that an earlier run of nvhook put in the place of the runtime's.
        """
        try:
            for made in devicefilter.filters(self._rules, self._devices):
                missing = made.missing(self._nodes)
                again = program.name == bpf.NAME and bool(missing)
                if program.tag == bpf.tag(made.extended(missing) if again else made.program()):
                    return made, [] if again else missing
        except devicefilter.InvalidDeviceRule:
            # No runtime that we know starts with such rules, so the program is of one that we don't know.
            pass
        return None

    def _check_open(self, programs: list[bpf.Program]) -> None:
        """Raises NvhookError unless each program certainly allows the nodes.

        Certain are those that allow everything, as of privileged containers, and those that decide for ourselves
        too, if we may open the nodes: an engine that runs in a container has the outer container's filter above.
        """
        if not programs:
            return
        tags = {bpf.tag(made.program()) for made in devicefilter.open_filters()}
        suspects = [program for program in programs if program.tag not in tags]
        if suspects and not (self._decide_for_us(suspects) and cgroupfs.may_open(self._nodes)):
            raise self._foreign(suspects[0])

    def _decide_for_us(self, programs: list[bpf.Program]) -> bool:
        try:
            cgroup = cgroupfs.open_folder(cgroupfs.find("self").folder)
        except NvhookError:
            return False
        try:
            return {program.id for program in programs} <= set(bpf.query(cgroup, effective=True)[0])
        finally:
            posix.close(cgroup)

    def _foreign(self, program: bpf.Program) -> NvhookError:
        folder = self._holder(program.id)
        if program.name == bpf.NAME and folder in self._own:
            what = f"an earlier run of nvhook allowed other devices in {folder} than are asked for now"
            return NvhookError(what, "register nvhook once only, and start the container again")
        name = f" {program.name!r}" if program.name else ""
        what = f"the device filter{name} (program {program.id}) of {folder} may forbid the GPU's devices"
        if folder in self._own:
            return NvhookError(f"{what}: it is not the runtime's own for this config.json", SHIM_OR_CDI)
        return NvhookError(f"{what}: it is above the container's cgroup", f"{SHIM_OR_CDI}; and let it allow them too")

    def _holder(self, identity: int) -> str:
        """The folder of the cgroup that a program is attached to, for messages."""
        folder = self._place.folder
        while folder.startswith(self._place.mount):
            try:
                cgroup = posix.open(folder, cgroupfs.FOLDER)
                ids, _ = bpf.query(cgroup)
                posix.close(cgroup)
            except OSError:
                break
            if identity in ids:
                return folder
            folder = folder.rpartition("/")[0]
        return f"a cgroup above {self._place.mount}"

    def apply(self) -> None:
        """Put ours in the runtime's place."""
        for _ in range(ATTEMPTS):
            if self._new < 0:
                return
            try:
                self._swap(self._old, self._new)
                self._replaced = True
                self._check_result()
                return
            except FileNotFoundError:
                # Replaced by somebody else since we looked.
                self.prepare(self._nodes)
            except OSError as error:
                raise self._error(error) from error
        raise self._unsteady()

    def _swap(self, old: int, new: int) -> None:
        try:
            bpf.replace(self._cgroup, old, new)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Linux before 5.6 can't replace.
            bpf.add_then_drop(self._cgroup, old, new)

    def _check_result(self) -> None:
        after = set(bpf.query(self._own[self._place.folder], effective=True)[0])
        ours, old = bpf.look(self._new)[0], bpf.look(self._old)[0]
        if ours not in after or after - self._effective - {ours} or old in after:
            raise self._unsteady()

    def undo(self) -> None:
        """Put the runtime's program back in its place."""
        if self._replaced:
            self._replaced = False
            try:
                self._swap(self._new, self._old)
            except FileNotFoundError:
                # Somebody replaced ours; that theirs stays is right.
                pass

    def close(self) -> None:
        """Close the cgroups and programs."""
        close(self._old, self._new, *self._own.values())
        self._cgroup = self._old = self._new = -1
        self._own = {}

    def _error(self, error: OSError) -> NvhookError:
        """Words for what bpf(2) said."""
        what = f"cannot see to the device filter of {self._place.folder}: {error.strerror}"
        if error.errno == errno.EPERM:
            return NvhookError(what, "give the runtime CAP_SYS_ADMIN, or CAP_BPF and CAP_NET_ADMIN")
        return NvhookError(what, SHIM_OR_CDI)

    def _unsteady(self) -> NvhookError:
        what = f"the device filter of {self._place.folder} is being changed by something else"
        return NvhookError(what, f"start the container again, or {SHIM_OR_CDI}")

# SPDX-License-Identifier: Apache-2.0
"""Device rules and the programs that stand for them on cgroup version 2: bytes in, bytes out.

Hot. A runtime turns config.json's `linux.resources.devices` and rules of its own into one BPF program of type
cgroup device, each runtime in its own way. `filters` rebuilds what each would have attached, instruction for
instruction, so that the kernel's tag of an attached program tells whose it is; `Filter.extended` is the same
program with rules of ours in front. Nothing is ever read back from a program.

As read in runc from 1.1.5 (libcontainer/cgroups/devices, specconv) and crun from 1.0 (ebpf.c,
cgroup-resources.c); runc 1.1.5, 1.1.15 and crun 1.21 were run. Instructions: linux/bpf.h, Linux 4.15.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any

# linux/bpf.h: BPF_DEVCG_DEV_*, BPF_DEVCG_ACC_*.
BLOCK = 1
CHAR = 2
MKNOD = 1
READ = 2
WRITE = 4
READ_WRITE = READ | WRITE
EVERYTHING = MKNOD | READ | WRITE
# In place of a kind, a major or a minor number.
ANY = -1

KINDS = {"a": ANY, "b": BLOCK, "c": CHAR}
LETTERS = (("r", READ), ("w", WRITE), ("m", MKNOD))


class InvalidDeviceRule(ValueError):
    """A device rule that the runtime in question would not have started a container with."""


class Rule:
    """One line of a list: who matches (kind, major, minor, each possibly ANY), and what becomes of the access."""

    __slots__ = ("access", "allow", "kind", "major", "minor")

    def __init__(self, kind: int, major: int, minor: int, access: int, allow: bool = True) -> None:
        self.kind = kind
        self.major = major
        self.minor = minor
        self.access = access
        self.allow = allow

    def matches(self, kind: int, major: int, minor: int) -> bool:
        """Whether the rule is about this device."""
        same_numbers = (self.major < 0 or self.major == major) and (self.minor < 0 or self.minor == minor)
        return same_numbers and self.kind in (ANY, kind)

    def unconditional(self) -> bool:
        """Whether every access to every device matches."""
        return self.kind == ANY and self.access == EVERYTHING and self.major < 0 and self.minor < 0


def access_mask(letters: str) -> int:
    """The bits of an access string such as `rwm`."""
    mask = 0
    for letter, bit in LETTERS:
        if letter in letters:
            mask |= bit
    return mask


def access_letters(mask: int) -> str:
    """The access string of some bits, as devices.allow takes it."""
    return "".join(letter for letter, bit in LETTERS if mask & bit)


def read_rule(rule: dict[str, Any]) -> Rule:
    """A member of config.json's `linux.resources.devices`. Raises InvalidDeviceRule.

    No type means every kind, no number any number, and null is the same as absent.
    """
    kind, access = rule.get("type") or "a", rule.get("access") or ""
    if not isinstance(kind, str) or not isinstance(access, str):
        raise InvalidDeviceRule(f"device rule {rule!r}: type and access must be strings")
    return Rule(
        KINDS.get(kind[0], CHAR),
        _number(rule, "major"),
        _number(rule, "minor"),
        access_mask(access),
        rule.get("allow") is True,
    )


def _number(rule: dict[str, Any], name: str) -> int:
    value = rule.get(name)
    if value is None:
        return ANY
    if type(value) is not int or not -(1 << 31) <= value < 1 << 32:
        raise InvalidDeviceRule(f"device rule {rule!r}: {name} must be a device number")
    return value


class Default:
    """A device that runtimes allow without being asked. runc takes it off its list when config.json's
    `linux.devices` names `path`."""

    __slots__ = ("path", "rule")

    def __init__(self, path: str, kind: int, major: int, minor: int, access: int = EVERYTHING) -> None:
        self.path = path
        self.rule = Rule(kind, major, minor, access)


TUN = Default("", CHAR, 10, 200)
CONSOLE = Default("", CHAR, 5, 1)
# In crun's order; runc sorts its own. The first two let a container make any node, which opens none.
DEFAULTS = (
    Default("", CHAR, ANY, ANY, MKNOD),
    Default("", BLOCK, ANY, ANY, MKNOD),
    Default("/dev/null", CHAR, 1, 3),
    Default("/dev/random", CHAR, 1, 8),
    Default("/dev/full", CHAR, 1, 7),
    Default("/dev/tty", CHAR, 5, 0),
    Default("/dev/zero", CHAR, 1, 5),
    Default("/dev/urandom", CHAR, 1, 9),
    CONSOLE,
    Default("", CHAR, 136, ANY),
    Default("", CHAR, 5, 2),
    TUN,
)


class Table:
    """What cgroup version 1 makes of a list of rules: a default, and exceptions from it.

    The kernel's devices controller (security/device_cgroup.c), which runc imitates for version 2: a rule for
    every kind starts afresh; others add letters to an exception or take letters from it.
    """

    __slots__ = ("default", "exceptions")

    def __init__(self, default: bool = False) -> None:
        self.default = default
        self.exceptions: dict[tuple[int, int, int], int] = {}

    def add(self, rule: Rule) -> None:
        """Apply one rule."""
        if rule.kind == ANY:
            self.default = rule.allow
            self.exceptions.clear()
            return
        key = (rule.kind, rule.major, rule.minor)
        before = self.exceptions.get(key, 0)
        if rule.allow != self.default:
            self.exceptions[key] = before | rule.access
        elif before & ~rule.access:
            self.exceptions[key] = before & ~rule.access
        else:
            self.exceptions.pop(key, None)

    def punches_hole(self, rule: Rule) -> bool:
        """Whether a rule takes from an exception that is wider than it; the kernel ignores that silently."""
        if rule.kind == ANY or rule.allow != self.default:
            return False
        key = (rule.kind, rule.major, rule.minor)
        wider = [(rule.kind, *numbers) for numbers in ((ANY, rule.minor), (rule.major, ANY), (ANY, ANY))]
        return any(self.exceptions.get(other, 0) & rule.access for other in wider if other != key)

    def lacks(self, major: int, minor: int) -> int:
        """The letters of `rw` that a rule for exactly this character device has to add; 0 if it may be opened.

        The kernel lets one exception decide, it adds none up. Raises InvalidDeviceRule where no rule can help.
        """
        exact = self.exceptions.get((CHAR, major, minor), 0)
        matching = [access for key, access in self.exceptions.items() if Rule(*key, access).matches(CHAR, major, minor)]
        if not self.default:
            return 0 if any(access & READ_WRITE == READ_WRITE for access in matching) else READ_WRITE & ~exact
        if sum(1 for access in matching if access & READ_WRITE) > (1 if exact & READ_WRITE else 0):
            raise InvalidDeviceRule(f"a rule denies more devices than c {major}:{minor}, and no rule can except one")
        return exact & READ_WRITE


class Filter:
    """A program, as the list of rules that it walks: the first one that matches decides.

    `move` is the opcode that sets the result. Without a `default` the last rule is an unconditional one.
    """

    __slots__ = ("default", "move", "rules", "runtime")

    def __init__(self, runtime: str, move: int, rules: list[Rule], default: bool | None) -> None:
        self.runtime = runtime
        self.move = move
        self.rules = rules
        self.default = default

    def allows(self, major: int, minor: int) -> bool:
        """Whether a process may open a character device for reading, for writing, and for both at once.

        Open for both asks for both bits in one go, and a rule that has only one of them doesn't match.
        """
        return all(self._decides(major, minor, access) for access in (READ, WRITE, READ_WRITE))

    def _decides(self, major: int, minor: int, access: int) -> bool:
        for rule in self.rules:
            if rule.matches(CHAR, major, minor) and access & rule.access == access:
                return rule.allow
        return bool(self.default)

    def program(self) -> bytes:
        """The instructions that the runtime would have loaded."""
        return HEADER + self._body()

    def missing(self, nodes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of these character devices that the program doesn't allow, sorted, each once."""
        return [node for node in sorted(set(nodes)) if not self.allows(*node)]

    def extended(self, nodes: list[tuple[int, int]]) -> bytes:
        """The same program, which allows reading and writing of these character devices first.

        Every other access is decided as before, by the same instructions.
        """
        ours = [block(Rule(CHAR, major, minor, READ_WRITE), self.move) for major, minor in nodes]
        return HEADER + b"".join(ours) + self._body()

    def _body(self) -> bytes:
        blocks = [block(rule, self.move) for rule in self.rules]
        if self.default is not None:
            blocks.append(result(self.default, self.move))
        return b"".join(blocks)


# Opcodes, linux/bpf.h: class, operation and source of the operand.
LOAD_WORD = 0x61
AND = 0x54
SHIFT_RIGHT = 0x74
MOVE_REGISTER = 0xBC
MOVE = 0xB7
MOVE_32 = 0xB4
JUMP_UNLESS_EQUAL = 0x55
JUMP_UNLESS_REGISTERS_EQUAL = 0x5D
EXIT = 0x95

# The access is in one word with the kind, below it; the device numbers follow (struct bpf_cgroup_dev_ctx).
RESULT, CONTEXT, KIND, ACCESS, MAJOR, MINOR = range(6)


def instruction(code: int, target: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    """One instruction (struct bpf_insn). Jumps count from the next one."""
    return struct.pack("=BBhI", code, target | source << 4, offset, value & 0xFFFFFFFF)


# Both runtimes have it from systemd's filter, in this order.
HEADER = b"".join(
    (
        instruction(LOAD_WORD, KIND, CONTEXT, 0),
        instruction(AND, KIND, value=0xFFFF),
        instruction(LOAD_WORD, ACCESS, CONTEXT, 0),
        instruction(SHIFT_RIGHT, ACCESS, value=16),
        instruction(LOAD_WORD, MAJOR, CONTEXT, 4),
        instruction(LOAD_WORD, MINOR, CONTEXT, 8),
    )
)


def result(allow: bool, move: int) -> bytes:
    """Set the answer and leave."""
    return instruction(move, RESULT, value=int(allow)) + instruction(EXIT)


def block(rule: Rule, move: int) -> bytes:
    """One rule: jump to the next block unless everything matches, else give the answer."""
    # (opcode, registers, operand) of what comes before the answer; None jumps nowhere.
    steps: list[tuple[int, int, int, int]] = []
    if rule.kind != ANY:
        steps.append((JUMP_UNLESS_EQUAL, KIND, 0, rule.kind))
    if rule.access != EVERYTHING:
        steps.append((MOVE_REGISTER, CONTEXT, ACCESS, 0))
        steps.append((AND, CONTEXT, 0, rule.access))
        steps.append((JUMP_UNLESS_REGISTERS_EQUAL, CONTEXT, ACCESS, 0))
    if rule.major >= 0:
        steps.append((JUMP_UNLESS_EQUAL, MAJOR, 0, rule.major))
    if rule.minor >= 0:
        steps.append((JUMP_UNLESS_EQUAL, MINOR, 0, rule.minor))
    jumps = (JUMP_UNLESS_EQUAL, JUMP_UNLESS_REGISTERS_EQUAL)
    code = []
    for place, (opcode, target, source, value) in enumerate(steps):
        # Two instructions of the answer are between the last step and the next block.
        offset = len(steps) - place + 1 if opcode in jumps else 0
        code.append(instruction(opcode, target, source, offset, value))
    return b"".join(code) + result(rule.allow, move)


def filters(rules: Sequence[dict[str, Any]], devices: Sequence[dict[str, Any]]) -> Iterator[Filter]:
    """What each runtime would attach for config.json's `linux.resources.devices` and `linux.devices`.

    Likeliest first; a runtime that refuses such rules is left out. Raises InvalidDeviceRule where all do.
    """
    wanted = [read_rule(rule) for rule in rules]
    paths = {device.get("path") for device in devices}
    makers: tuple[Callable[[], Filter], ...] = (
        lambda: _runc("runc", wanted, paths, tun=True),
        lambda: _crun("crun 1.20 or later", wanted, tun=True, terminator=True),
        lambda: _runc("runc 1.2.0 to 1.2.3", wanted, paths, tun=False),
        lambda: _crun("crun 1.18 or 1.19", wanted, tun=False, terminator=True),
        lambda: _crun("crun 1.5 to 1.17", wanted, tun=False, terminator=False),
        lambda: _crun("crun before 1.5", wanted, tun=True, terminator=False),
    )
    seen = set()
    for make in makers:
        try:
            made = make()
        except InvalidDeviceRule:
            continue
        program = made.program()
        if program not in seen:
            seen.add(program)
            yield made


def open_filters() -> Iterator[Filter]:
    """The runtimes' filters of containers that may open every device (`--privileged`)."""
    return filters([{"allow": True, "access": "rwm"}], [])


def table(rules: Sequence[dict[str, Any]]) -> Table:
    """cgroup version 1's reading of `linux.resources.devices`. Raises InvalidDeviceRule."""
    made = Table()
    for rule in rules:
        made.add(read_rule(rule))
    return made


def listed(text: str) -> Table:
    """The table that a version 1 cgroup shows in devices.list; of one that allows by default, no exceptions."""
    made = Table()
    for line in text.splitlines():
        kind, numbers, access = line.split(" ")
        major, _, minor = numbers.partition(":")
        made.add(Rule(KINDS[kind], _listed_number(major), _listed_number(minor), access_mask(access)))
    return made


def _listed_number(text: str) -> int:
    return ANY if text == "*" else int(text)


def _runc(runtime: str, wanted: list[Rule], paths: set[Any], tun: bool) -> Filter:
    """runc: the emulated table, sorted, behind a default; a rule that punches a hole is an error."""
    defaults = [
        default.rule
        for default in DEFAULTS
        if default is not CONSOLE and (tun or default is not TUN) and not (default.path and default.path in paths)
    ]
    made = Table()
    for rule in wanted + defaults:
        if made.punches_hole(rule):
            raise InvalidDeviceRule(f"runc refuses a rule for {rule.major}:{rule.minor} inside a wider one")
        made.add(rule)
    ordered = sorted((major, minor, kind) for kind, major, minor in made.exceptions)
    # Kinds sort by their letters, b before c, as BLOCK does before CHAR.
    listed = [
        Rule(kind, major, minor, made.exceptions[kind, major, minor], not made.default)
        for major, minor, kind in ordered
    ]
    return Filter(runtime, MOVE_32, listed, made.default)


def _crun(runtime: str, wanted: list[Rule], tun: bool, terminator: bool) -> Filter:
    """crun: the list backwards, its defaults being the end of the list; so the last rule that matches wins."""
    # From 1.18 its loop begins at the entry that only ends its table: c 0:0, no access, which nothing matches.
    listed = [Rule(CHAR, 0, 0, 0)] if terminator else []
    listed += [default.rule for default in reversed(DEFAULTS) if tun or default is not TUN]
    for rule in reversed(wanted):
        listed.append(rule)
        if rule.unconditional():
            return Filter(runtime, MOVE, listed, None)
    return Filter(runtime, MOVE, listed, False)

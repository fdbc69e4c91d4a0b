# SPDX-License-Identifier: Apache-2.0
"""Device rules and filters: what the programs decide, by an interpreter of the few instructions they have."""

from __future__ import annotations

import copy
import itertools
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hook import devicefilter
from hook.devicefilter import ANY, BLOCK, CHAR, EVERYTHING, MKNOD, READ, READ_WRITE, WRITE, Filter, Rule, Table

RUNC = ("runc", "runc 1.2.0 to 1.2.3")
CRUN = ("crun 1.20 or later", "crun 1.18 or 1.19", "crun 1.5 to 1.17", "crun before 1.5")
DENY_ALL = {"allow": False, "access": "rwm"}
ALLOW_ALL = {"allow": True, "access": "rwm"}

# What the kernel asks about: making a node, and the three ways of opening one.
ACCESSES = (MKNOD, READ, WRITE, READ_WRITE)
# Ours, its neighbours, those that the runtimes allow by themselves, and some that nobody does.
NUMBERS = (
    *((195, 0), (195, 1), (195, 255), (10, 229), (1, 1), (9, 3), (200, 10)),
    *((1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2), (136, 0), (136, 7), (10, 200), (0, 0)),
)
REQUESTS = [(kind, *node, access) for kind in (BLOCK, CHAR) for node in NUMBERS for access in ACCESSES]


def interpret(program: bytes, kind: int, major: int, minor: int, access: int) -> int:
    """Run a program as the kernel does, on registers of 64 bits, and return r0. Jumps may not leave it."""
    context = struct.pack("=III", access << 16 | kind, major, minor)
    registers = {1: 0}
    instructions = [struct.unpack_from("=BBhi", program, place) for place in range(0, len(program), 8)]
    place = 0
    while True:
        code, both, offset, value = instructions[place]
        target, source = both & 15, both >> 4
        place += 1
        match code:
            case 0x61:
                registers[target] = struct.unpack_from("=I", context, registers[source] + offset)[0]
            case 0x54:
                registers[target] = registers[target] & value & 0xFFFFFFFF
            case 0x74:
                registers[target] = (registers[target] & 0xFFFFFFFF) >> value
            case 0xBC:
                registers[target] = registers[source] & 0xFFFFFFFF
            case 0xB7 | 0xB4:
                registers[target] = value
            case 0x55:
                place += offset if registers[target] != value else 0
            case 0x5D:
                place += offset if registers[target] != registers[source] else 0
            case 0x95:
                return registers[0]
            case _:
                raise AssertionError(f"opcode {code:#x}")


def decisions(program: bytes) -> dict[tuple[int, int, int, int], bool]:
    """What a program says to every request."""
    return {request: interpret(program, *request) == 1 for request in REQUESTS}


def named(rules: list[dict[str, Any]], devices: list[dict[str, Any]] | None = None) -> dict[str, Filter]:
    """The filters by runtime; those that are the same for two runtimes under the first one's name."""
    return {made.runtime: made for made in devicefilter.filters(rules, devices or [])}


def device_rule(
    kind: str | None = None, major: int | None = None, minor: int | None = None, access: str = "rwm", allow: bool = True
) -> dict[str, Any]:
    """A member of linux.resources.devices; None is left out."""
    numbers = {"type": kind, "major": major, "minor": minor}
    return {"allow": allow, "access": access} | {name: value for name, value in numbers.items() if value is not None}


majors = st.sampled_from((None, -1, 1, 5, 10, 136, 195))
minors = st.sampled_from((None, -1, 0, 1, 3, 200, 229))
letters = st.sampled_from(("r", "w", "m", "rw", "wr", "rm", "wm", "rwm", "mrw"))
lists = st.lists(
    st.builds(device_rule, st.sampled_from((None, "a", "b", "c", "c", "c")), majors, minors, letters, st.booleans()),
    max_size=8,
)
nodes = st.lists(st.sampled_from(((195, 0), (195, 1), (195, 255), (1, 3))), max_size=4)


class Controller:
    """The devices controller of version 1, after security/device_cgroup.c."""

    def __init__(self) -> None:
        self.allow = True
        self.exceptions: list[list[int]] = []

    def write(self, rule: Rule) -> None:
        """One line to devices.allow or devices.deny."""
        if rule.kind == ANY:
            self.allow, self.exceptions = rule.allow, []
            return
        key = [rule.kind, rule.major, rule.minor]
        for exception in self.exceptions:
            if exception[:3] == key:
                exception[3] = exception[3] & ~rule.access if rule.allow == self.allow else exception[3] | rule.access
                self.exceptions = [one for one in self.exceptions if one[3]]
                return
        if rule.allow != self.allow:
            self.exceptions.append([*key, rule.access])

    def check(self, kind: int, major: int, minor: int, access: int) -> bool:
        """Whether the kernel lets a process have this access."""
        matching = [
            letters
            for one, of_major, of_minor, letters in self.exceptions
            if one == kind and of_major in (ANY, major) and of_minor in (ANY, minor)
        ]
        if self.allow:
            return not any(access & letters for letters in matching)
        return any(access & letters == access for letters in matching)

    def list(self) -> str:
        """devices.list."""
        if self.allow:
            return "a *:* rwm\n"
        lines = [
            f"{'bc'[kind - 1]} {'*' if major == ANY else major}:{'*' if minor == ANY else minor} "
            f"{devicefilter.access_letters(access)}\n"
            for kind, major, minor, access in self.exceptions
        ]
        return "".join(lines)


def defaults(runtime: str) -> list[Rule]:
    """The runtime's own rules, from its release notes."""
    tun = runtime in ("runc", "crun 1.20 or later", "crun before 1.5")
    numbers = [(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2), (136, ANY)]
    numbers += [(5, 1)] if runtime.startswith("crun") else []
    numbers += [(10, 200)] if tun else []
    made = [Rule(CHAR, ANY, ANY, MKNOD), Rule(BLOCK, ANY, ANY, MKNOD)]
    return made + [Rule(CHAR, *pair, EVERYTHING) for pair in numbers]


def by_table(rules: list[Rule], kind: int, major: int, minor: int, access: int) -> bool:
    """runc's reading: version 1's list; but an exception of a list that allows must cover the whole access."""
    controller = Controller()
    controller.write(Rule(ANY, ANY, ANY, EVERYTHING, False))
    for rule in rules:
        controller.write(rule)
    if not controller.allow:
        return controller.check(kind, major, minor, access)
    return not any(
        one == kind and of_major in (ANY, major) and of_minor in (ANY, minor) and access & letters == access
        for one, of_major, of_minor, letters in controller.exceptions
    )


def by_last_match(rules: list[Rule], kind: int, major: int, minor: int, access: int) -> bool:
    """crun's reading: the last rule that covers the access decides; none, it is denied."""
    decided = False
    for rule in rules:
        if rule.matches(kind, major, minor) and access & rule.access == access:
            decided = rule.allow
    return decided


@given(lists)
def test_what_each_runtime_decides(rules: list[dict[str, Any]]) -> None:
    wanted = [devicefilter.read_rule(rule) for rule in rules]
    for runtime, made in named(rules).items():
        every = wanted + defaults(runtime)
        model = by_table if runtime in RUNC else by_last_match
        assert decisions(made.program()) == {request: model(every, *request) for request in REQUESTS}
        allowed = {node: all(model(every, CHAR, *node, access) for access in ACCESSES[1:]) for node in NUMBERS}
        assert {node: made.allows(*node) for node in NUMBERS} == allowed


@given(lists, nodes)
def test_ours_is_the_same_with_more(rules: list[dict[str, Any]], asked: list[tuple[int, int]]) -> None:
    for made in devicefilter.filters(rules, []):
        before = decisions(made.program())
        missing = made.missing(asked)
        assert missing == sorted({node for node in asked if not made.allows(*node)})
        for request, decision in decisions(made.extended(missing)).items():
            kind, major, minor, access = request
            ours = kind == CHAR and (major, minor) in missing and access != MKNOD
            assert decision == (ours or before[request])


def test_without_rules_the_defaults_are_what_is_open() -> None:
    made = named([])
    assert set(made) == {*RUNC, *CRUN}
    for runtime, filter_ in made.items():
        allowed = {
            request[:3]
            for request, decision in decisions(filter_.program()).items()
            if decision and request[3] == READ_WRITE
        }
        usual = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2), (136, 0), (136, 7)}
        usual |= {(5, 1)} if runtime in CRUN else set()
        usual |= {(10, 200)} if runtime in ("runc", CRUN[0], CRUN[3]) else set()
        assert allowed == {(CHAR, *node) for node in usual}
        assert all(decision for request, decision in decisions(filter_.program()).items() if request[3] == MKNOD)


HEADER = """
61 12 0000 00000000
54 02 0000 0000ffff
61 13 0000 00000000
74 03 0000 00000010
61 14 0004 00000000
61 15 0008 00000000
"""


def listing(program: bytes) -> str:
    """A program for people: opcode, registers, offset, operand."""
    lines = [struct.unpack_from("=BBHI", program, place) for place in range(0, len(program), 8)]
    return "".join(f"{code:02x} {both:02x} {offset:04x} {value:08x}\n" for code, both, offset, value in lines)


def test_instructions_of_runc() -> None:
    """Deny by default; letters are checked unless there are all three; a missing number isn't."""
    rules = [Rule(BLOCK, ANY, ANY, MKNOD), Rule(CHAR, 195, 255, EVERYTHING)]
    made = Filter("", devicefilter.MOVE_32, rules, False)
    assert listing(made.program()) == HEADER.lstrip() + (
        "55 02 0005 00000001\nbc 31 0000 00000000\n54 01 0000 00000001\n5d 31 0002 00000000\n"
        "b4 00 0000 00000001\n95 00 0000 00000000\n"
        "55 02 0004 00000002\n55 04 0003 000000c3\n55 05 0002 000000ff\n"
        "b4 00 0000 00000001\n95 00 0000 00000000\n"
        "b4 00 0000 00000000\n95 00 0000 00000000\n"
    )


def test_instructions_of_crun() -> None:
    """A rule for everything ends the program: nothing may follow an exit that is always reached."""
    [made] = [made for made in devicefilter.filters([ALLOW_ALL], []) if made.runtime == CRUN[0]]
    lines = listing(made.program()).splitlines()
    terminator = ["55 02 0007 00000002", "bc 31 0000 00000000", "54 01 0000 00000000", "5d 31 0004 00000000"]
    terminator += ["55 04 0003 00000000", "55 05 0002 00000000", "b7 00 0000 00000001", "95 00 0000 00000000"]
    assert lines[6:14] == terminator
    assert lines[14:17] == ["55 02 0004 00000002", "55 04 0003 0000000a", "55 05 0002 000000c8"]
    assert lines[-4:] == ["b7 00 0000 00000001", "95 00 0000 00000000"] * 2


def test_rules_of_ours_come_first() -> None:
    made = Filter("", devicefilter.MOVE, [], False)
    ours = "55 02 0007 00000002\nbc 31 0000 00000000\n54 01 0000 00000006\n5d 31 0004 00000000\n"
    ours += "55 04 0003 000000c3\n55 05 0002 00000000\nb7 00 0000 00000001\n95 00 0000 00000000\n"
    end = "b7 00 0000 00000000\n95 00 0000 00000000\n"
    assert listing(made.extended([(195, 0)])) == HEADER.lstrip() + ours + end


def test_runc_sorts_by_numbers_then_kind() -> None:
    """A wildcard first; of equal numbers the block device."""
    rules = [device_rule("c", 8, 3), device_rule("b", 8), device_rule("b", None, 3), device_rule("b", 136, 2)]
    rules += [device_rule("c", 136, 2, "r")]
    listed = [(rule.kind, rule.major, rule.minor) for rule in named(rules)["runc"].rules]
    assert listed[:3] == [(BLOCK, ANY, ANY), (CHAR, ANY, ANY), (BLOCK, ANY, 3)]
    assert listed[-6:-3] == [(BLOCK, 8, ANY), (CHAR, 8, 3), (CHAR, 10, 200)]
    assert listed[-3:] == [(CHAR, 136, ANY), (BLOCK, 136, 2), (CHAR, 136, 2)]


def test_runc_refuses_a_hole_in_a_wider_rule() -> None:
    rules = [device_rule("c", 195), device_rule("c", 195, 0, "w", allow=False)]
    assert not set(named(rules)) & set(RUNC)
    # Other letters are no hole.
    rules = [device_rule("c", 195, None, "r"), device_rule("c", 195, 0, "w", allow=False)]
    assert set(RUNC) <= set(named(rules))


def test_a_node_of_linux_devices_takes_a_default_of_runc_away() -> None:
    devices = [{"path": "/dev/zero"}, {"path": "/dev/tty"}, {"path": "/dev/net/tun"}, {}]
    for runtime, made in named([DENY_ALL], devices).items():
        taken = [node for node in ((1, 5), (5, 0), (1, 3), (10, 200)) if not made.allows(*node)]
        assert taken == {"runc": [(1, 5), (5, 0)], RUNC[1]: [(1, 5), (5, 0), (10, 200)]}.get(
            runtime, [(10, 200)] if runtime in CRUN[1:3] else []
        )


def test_open_filters_allow_everything() -> None:
    made = list(devicefilter.open_filters())
    # runc's is the same with and without tun.
    assert [one.runtime for one in made] == ["runc", *CRUN]
    for one in made:
        assert all(decisions(one.program()).values())
        assert one.missing(NUMBERS) == []


@pytest.mark.parametrize(
    "rule",
    [
        {"type": 1},
        {"access": 3},
        {"major": "195"},
        {"minor": 1.5},
        {"minor": True},
        {"major": 1 << 40},
        {"major": -(1 << 40)},
    ],
)
def test_rules_that_are_none(rule: dict[str, Any]) -> None:
    with pytest.raises(devicefilter.InvalidDeviceRule):
        list(devicefilter.filters([{"allow": True, "access": "rwm"} | rule], []))


def test_null_is_the_same_as_absent() -> None:
    empty = {"allow": None, "type": None, "major": None, "minor": None, "access": "rwm"}
    read = devicefilter.read_rule(empty)
    assert (read.kind, read.major, read.minor, read.access, read.allow) == (ANY, ANY, ANY, EVERYTHING, False)


@given(lists)
def test_a_table_is_what_the_kernel_has(rules: list[dict[str, Any]]) -> None:
    controller = Controller()
    for rule in (DENY_ALL, *rules):
        controller.write(devicefilter.read_rule(rule))
    table = devicefilter.table(rules)
    assert table.default == controller.allow
    assert table.exceptions == {(kind, major, minor): access for kind, major, minor, access in controller.exceptions}
    read = devicefilter.listed(controller.list())
    assert read.default == controller.allow
    # Of a list that allows, the kernel doesn't show the exceptions.
    assert read.exceptions == ({} if controller.allow else table.exceptions)


@given(lists)
def test_what_a_table_lacks_is_what_a_rule_has_to_bring(rules: list[dict[str, Any]]) -> None:
    controller = Controller()
    for rule in (DENY_ALL, *rules):
        controller.write(devicefilter.read_rule(rule))
    before = copy.deepcopy(controller.exceptions)

    def opens() -> bool:
        return all(controller.check(CHAR, 195, 0, access) for access in ACCESSES[1:])

    try:
        lacks = devicefilter.table(rules).lacks(195, 0)
    except devicefilter.InvalidDeviceRule:
        controller.write(Rule(CHAR, 195, 0, READ_WRITE, True))
        assert not opens()
        return
    assert opens() == (lacks == 0)
    if lacks:
        controller.write(Rule(CHAR, 195, 0, READ_WRITE, True))
        assert opens()
        controller.write(Rule(CHAR, 195, 0, lacks, False))
        assert sorted(controller.exceptions) == sorted(before)


def test_letters() -> None:
    for size in range(4):
        for some in itertools.combinations("rwm", size):
            assert devicefilter.access_letters(devicefilter.access_mask("".join(some))) == "".join(some)
    assert Table().lacks(195, 0) == READ_WRITE
    assert Table(default=True).lacks(195, 0) == 0

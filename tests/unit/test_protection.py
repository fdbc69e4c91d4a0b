# SPDX-License-Identifier: Apache-2.0
"""When the runtime shim masks /proc/driver/nvidia, and how each runtime reads device rules."""

from __future__ import annotations

from typing import Any

import pytest

from hook import protection

DENY = {"allow": False, "access": "rwm"}
ALL = {"allow": True, "access": "rwm"}
DOCKER = [DENY, {"allow": True, "type": "c", "major": 1, "minor": 3, "access": "rwm"}]


def c(major: int, minor: int, access: str = "rw", allow: bool = True) -> dict[str, Any]:
    return {"allow": allow, "type": "c", "major": major, "minor": minor, "access": access}


# (rules, whether runc opens c 195:0, whether crun does)
RULES: list[tuple[list[dict[str, Any]], bool, bool]] = [
    ([], False, True),
    ([DENY], False, False),
    ([ALL], True, True),
    (DOCKER, False, False),
    ([DENY, c(195, 1)], False, False),
    ([DENY, c(195, 0)], True, True),
    ([DENY, c(195, 0, "r")], True, True),
    ([DENY, c(195, 0, "m")], False, False),
    ([DENY, c(195, -1)], True, True),
    ([DENY, c(-1, -1)], True, True),
    ([DENY, {"allow": True, "type": "c", "access": "rwm"}], True, True),
    ([DENY, {"allow": True, "type": "b", "major": 195, "minor": 0, "access": "rwm"}], False, False),
    ([DENY, c(195, 0), c(195, 0, "rwm", allow=False)], False, False),
    ([ALL, c(195, 0, "rwm", allow=False)], False, False),
    ([ALL, c(195, -1, "rwm", allow=False)], False, False),
    ([ALL, c(195, 0, "w", allow=False)], True, True),
    ([c(195, 0), DENY], False, False),
    ([ALL, DENY], False, False),
]


@pytest.mark.parametrize(("rules", "runc", "crun"), RULES)
def test_rules(rules: list[dict[str, Any]], runc: bool, crun: bool) -> None:
    assert protection.may_open(rules, 195, 0, crun=False) == runc
    assert protection.may_open(rules, 195, 0, crun=True) == crun


INVENTORY = {
    "driver": {"params": {"ModifyDeviceFiles": 1}},
    "nodes": [
        {"role": "control", "gpu": None, "path": "/dev/nvidiactl", "major": 195, "minor": 255},
        {"role": "gpu", "gpu": "a", "path": "/dev/nvidia0", "major": 195, "minor": 0},
        {"role": "gpu", "gpu": "b", "path": "/dev/nvidia1", "major": 195, "minor": 1},
    ],
}


def config(rules: list[dict[str, Any]], bounding: Any = ("CAP_MKNOD",), namespaces: Any = ()) -> dict[str, Any]:
    linux = {"resources": {"devices": rules}, "namespaces": [{"type": name} for name in namespaces]}
    return {"process": {"capabilities": {"bounding": list(bounding)}}, "linux": linux}


def needed(made: dict[str, Any], shown: list[str] | None = None, wanted: str = "auto", crun: bool = False) -> bool:
    mask, why = protection.needed(made, INVENTORY, ["a"] if shown is None else shown, crun, wanted)
    assert why
    return mask


def test_only_where_all_of_it_holds() -> None:
    assert needed(config([ALL]))
    assert needed(config([DENY, c(195, 1)]))
    assert not needed(config([DENY, c(195, 0)]))
    assert not needed(config(DOCKER))
    assert not needed(config([ALL]), ["a", "b"])
    assert not needed(config([ALL], bounding=["CAP_CHOWN"]))
    assert not needed(config([ALL], bounding=["CAP_MKNOD", "CAP_SYS_ADMIN"]))
    assert not needed(config([ALL], namespaces=["user"]))
    assert needed(config([]), crun=True) and not needed(config([]))


def test_what_the_configuration_says() -> None:
    assert needed(config(DOCKER), wanted="always")
    assert not needed(config([ALL]), wanted="never")
    # A mount there would forbid nested containers their proc, whatever anybody wants.
    assert protection.needed(config([ALL]), INVENTORY, None, False, "always")[0] is False


def test_the_hosts_own_parameter() -> None:
    closed = INVENTORY | {"driver": {"params": {"ModifyDeviceFiles": 0}}}
    assert protection.needed(config([ALL]), closed, ["a"], False, "auto")[0] is False


def test_this_process_is_in_the_first_user_namespace_or_not() -> None:
    with open("/proc/self/uid_map", encoding="ascii") as file:
        whole = file.read().split() == ["0", "0", "4294967295"]
    assert protection.in_first_user_namespace() == whole


def test_one_list_of_capabilities() -> None:
    made = config([ALL])
    made["process"]["capabilities"] = ["CAP_MKNOD"]
    assert needed(made)

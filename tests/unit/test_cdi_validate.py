# SPDX-License-Identifier: Apache-2.0
"""cdi.decode, cdi.validate, cdi.advice: what of the library's behaviour the recorded cases leave out."""

from __future__ import annotations

from typing import Any

import pytest

from cdi import advice, decode, report, validate, versions
from tests.cdidata import minimal, with_edits

ALL = list(versions.RELEASES)


def edits(spec: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = validate.check(spec).spec["devices"][0]["containerEdits"]
    return found


def problems(value: Any) -> list[str]:
    return [str(problem) for problem in validate.check(value).problems()]


# --- decoding


@pytest.mark.parametrize("name", ["ENV", "Env", "eNv"])
def test_letter_case_does_not_count(name: str) -> None:
    assert edits(with_edits("0.3.0", **{name: ["A=1"]})) == {"env": ["A=1"]}


def test_the_two_letters_that_go_folds_into_ascii() -> None:
    """The Kelvin sign and the long s; but a sharp s is not two letters."""
    spec = minimal()
    spec["\N{KELVIN SIGN}ind"] = spec.pop("kind")
    spec["device\N{LATIN SMALL LETTER LONG S}"] = spec.pop("devices")
    assert problems(spec) == []
    node = {"path": "/dev/a", "permi\N{LATIN SMALL LETTER SHARP S}ions": "r"}
    assert any("unknown field 'permi\\xdfions'" in text for text in problems(with_edits(deviceNodes=[node])))


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        ({"kind": "aa/bb", "Kind": "cc/dd"}, "aa/bb"),
        ({"Kind": "cc/dd", "kind": "aa/bb"}, "aa/bb"),
        ({"Kind": "cc/dd", "kind": None}, "cc/dd"),
        ({"KIND": None, "kind": "aa/bb"}, "aa/bb"),
    ],
)
def test_of_two_spellings_the_later_in_sorted_order_wins(members: dict[str, Any], kind: str) -> None:
    spec = minimal()
    del spec["kind"]
    assert validate.check(spec | members).spec["kind"] == kind


def test_two_spellings_of_an_object_are_merged_and_of_a_list_are_not() -> None:
    spec = minimal(containerEdits={"env": ["A=1"]}, ContainerEdits={"Env": ["B=1"], "mounts": []})
    assert validate.check(spec).spec["containerEdits"] == {"env": ["A=1"], "mounts": []}
    assert validate.check(minimal(annotations={"a": "1"}, Annotations={"b": "2"})).spec["annotations"] == {
        "a": "1",
        "b": "2",
    }


def test_null_is_absent_and_in_a_list_the_empty_value() -> None:
    hook = {"hookName": "poststop", "path": "/a", "args": [None, "x"], "env": None, "timeout": None}
    mount = {"hostPath": "/a", "containerPath": "/a", "type": None, "options": [None]}
    spec = with_edits("0.7.0", hooks=[hook], mounts=[mount], env=None, additionalGids=[None])
    assert problems(spec) == []
    assert edits(spec) == {
        "hooks": [{"hookName": "poststop", "path": "/a", "args": ["", "x"]}],
        "mounts": [{"hostPath": "/a", "containerPath": "/a", "options": [""]}],
        "additionalGids": [0],
    }
    assert validate.check(minimal(cdiVersion="0.6.0", annotations={"a": None})).spec["annotations"] == {"a": ""}
    assert problems(with_edits(env=[None])) == ["devices[0].containerEdits.env[0]: '' is no NAME=VALUE"]


@pytest.mark.parametrize("name", ["deviceNodes", "mounts", "hooks", "netDevices"])
def test_a_null_object_in_a_list_is_refused_by_all(name: str) -> None:
    checked = validate.check(with_edits("1.1.0", **{name: [None]}))
    assert [str(problem) for problem in checked.problems()] == [
        f"devices[0].containerEdits.{name}[0]: must be an object"
    ]
    assert checked.read_by() == []


def test_places_stay_right_behind_what_is_broken() -> None:
    mounts = [5, {"hostPath": "/a"}, {"hostPath": "/a", "containerPath": "/a", "x": 1, "type": []}]
    place = "devices[0].containerEdits.mounts"
    assert problems(with_edits(mounts=mounts)) == [
        f"{place}[0]: must be an object",
        f"{place}[2]: unknown field 'x'",
        f"{place}[2].type: must be a string",
        f"{place}[1].containerPath: must not be missing or empty",
    ]


def test_what_is_broken_is_not_called_missing_too() -> None:
    assert problems(minimal(kind=[])) == ["kind: must be a string"]
    assert problems(minimal(devices="x")) == ["devices: must be a list"]
    assert problems(with_edits(env="x")) == ["devices[0].containerEdits.env: must be a list"]
    assert problems(minimal(devices=[{"name": {}, "containerEdits": 1}])) == [
        "devices[0].name: must be a string",
        "devices[0].containerEdits: must be an object",
    ]


@pytest.mark.parametrize("value", [None, 1, "x", [], [{}], True])
def test_what_is_no_object_is_no_spec(value: Any) -> None:
    assert problems(value) == ["must be an object"]


def test_the_whole_of_an_empty_object_is_told() -> None:
    assert problems({}) == [
        "cdiVersion: must not be missing or empty",
        "kind: must not be missing or empty",
        "devices: at least one device is needed",
    ]


@pytest.mark.parametrize(
    ("field", "value", "good"),
    [
        ("major", -(2**63), True),
        ("major", -(2**63) - 1, True),
        ("major", -(2**64), False),
        ("major", 2**63, False),
        ("major", 1e18, True),
        ("major", 1e19, False),
        ("minor", True, False),
        ("minor", float("inf"), False),
        ("minor", float("nan"), False),
        ("fileMode", 2**32 - 1, True),
        ("fileMode", -1, False),
        ("uid", 0.0, True),
        ("gid", 0.5, False),
    ],
)
def test_numbers(field: str, value: Any, good: bool) -> None:
    """-2^63-1 is no integer of 64 bits, so Go's YAML makes a double of it, which is -2^63."""
    assert (problems(with_edits(deviceNodes=[{"path": "/a", field: value}])) == []) == good


# --- releases


@pytest.mark.parametrize(
    ("spec", "read_by"),
    [
        (minimal(), ALL),
        (minimal(cdiVersion="v0.3.0"), ALL[1:]),
        (minimal(cdiVersion="0.1.0"), []),
        (minimal(cdiVersion="0.2.0"), []),
        (minimal(kind="a/bb"), ["HEAD"]),
        (minimal(kind="aa/b"), ["HEAD"]),
        (minimal(kind="1/bb"), []),
        (with_edits("0.7.0", intelRdt={"closID": "/"}), ["1.1.0", "HEAD"]),
        (with_edits("0.7.0", intelRdt={"closID": "a\nb"}), []),
        (with_edits("0.7.0", intelRdt={"closID": "\N{SNOWMAN}" * 1365}), ALL[2:]),
        (with_edits("0.7.0", intelRdt={"closID": "\N{SNOWMAN}" * 1366}), []),
        (with_edits("0.7.0", intelRdt={"enableCMT": True}), ["0.7.2", "0.8.1", "1.0.1"]),
        (with_edits("0.7.0", intelRdt={"enableMBM": "x"}), []),
        (with_edits("1.1.0", intelRdt={"schemata": []}), ["1.1.0", "HEAD"]),
        (minimal(devices=[]), ["0.5.4", "0.6.2", "0.7.2", "0.8.1"]),
        (with_edits(deviceNodes=[{"path": "/a", "permissions": "none"}]), ["HEAD"]),
        (with_edits(deviceNodes=[{"path": "/a", "permissions": "none "}]), []),
    ],
)
def test_read_by(spec: dict[str, Any], read_by: list[str]) -> None:
    assert validate.check(spec).read_by() == read_by


def test_too_many_problems_take_no_time_to_find() -> None:
    """Linear, also where each device is broken in its own way: none of this may be looked up in a list."""
    devices = [{"name": "w0", "containerEdits": {"env": [f"{index}"], "x": 1}, "y": []} for index in range(12_000)]
    assert len(problems(minimal(devices=devices))) == 4 * 12_000 - 1


def test_the_newest_release_refuses_all_that_head_refuses() -> None:
    """So what passes our writer, which asks for 1.1.0, is read by what comes after it."""
    for version in versions.KNOWN:
        assert set(versions.too_old_for(version)).isdisjoint(("1.1.0", "HEAD"))
    for unknown_to in decode.UNKNOWN_TO.values():
        assert "HEAD" not in unknown_to or "1.1.0" in unknown_to


# --- warnings and the schema


@pytest.mark.parametrize(
    ("key", "good"),
    [
        ("a", True),
        ("A.b_c-d", True),
        ("acme.test/a", True),
        ("ACME.test/a", True),
        ("", False),
        ("/a", False),
        ("a/", False),
        ("a/b/c", False),
        ("-a", False),
        ("a" * 63, True),
        ("a" * 64, False),
        ("a" * 254 + "/a", False),
        ("acme_test/a", False),
    ],
)
def test_annotation_keys(key: str, good: bool) -> None:
    spec = minimal(cdiVersion="0.6.0", annotations={key: "x"})
    assert problems(spec) == []
    assert (advice.warnings(spec) == []) == good


def test_the_size_of_annotations() -> None:
    for size, count in ((256 * 1024 - 1, 0), (256 * 1024, 1)):
        assert len(advice.warnings(minimal(cdiVersion="0.6.0", annotations={"a": "v" * size}))) == count


def test_a_tmpfs_has_no_path_on_the_host() -> None:
    mount = {"hostPath": "tmpfs", "containerPath": "/a", "type": "tmpfs"}
    assert advice.warnings(with_edits("0.4.0", mounts=[mount])) == []
    assert len(advice.warnings(with_edits("0.4.0", mounts=[mount | {"type": "bind"}]))) == 1


def test_an_interface_has_15_bytes() -> None:
    device = {"hostInterfaceName": "e" * 15, "name": "n" * 16}
    assert [place for place, _ in advice.warnings(with_edits("1.1.0", netDevices=[device]))] == [
        "devices[0].containerEdits.netDevices[0].name"
    ]


def test_the_schema_is_one_and_says_where() -> None:
    import json

    import jsonschema

    jsonschema.Draft7Validator.check_schema(json.loads(report.SCHEMA.read_text()))
    found = report.schema_problems(with_edits(env=["A"], mounts=[{"hostPath": "/a", "containerPath": ""}]))
    assert {place for place, _ in found} == {
        "devices[0].containerEdits.env[0]",
        "devices[0].containerEdits.mounts[0].containerPath",
    }

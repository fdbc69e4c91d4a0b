# SPDX-License-Identifier: Apache-2.0
"""What holds for every spec, text and configuration, by hypothesis."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cdi import advice, decode, inject, jsontext, names, reader, report, source, spec, transform, validate, versions
from ldcache.errors import NvhookError
from tests import cdidata

# No lone surrogates: a name that is no UTF-8 is refused before it is written.
TEXT = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from('\0\n\t\x7f\x85\u2028\ufeff\uffff\U0001f600\\"'),
    max_size=20,
)
WORD = st.text("abcxyz019", min_size=1, max_size=6)
TRICKY = st.sampled_from(["0", "010", "1e3", "yes", "n", "~", "null", "1:20", ".inf", "0x1f", "<<", "=", "!x", "a: b"])
STRING = st.one_of(TEXT, TRICKY)
ENV = st.builds(lambda name, value: f"{name}={value}", WORD, STRING)
UINT32 = st.integers(0, 2**32 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)


def some(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required, optional=optional)


def few(item: st.SearchStrategy[Any], least: int = 0) -> st.SearchStrategy[list[Any]]:
    return st.lists(item, min_size=least, max_size=3)


FULL_TEXT = STRING.filter(bool)
NODE = some(
    {"path": FULL_TEXT},
    {
        "hostPath": STRING,
        "type": st.sampled_from(["", "b", "c", "u", "p"]),
        "major": INT64,
        "minor": INT64,
        "fileMode": UINT32,
        "permissions": st.text("rwm", max_size=4),
        "uid": UINT32,
        "gid": UINT32,
    },
)
HOOK = some(
    {"hookName": st.sampled_from(validate.HOOKS), "path": FULL_TEXT},
    {"args": few(STRING), "env": few(ENV), "timeout": INT64},
)
MOUNT = some({"hostPath": FULL_TEXT, "containerPath": FULL_TEXT}, {"type": STRING, "options": few(STRING)})
NET_DEVICE = some({"hostInterfaceName": WORD, "name": WORD}, {})
RDT = some(
    {},
    {"closID": WORD, "l3CacheSchema": STRING, "schemata": few(STRING), "enableMonitoring": st.booleans()},
)
EDITS = some(
    {},
    {
        "env": few(ENV),
        "deviceNodes": few(NODE),
        "netDevices": st.lists(NET_DEVICE, max_size=1),
        "hooks": few(HOOK),
        "mounts": few(MOUNT),
        "intelRdt": RDT,
        "additionalGids": few(UINT32),
    },
)
ANNOTATIONS = st.dictionaries(STRING, STRING, max_size=3)


def device_of(name: str, edits: dict[str, Any], annotations: dict[str, str] | None) -> dict[str, Any]:
    made: dict[str, Any] = {"name": name, "containerEdits": {**edits, "env": ["A=1", *edits.get("env", [])]}}
    return made if annotations is None else made | {"annotations": annotations}


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """A spec that release 1.1.0 reads, with the version that it needs."""
    device_names = draw(st.lists(WORD, min_size=1, max_size=3, unique=True))
    devices = [device_of(name, draw(EDITS), draw(st.none() | ANNOTATIONS)) for name in device_names]
    made: dict[str, Any] = {"cdiVersion": "", "kind": draw(st.sampled_from(["acme.test/wid", "ab/c.d"]))}
    made["devices"] = devices
    if draw(st.booleans()):
        made["containerEdits"] = draw(EDITS)
    if draw(st.booleans()):
        made["annotations"] = draw(ANNOTATIONS)
    made["cdiVersion"] = versions.minimum_version(made)
    return made


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRING,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRING, inner, max_size=4),
    max_leaves=12,
)

# Objects whose members have a spec's names and anything for values: decoding goes deep before it fails.
FIELDS = st.sampled_from(
    [name for kind in (decode.SPEC, decode.EDITS) for name in kind.fields]
    + ["name", "path", "hostPath", "hookName", "ENV", "Kind", "x"]
)
NEAR = st.recursive(
    JSON, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=5), max_leaves=20
)


@given(specs(), st.sampled_from(["yaml", "json"]))
def test_what_is_written_reads_back(made: dict[str, Any], form: spec.Format) -> None:
    text = spec.serialise(made, form)
    checked = validate.check(reader.parse(text))
    assert checked.spec == made
    assert checked.problems(versions.NEWEST_RELEASE) == checked.problems() == []
    # Serialising what was read gives the same text: nothing is lost or turned round.
    assert spec.serialise(checked.spec, form) == text


@given(specs())
def test_what_is_read_passes_the_schema(made: dict[str, Any]) -> None:
    assert report.schema_problems(made) == []
    assert all(isinstance(text, str) for place, text in advice.warnings(made))


@given(specs())
def test_a_lower_version_is_refused(made: dict[str, Any]) -> None:
    at = versions.KNOWN.index(made["cdiVersion"])
    for lower in versions.KNOWN[:at]:
        assert validate.check(made | {"cdiVersion": lower}).read_by() == []
    for higher in versions.KNOWN[at:]:
        assert versions.HEAD in validate.check(made | {"cdiVersion": higher}).read_by()


@given(NEAR)
def test_any_value_is_judged(value: Any) -> None:
    """Never raises, decodes what it decoded to itself, and never takes what the schema refuses."""
    before = copy.deepcopy(value)
    checked = validate.check(value)
    assert repr(value) == repr(before)
    if not checked.problems():
        assert report.schema_problems(checked.spec) == []
        again = validate.check(checked.spec)
        assert again.spec == checked.spec and again.problems() == []
    assert all(finding.refused_by for finding in checked.findings if "unknown field" not in finding.what)


@given(JSON)
@example(-(2**63) - 1)
@example(2**64)
@example([1e22, -0.0, 5e-324, 1.5e300])
def test_yaml_reads_json_as_json(value: Any) -> None:
    """Where hot code reads a file as JSON and a cold one as YAML, both see the same."""
    text = json.dumps({"a": value})
    try:
        plain = source.plain_json(text.encode())
    except source.NotPlain:
        return
    assert decoded(plain) == decoded(reader.parse(text))


def decoded(value: Any) -> Any:
    """As members of a spec, in which 1 and 1.0 are one: a string and a number of each."""
    hook = {"hookName": "poststop", "path": "/a", "args": [value["a"]], "timeout": value["a"]}
    checked = validate.check(cdidata.with_edits(hooks=[hook]))
    return checked.spec, [problem.where for problem in checked.problems()]


@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        value = reader.parse(data)
    except reader.InvalidText as error:
        assert "\n" not in str(error)
    else:
        validate.check(value)


@given(specs(), st.data())
def test_a_truncated_file_is_no_longer_the_same(made: dict[str, Any], data: st.DataObject) -> None:
    text = spec.serialise(made, "json").rstrip()
    with pytest.raises(reader.InvalidText):
        reader.parse(text[: data.draw(st.integers(0, len(text) - 1))])


@given(specs())
def test_plain_json_of_a_spec_is_judged_alike(made: dict[str, Any]) -> None:
    data = json.dumps(made, ensure_ascii=False).encode()
    try:
        plain = source.plain_json(data)
    except source.NotPlain:
        return
    assert validate.check(plain).spec == validate.check(reader.parse(data)).spec


MEMBERS = st.sampled_from(["process", "linux", "mounts", "hooks", "user", "env", "devices", "resources", "destination"])
OCI = st.dictionaries(
    MEMBERS,
    st.recursive(
        JSON, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(MEMBERS, inner, max_size=3), max_leaves=10
    ),
    max_size=4,
)


@given(OCI, specs())
def test_an_injection_leaves_its_input_and_fails_in_words(oci: dict[str, Any], made: dict[str, Any]) -> None:
    edits = [made.get("containerEdits", {}), *(device["containerEdits"] for device in made["devices"])]
    before, edits_before = repr(oci), repr(edits)
    try:
        result = inject.inject(oci, edits)
    except NvhookError as error:
        assert "\n" not in error.remedy
    else:
        assert jsontext.loads(jsontext.dumps(result)) is not None
        env = result["process"]["env"]
        assert "A=1" in env or any(entry.startswith("A=") for entry in env)
    assert (repr(oci), repr(edits)) == (before, edits_before)


@given(st.lists(ENV, max_size=6), st.lists(ENV, max_size=6, min_size=1))
def test_of_each_variable_the_injected_value_stands(present: list[str], added: list[str]) -> None:
    env = inject.inject({"process": {"env": present}}, [{"env": added}])["process"]["env"]
    last = {entry.partition("=")[0]: entry for entry in added}
    for name, entry in last.items():
        assert [other for other in env if other.partition("=")[0] == name][-1] == entry
    assert [entry for entry in env if entry.partition("=")[0] not in last] == [
        entry for entry in present if entry.partition("=")[0] not in last
    ]


PATHS = st.lists(st.sampled_from(["", ".", "..", "a", "b"]), min_size=1, max_size=5).map("/".join)


@given(specs(), PATHS.map(lambda path: f"/{path}"), st.sampled_from(["host", "container"]))
def test_a_transform_to_the_same_root_changes_nothing(made: dict[str, Any], root: str, side: transform.Side) -> None:
    before = copy.deepcopy(made)
    assert transform.root(made, root, root, side) == before == made


@given(specs(), st.sampled_from(["host", "container"]))
def test_a_transformed_spec_is_one(made: dict[str, Any], side: transform.Side) -> None:
    assert spec.problems(transform.root(made, "/", "/b", side)) == []


@given(st.text(max_size=12) | st.text("aZ0_-.:/=é\n", max_size=12))
def test_a_name_is_three_parts_or_none(name: str) -> None:
    try:
        vendor, device_class, device = names.parse_qualified(name)
    except names.InvalidName:
        return
    assert f"{vendor}/{device_class}={device}" == name and name.isascii() and " " not in name

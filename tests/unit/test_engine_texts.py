# SPDX-License-Identifier: Apache-2.0
"""Engines' files as text: what is set is there, and all else is as it was, to the byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from hook.engines.jsonfile import JsonText
from hook.engines.settings import Edit, Item, Setting
from hook.engines.tomlfile import TomlText
from ldcache.errors import NvhookError

KEYS = ("runtimes", "features", "default-runtime", "other", 'a "quoted" one', "ünï")
LEAVES = st.one_of(
    st.booleans(), st.integers(-9, 9), st.text(max_size=4), st.none(), st.just([]), st.just([1, {"x": 2}])
)
OBJECTS = st.dictionaries(
    st.sampled_from(KEYS), st.one_of(LEAVES, st.dictionaries(st.sampled_from(KEYS), LEAVES, max_size=3)), max_size=4
)
FORMS: list[dict[str, Any]] = [
    {"indent": 4},
    {"indent": 2},
    {"indent": "\t"},
    {},
    {"separators": (",", ":")},
    {"indent": 1, "separators": (" ,", " : ")},
]
NEW = {"path": "/usr/bin/nvhook-runtime"}


def plain(value: dict[str, Any], keys: tuple[str, ...], new: Any) -> dict[str, Any]:
    """What setting a key in a value means."""
    inner = value
    for key in keys[:-1]:
        if inner.get(key) is None:
            inner[key] = {}
        inner = inner[key]
    inner[keys[-1]] = new
    return value


@given(OBJECTS, st.sampled_from(FORMS), st.booleans(), st.sampled_from([("runtimes", "nvidia"), ("features", "cdi")]))
def test_a_member_set_in_any_json(value: dict[str, Any], form: dict[str, Any], crlf: bool, keys: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, **form) + "\n"
    if crlf:
        text = text.replace("\n", "\r\n")
    document = JsonText("f", text)
    parent = value.get(keys[0])
    if parent is not None and not isinstance(parent, dict):
        with pytest.raises(NvhookError, match="is no object"):
            document.set(keys, NEW)
        return
    document.set(keys, NEW)
    made = document.text
    assert json.loads(made) == plain(json.loads(text), keys, NEW)
    assert list(json.loads(made))[: len(value)] == list(value)
    assert ("\r\n" in made) == ("\r\n" in text) or "\n" not in text.strip()
    if parent:
        # What was put in behind something is cut out again, to the byte.
        document.delete(keys)
        assert document.text == text


@given(OBJECTS, st.sampled_from(FORMS), st.sampled_from(KEYS))
def test_a_member_taken_out_of_any_json(value: dict[str, Any], form: dict[str, Any], key: str) -> None:
    text = json.dumps(value, **form)
    document = JsonText("f", text)
    document.delete((key,))
    value.pop(key, None)
    assert document.value() == value
    assert list(document.value()) == list(value)


def test_a_new_member_looks_like_the_others() -> None:
    document = JsonText("f", '{\n  "features": {},\n  "list": [1,   2]\n}')
    document.set(("features", "cdi"), True)
    document.set(("runtimes", "nvidia"), NEW)
    assert document.text == (
        '{\n  "features": {\n    "cdi": true\n  },\n  "list": [1,   2],\n'
        '  "runtimes": {\n    "nvidia": {\n      "path": "/usr/bin/nvhook-runtime"\n    }\n  }\n}'
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{\n  "a": 1,\n  "b"', "line 3 column 6"),
        ("[]", "is no JSON object"),
        ('{"a": 1} x', "line 1 column 10"),
    ],
)
def test_broken_json_is_told_by_its_line(text: str, said: str) -> None:
    with pytest.raises(NvhookError, match=said):
        JsonText("f", text)


def test_the_last_of_two_equal_keys_counts_as_it_does_for_docker() -> None:
    document = JsonText("f", '{"a": 1, "a": 2}')
    document.set(("a",), 3)
    assert document.text == '{"a": 1, "a": 3}'


CRI = "io.containerd.grpc.v1.cri"
RUNTIME = ("plugins", CRI, "containerd", "runtimes", "nvidia")
ENTRY = {"runtime_type": "io.containerd.runc.v2", "options": {"BinaryName": "/usr/bin/nvhook-runtime"}}
TOMLS = [
    "",
    "version = 2\n",
    "# only a comment\n",
    'version = 2\n\n[plugins]\n  [plugins."io.containerd.grpc.v1.cri"]\n    # kept\n    sandbox_image = "x" # kept\n',
    'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]\nruntime_type = "y"',
    'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd]\nruntimes = { runc = { runtime_type = "y" } }\n',
    'plugins."io.containerd.grpc.v1.cri".containerd.snapshotter = "z"\n',
    "[plugins.'io.containerd.grpc.v1.cri'.cni]\nbin_dir = '/x'\n[grpc]\naddress = 'a'\n"
    "[plugins.'io.containerd.grpc.v1.cri'.containerd]\nsnapshotter = 'overlayfs'\n",
]


@pytest.mark.parametrize("text", TOMLS)
@pytest.mark.parametrize("line", ["\n", "\r\n"])
def test_a_table_and_keys_set_in_toml(text: str, line: str) -> None:
    text = text.replace("\n", line)
    document = TomlText("f", text)
    meant = document.value()
    for keys, value in ((RUNTIME, ENTRY), ((*RUNTIME[:3], "default_runtime_name"), "nvidia"), (("imports",), ["/x"])):
        plain(meant, keys, value)
        document.set(keys, value)
    assert tomlkit.parse(document.text).unwrap() == meant
    assert [part for part in text.splitlines() if "#" in part and part not in document.text.splitlines()] == []
    document.delete(("plugins", CRI, "containerd", "runtimes", "nvidia"))
    assert "nvidia" not in document.value()["plugins"][CRI]["containerd"].get("runtimes", {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = 1\nb = \n", "line 2"),
        ("a = 1\na = 2\n", 'f is no TOML: Key "a" already exists'),
        ("a = 1\nb = [1,\n", "f is no TOML: the file ends too early, in line 2$"),
        ("a = 1\nb", "f is no TOML: the file ends too early, in line 2$"),
        ("a = {b = 1", "f is no TOML: the file ends too early, in line 1$"),
        ('a = "x', "f is no TOML: the file ends too early, in line 1$"),
        ("a = '''x\n\n", "f is no TOML: the file ends too early, in line 2$"),
        ("[a", "f is no TOML: the file ends too early, in line 1$"),
        ("a = \0\n", r"Unexpected character: '\\x00' at line 1"),
    ],
)
def test_broken_toml_is_told(text: str, said: str) -> None:
    with pytest.raises(NvhookError, match=said):
        TomlText("f", text)


@given(OBJECTS, st.sampled_from(FORMS), st.booleans())
def test_settings_come_out_as_they_went_in(value: dict[str, Any], form: dict[str, Any], cdi: bool) -> None:
    """Also where somebody has changed the file in between: only our keys go, and what they replaced comes back."""
    for key in ("runtimes", "features"):
        if not isinstance(value.get(key), dict):
            value.pop(key, None)
    # A null is as good as none, and nobody misses it.
    value = {key: item for key, item in value.items() if item is not None}
    before = json.dumps(value, **form)
    settings: list[Setting | Item] = [
        Setting(("runtimes", "nvidia"), NEW, own=True),
        Setting(("default-runtime",), "nvidia", dangling=True),
    ]
    if cdi:
        settings.append(Setting(("features", "cdi"), True))
    edit = Edit("f", JsonText, settings)
    made = edit.apply(before)
    assert edit.apply(made) == made
    later = JsonText("f", made)
    later.set(("theirs",), 1)
    stripped = json.loads(edit.strip(later.text, before))
    assert stripped == {**value, "theirs": 1}

# SPDX-License-Identifier: Apache-2.0
"""Fuzzes JSON as hot code reads it, and the injection into a configuration that an image's author wrote.

`cdi.jsontext` must agree with the json module, and a configuration of any shape must be edited or refused in words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data/cdi"

EDITS: list[dict[str, Any]] = [
    {
        "env": ["A=1", "PATH=/x"],
        "deviceNodes": [{"path": "/dev/acme0", "type": "c", "major": 240, "minor": 1}, {"path": "/dev/null"}],
        "netDevices": [{"hostInterfaceName": "a", "name": "b"}],
        "mounts": [{"hostPath": "/h", "containerPath": "/a/../b", "options": ["rbind"]}],
        "hooks": [{"hookName": "createContainer", "path": "/y", "timeout": 1}],
        "intelRdt": {"closID": "c"},
        "additionalGids": [0, 8],
    }
]


def seeds() -> list[bytes]:
    """What to begin with: every configuration of the recorded injections."""
    return [json.dumps(case["oci_before"]).encode() for case in json.loads((DATA / "inject.json").read_text())]


def TestOneInput(data: bytes) -> None:
    """One round; what it raises is a finding."""
    from cdi import inject, jsontext
    from ldcache.errors import NvhookError

    try:
        value = jsontext.loads(data)
    except jsontext.InvalidJson as error:
        assert str(error)
        assert not is_json(data)
        return
    text = jsontext.dumps(value) if is_finite(value) else ""
    assert not text or repr(jsontext.loads(text)) == repr(value)
    assert repr(json.loads(data.decode())) == repr(value)
    if not isinstance(value, dict):
        return
    before = repr(value)
    try:
        made = inject.inject(value, EDITS)
    except NvhookError as error:
        assert error.what.startswith("config.json: ") and error.remedy
    else:
        assert "A=1" in made["process"]["env"]
    assert repr(value) == before


def is_json(data: bytes) -> bool:
    """Whether the json module takes it; what it takes beyond JSON is not counted."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(data.decode(), parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


def is_finite(value: Any) -> bool:
    """Whether it can be written: 1e999 reads as infinity, for which JSON has no text."""
    return "inf" not in repr(value)

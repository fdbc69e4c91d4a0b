# SPDX-License-Identifier: Apache-2.0
"""Fuzzes the way of a CDI file: bytes, value, spec, and all that is done with one that is valid.

Whatever the bytes are, they are refused in words or become a spec that survives being written and read again.
"""

from __future__ import annotations

import json
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "data/cdi"


def seeds() -> list[bytes]:
    """What to begin with: every text and every spec of which the library's verdict is recorded."""
    texts = [case["text"].encode() for case in json.loads((DATA / "text.json").read_text())]
    return texts + [json.dumps(case["spec"]).encode() for case in json.loads((DATA / "cases.json").read_text())]


def TestOneInput(data: bytes) -> None:
    """One round; what it raises is a finding."""
    from cdi import advice, inject, reader, spec, transform, validate, versions
    from ldcache.errors import NvhookError

    try:
        value = reader.parse(data)
    except reader.InvalidText as error:
        assert "\n" not in str(error)
        return
    checked = validate.check(value)
    assert all(str(finding) for finding in checked.findings)
    compare_plain(data, checked)
    if checked.problems():
        return
    assert versions.HEAD in checked.read_by()
    for form in ("json", "yaml"):
        text = spec.serialise(checked.spec, form, versions.HEAD)
        assert validate.check(reader.parse(text)).spec == checked.spec
    advice.warnings(checked.spec)
    assert spec.problems(transform.root(checked.spec, "/", "/host", "host"), versions.HEAD) == []
    edits = [checked.spec.get("containerEdits", {}), *(device["containerEdits"] for device in checked.spec["devices"])]
    try:
        inject.inject({}, edits)
    except NvhookError as error:
        assert error.what and error.remedy


def compare_plain(data: bytes, checked: object) -> None:
    """What hot code reads as JSON is what YAML makes of it."""
    from cdi import source, validate

    try:
        plain = source.plain_json(data)
    except source.NotPlain:
        return
    # A number beyond a double's range is infinite in JSON and a string in YAML.
    if "inf" not in repr(plain):
        assert isinstance(checked, validate.Checked)
        assert validate.check(plain).spec == checked.spec

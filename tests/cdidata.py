# SPDX-License-Identifier: Apache-2.0
"""The recorded verdicts of the Go library on CDI files (tests/data/cdi), and specs for tests."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent / "data/cdi"


def load(name: str) -> Any:
    """One file of the data."""
    return json.loads((DATA / f"{name}.json").read_text())


def cases() -> list[dict[str, Any]]:
    """All specs with their verdicts, the one included that is too large to be kept as a file."""
    found: list[dict[str, Any]] = load("cases")
    large = dict(next(case for case in found if case["name"] == "anno-0.6.0"))
    return [
        *found,
        large | {"name": "anno-size-over-256k", "spec": large["spec"] | {"annotations": {"a": "v" * 262145}}},
    ]


def minimal(**members: Any) -> dict[str, Any]:
    """A spec that every reader takes, with members put over it."""
    device = {"name": "w0", "containerEdits": {"env": ["A=1"]}}
    return {"cdiVersion": "0.3.0", "kind": "acme.test/widget", "devices": [device], **members}


def with_edits(version: str = "0.3.0", **edits: Any) -> dict[str, Any]:
    """A spec of one device with these edits."""
    return minimal(cdiVersion=version, devices=[{"name": "w0", "containerEdits": edits}])


def comparable(value: Any) -> Any:
    """A JSON value in which what is absent and what is empty are one, as for Go."""
    if isinstance(value, dict):
        return {name: comparable(item) for name, item in value.items() if item not in ([], {}, None)}
    return [comparable(item) for item in value] if isinstance(value, list) else value


def missing_on_host(needs: list[str]) -> str | None:
    """What of `/dev/null c 1:3 mode 0666`, `/etc/passwd regular file`, … is otherwise on this machine."""
    for need in needs:
        path, _, what = need.partition(" ")
        try:
            mode = Path(path).lstat().st_mode
        except OSError:
            return need
        there = {"c": stat.S_ISCHR, "regular": stat.S_ISREG, "symlink": stat.S_ISLNK}[what.split()[0]](mode)
        wanted = int(what.rpartition(" mode ")[2], 8) if " mode " in what else stat.S_IMODE(mode)
        if not there or stat.S_IMODE(mode) != wanted:
            return need
    return None

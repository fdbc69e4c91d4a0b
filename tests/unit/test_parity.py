# SPDX-License-Identifier: Apache-2.0
"""docs/parity.md: each feature once, each claim with a test that there is."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
ROW = re.compile(r"\| ([TL]\d+) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows() -> list[tuple[str, str, str, list[tuple[str, str]]]]:
    """Number, verdict, why, tests."""
    found = []
    for line in (TREE / "docs/parity.md").read_text().splitlines():
        match = ROW.fullmatch(line)
        if match:
            found.append((match[1], match[2], match[3], TEST.findall(match[4])))
    return found


@cache
def defined(path: Path) -> frozenset[str]:
    """The tests that a file defines."""
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))


def test_each_feature_stands_once_and_in_order() -> None:
    numbers = [f"T{number}" for number in range(1, 101)] + [f"L{number}" for number in range(1, 61)]
    assert [row[0] for row in rows()] == numbers


def test_each_verdict_is_one_of_three_and_has_its_reason() -> None:
    for number, verdict, why, tests in rows():
        assert verdict in ("same", "better", "not done"), number
        assert why or verdict == "same", f"{number}: {verdict} without a reason"
        assert tests or verdict == "not done", f"{number}: {verdict} without a test"


def test_each_test_that_is_named_is_there() -> None:
    missing = []
    for number, _, _, tests in rows():
        for file, name in tests:
            path = TREE / file
            if not path.exists() or name not in defined(path):
                missing.append(f"{number}: {file}::{name}")
    assert missing == []

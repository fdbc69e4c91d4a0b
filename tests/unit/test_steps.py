# SPDX-License-Identifier: Apache-2.0
"""hook.steps: what can be told without a container."""

from __future__ import annotations

import pytest

from hook import steps


@pytest.mark.parametrize(
    ("targets", "end"),
    [
        ({}, "/l/a"),
        ({"/l/a": "a.1"}, "/l/a.1"),
        ({"/l/a": "a.1", "/l/a.1": "a.1.2"}, "/l/a.1.2"),
        ({"/l/a": "../m/b", "/m/b": "../c"}, "/c"),
        # More steps up than there are folders, as a hook's argument may have them.
        ({"/l/a": "../../../../c", "/c": "d"}, "/d"),
    ],
)
def test_where_a_chain_of_links_ends(targets: dict[str, str], end: str) -> None:
    assert steps.final("/l/a", targets) == end


def test_a_circle_of_links_ends_in_it() -> None:
    circle = {"/l/a": "b", "/l/b": "a"}
    assert steps.final("/l/a", circle) in circle
    assert steps.final("/", {"/": "x"}) == "/x"

# SPDX-License-Identifier: Apache-2.0
"""Requests from NVIDIA_VISIBLE_DEVICES and NVIDIA_DRIVER_CAPABILITIES."""

from __future__ import annotations

import pytest

from hook import request
from ldcache.errors import NvhookError


def ids(value: str) -> tuple[str, ...] | None | str:
    """The ids of a value of NVIDIA_VISIBLE_DEVICES; "no request" where there is none."""
    wanted = request.read({"NVIDIA_VISIBLE_DEVICES": value})
    return "no request" if wanted is None else wanted.ids


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("all", None),
        ("none", ()),
        ("void", "no request"),
        ("", "no request"),
        (" , ,", "no request"),
        ("0", ("0",)),
        ("1,0", ("1", "0")),
        ("0,0,1,0", ("0", "1")),
        (" 0 ,\tGPU-1234 ", ("0", "GPU-1234")),
        ("0,void", "no request"),
        ("0,none,all", ()),
        ("0,all,none", None),
        ("ALL", ("ALL",)),
    ],
)
def test_devices(value: str, expected: object) -> None:
    assert ids(value) == expected


def test_an_unset_variable_asks_for_nothing() -> None:
    assert request.read({"NVIDIA_DRIVER_CAPABILITIES": "bogus"}) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ("compute", "utility")),
        ("", ("compute", "utility")),
        (" ,", ("compute", "utility")),
        ("utility", ("utility",)),
        ("video, compute,video", ("compute", "video")),
        ("all", request.ALL_CAPABILITIES),
        ("compute,all", request.ALL_CAPABILITIES),
    ],
)
def test_capabilities(value: str | None, expected: tuple[str, ...]) -> None:
    env = {} if value is None else {"NVIDIA_DRIVER_CAPABILITIES": value}
    assert request.read_capabilities(env) == expected


def test_an_unknown_capability_is_named_with_the_known_ones() -> None:
    with pytest.raises(NvhookError) as caught:
        request.read_capabilities({"NVIDIA_DRIVER_CAPABILITIES": "compute,bogus,none"})
    assert caught.value.what == "unknown driver capabilities in NVIDIA_DRIVER_CAPABILITIES: bogus, none"
    assert "compat32, compute, display, graphics, ngx, utility, video" in caught.value.remedy

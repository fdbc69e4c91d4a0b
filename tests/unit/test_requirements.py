# SPDX-License-Identifier: Apache-2.0
"""NVIDIA_REQUIRE_*: the language, the verdicts, the errors; and how an image's CUDA version fits the driver's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hook import requirements
from ldcache.errors import NvhookError
from tests import inventories


def host(version: str = "535.161.08", cuda: str | None = None, gpus: int = 1) -> dict[str, Any]:
    made = inventories.inventory(gpus)
    made["driver"] = {"version": version, "cuda": cuda}
    return made


def judge(expression: str, inventory: dict[str, Any] | None = None) -> requirements.Verdict:
    """The verdict on one expression for a host with driver 535, CUDA 12.2, and an H200."""
    inventory = inventory or host()
    return requirements.judge("NVIDIA_REQUIRE_CUDA", expression, inventory, inventory["gpus"])


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("", True),
        ("  ", True),
        ("cuda>=12.2", True),
        ("cuda>=12.3", False),
        ("cuda>12.1", True),
        ("cuda>12.2", False),
        ("cuda<12.10", True),
        ("cuda<=12.2.0", True),
        ("cuda<12.2", False),
        ("cuda=12.2", True),
        ("cuda=12.02.0", True),
        ("cuda!=12.2", False),
        ("CUDA>=12", True),
        ("driver>=535", True),
        ("driver>=535.161.8", True),
        ("driver>=535.161.9", False),
        ("driver<1000", True),
        ("arch>=9.0", True),
        ("arch<9.0", False),
        ("arch>=10.0", False),
        ("brand=nvidia", True),
        ("brand=Tesla", False),
        ("brand!=tesla", True),
        ("cuda>=13.0 driver>=535", True),
        ("cuda>=13.0 driver>=535,arch<9", False),
        ("cuda>=12.0,driver>=530,arch>=9,brand=Nvidia", True),
        ("cuda>=99 brand=tesla,driver>=470,driver<471 brand=nvidia,driver>=535,driver<536", True),
    ],
)
def test_verdicts(expression: str, expected: bool) -> None:
    assert judge(expression).satisfied is expected


@pytest.mark.parametrize(
    "term",
    [
        "cuda",
        "cuda==12.2",
        "cuda>=",
        "cuda>=twelve",
        "cuda>=12.2-1",
        "cuda=>12",
        "gpu>=1",
        ">=12",
        "brand>=Tesla",
        "brand=",
        "brand==Tesla",
        ",",
        "cuda>=12.0,",
        "cuda>=" + "1" * 5000,
        "cuda>=1.2.3.4.5.6.7.8.9",
        "c\x1b[31m=1",
    ],
)
def test_what_is_no_requirement(term: str) -> None:
    with pytest.raises(NvhookError, match="which is no requirement") as caught:
        judge(term)
    assert caught.value.what.isprintable() and len(caught.value.what) < 300
    # After an alternative that holds nothing is read, as in libnvidia-container.
    assert judge(f"cuda>=12.0 {term}").satisfied


def test_the_error_names_each_alternative_and_what_was_found() -> None:
    verdict = judge("cuda>=12.6 brand=tesla,driver>=470,driver<471 brand=nvidia,driver>=550")
    assert verdict.sentence() == (
        "NVIDIA_REQUIRE_CUDA is not met by the driver of GPU 0: cuda>=12.6 (cuda is 12.2), "
        "or brand=tesla,driver>=470,driver<471 (brand is Nvidia), "
        "or brand=nvidia,driver>=550 (driver is 535.161.08)"
    )
    assert verdict.to_json()["failed"][0] == {"alternative": "cuda>=12.6", "found": "cuda is 12.2"}


def test_a_long_error_stays_one_line() -> None:
    text = judge(" ".join(["cuda>=99"] * 1000)).sentence()
    assert len(text) < 3200 and "\n" not in text


def test_each_gpu_must_meet_them() -> None:
    inventory = host(gpus=2)
    inventory["gpus"][1]["arch"] = "7.0"
    verdict = judge("arch>=8.0", inventory)
    assert (verdict.satisfied, verdict.gpu) == (False, 1)
    assert "of GPU 1: arch>=8.0 (arch is 7.0)" in verdict.sentence()


def test_without_a_gpu_architecture_and_brand_hold() -> None:
    inventory = host(gpus=0)
    assert judge("arch>=99,brand=none", inventory).satisfied
    assert not judge("cuda>=99", inventory).satisfied


@pytest.mark.parametrize("name", ["arch", "brand"])
def test_facts_that_only_nvml_tells(name: str) -> None:
    inventory = host()
    inventory["gpus"][0][name] = None
    for expression in (f"{name}=9.0", f"cuda>=99 {name}=9.0", f"driver>=1,{name}=9.0"):
        with pytest.raises(requirements.FactUnknown, match=name):
            judge(expression, inventory)
    # NVML may take seconds: it is not asked where the rest decides.
    assert judge(f"{name}=9.0 cuda>=12.0", inventory).satisfied
    assert not judge(f"{name}=9.0,cuda>=99", inventory).satisfied


@pytest.mark.parametrize(
    ("version", "told", "expected"),
    [
        ("470.82.01", None, "11.4"),
        ("510.47.03", None, "11.6"),
        ("515.65.01", None, "11.7"),
        ("520.61.05", None, "11.8"),
        ("525.60.13", None, "12.0"),
        ("530.30.02", None, "12.1"),
        ("535.54.03", None, "12.2"),
        ("545.23.06", None, "12.3"),
        ("550.54.14", None, "12.4"),
        ("555.42.02", None, "12.5"),
        ("560.28.03", None, "12.6"),
        ("565.57.01", None, "12.7"),
        ("570.86.10", None, "12.8"),
        ("575.51.03", None, "12.9"),
        ("580.65.06", None, "13.0"),
        ("572.16", None, "12.8"),
        ("590.44.01", None, None),
        ("590.44.01", "13.1", "13.1"),
        ("535.54.03", "12.9", "12.9"),
        ("340.108", None, None),
        ("999999999999", None, None),
    ],
)
def test_the_drivers_cuda_version(version: str, told: str | None, expected: str | None) -> None:
    assert requirements.driver_cuda({"version": version, "cuda": told}) == expected


def test_the_table_grows_with_its_branches() -> None:
    branches = list(requirements.CUDA_OF_BRANCH)
    assert branches == sorted(branches) and branches[-1] == requirements.NEWEST_BRANCH
    versions = [requirements.version(text) or [] for text in requirements.CUDA_OF_BRANCH.values()]
    assert versions == sorted(versions)


@pytest.mark.parametrize(
    ("image", "driver", "forward", "kind", "needed"),
    [
        ("12.2", "535.161.08", False, "native", 535),
        ("11.8", "535.161.08", False, "native", 520),
        ("12.8", "535.161.08", False, "minor", 570),
        ("12.8", "535.161.08", True, "forward", 570),
        ("13.0", "535.161.08", False, "none", 580),
        ("13.0", "535.161.08", True, "forward", 580),
        ("10.2", "418.87.00", False, "none", 440),
        ("12.10", "535.161.08", False, "minor", 580),
        ("14.0", "580.65.06", False, "none", None),
    ],
)
def test_compatibility(image: str, driver: str, forward: bool, kind: str, needed: int | None) -> None:
    fit = requirements.compatibility(image, {"version": driver, "cuda": None}, forward)
    assert fit is not None
    assert (fit.kind, fit.needed) == (kind, needed)
    assert bool(fit.warning()) == (kind != "native")
    assert fit.to_json()["kind"] == kind


def test_the_warning_names_both_versions_and_the_driver_that_would_do() -> None:
    fit = requirements.compatibility("12.8", {"version": "535.161.08", "cuda": None}, False)
    assert fit is not None
    assert fit.warning() == (
        "the image is built for CUDA 12.8, driver 535.161.08 brings 12.2: minor-version compatibility applies, "
        "so PTX and the newest functions may fail; driver 570 or newer would do"
    )


def test_no_word_where_a_version_is_unknown() -> None:
    assert requirements.compatibility("", {"version": "535.1", "cuda": None}, False) is None
    assert requirements.compatibility("12.8", {"version": "999.1", "cuda": None}, False) is None


@given(st.text(alphabet="cudarivebn=!<>,. 0123456789\x1b\u0661", max_size=60))
def test_any_expression_has_a_verdict_or_an_error(expression: str) -> None:
    inventory = host()
    try:
        judge(expression, inventory).sentence()
    except NvhookError as error:
        assert error.what.isprintable()

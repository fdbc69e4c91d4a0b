# SPDX-License-Identifier: Apache-2.0
"""The fuzz targets: their seeds always, and half a minute of fuzzing each in the long run."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

from tests import fuzz

SECONDS = 30


@pytest.mark.parametrize("target", fuzz.targets())
def test_seeds_and_corpus(target: str) -> None:
    module = importlib.import_module(f"tests.fuzz.fuzz_{target}")
    seeds = [*module.seeds(), *fuzz.corpus(target)]
    assert seeds
    for data in seeds:
        module.TestOneInput(data)
        # Cut short and with a byte changed, so that a refusal is seen too.
        module.TestOneInput(data[: len(data) // 2])
        module.TestOneInput(data[:20] + b"\xff" + data[21:])


@pytest.mark.long
@pytest.mark.timeout(fuzz.INPUT_SECONDS + 10 * SECONDS)
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs atheris, which is not installed")
@pytest.mark.parametrize("target", fuzz.targets())
def test_half_a_minute_finds_nothing(target: str) -> None:
    # What a test finds means a change; `python -m tests.fuzz` goes where none was before.
    outcome = fuzz.run(target, SECONDS, seed=1)
    assert outcome.findings == (), outcome.log[-3000:]
    assert outcome.executions > 100

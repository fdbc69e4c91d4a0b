# SPDX-License-Identifier: Apache-2.0
"""several_gpus.py on this machine's GPUs, one or more, without the times."""

from __future__ import annotations

import pytest

from tests.device import several_gpus
from tests.needs import needs_path, needs_program, needs_root

pytestmark = [needs_path("/proc/driver/nvidia/version"), needs_root, needs_program("runc")]


@pytest.mark.timeout(1800)
def test_each_container_gets_its_own() -> None:
    assert several_gpus.main(["--rounds", "0"]) == 0

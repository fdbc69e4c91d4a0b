# SPDX-License-Identifier: Apache-2.0
"""What the device tests share: nvhook, installed as on a host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hook import install


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The prestart launcher of an installed nvhook, where `nvhook verify` looks for it."""
    prefix = tmp_path_factory.mktemp("prefix")
    yield install.install(prefix)[0]

# SPDX-License-Identifier: Apache-2.0
"""Marks for tests that need more than Python and a compiler; what is missing is the skip's reason.

Tests in tests/system need root anyway (tests/conftest.py).
"""

from __future__ import annotations

import os

import pytest

from tests.containers import find_program

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def needs_program(name: str) -> pytest.MarkDecorator:
    """Skips where a program is not installed."""
    return pytest.mark.skipif(find_program(name) is None, reason=f"needs {name}, which is not installed")


def needs_path(path: str) -> pytest.MarkDecorator:
    """Skips where a file or folder of the machine is not there, such as a device or a cgroup mount."""
    return pytest.mark.skipif(not os.path.exists(path), reason=f"needs {path}, which is not there")

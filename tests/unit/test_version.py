# SPDX-License-Identifier: Apache-2.0
"""`--version` of each command."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ldcache import VERSION


@pytest.mark.parametrize(
    ("module", "words", "name"),
    [
        ("hook.cli", [], "nvhook"),
        ("hook.cli", ["cdi"], "cdi"),
        ("hook.cli", ["ldcache"], "ldcache"),
        ("cdi.__main__", [], "cdi"),
        ("ldcache.cli", [], "ldcache"),
    ],
)
def test_the_version(module: str, words: list[str], name: str) -> None:
    """By the entry points of the wheel's console scripts."""
    command = [sys.executable, "-c", f"import sys; from {module} import main; sys.exit(main())", *words, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{name} {VERSION}\n", "")

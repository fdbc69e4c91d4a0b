# SPDX-License-Identifier: Apache-2.0
"""Commands whose reader has seen enough: they end, and say nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ldcache.output import until_closed

COMMANDS = [
    ("hook.cli", ["--help"]),
    ("hook.cli", ["configure", "--status", "--json", "--root", "ROOT"]),
    ("hook.cli", ["config", "--host-root", "ROOT"]),
    ("hook.cli", ["cdi", "list", "--json"]),
    # More than what is written at the end.
    ("hook.cli", ["ldcache", "print"]),
    ("cdi.__main__", ["generate", "--help"]),
    ("cdi.__main__", ["check", "--help"]),
    ("ldcache.cli", ["print"]),
    ("hook.names.ctk", ["--help"]),
    ("hook.names.ctk", ["config", "default"]),
    ("hook.names.containercli", ["--help"]),
]


def run(tree: Path, module: str, words: list[str], closed: tuple[str, ...]) -> tuple[int, str]:
    """The exit status, and what was said where somebody listens, of a command some of whose streams nobody reads."""
    read, write = os.pipe()
    os.close(read)
    program = f"import sys; from {module} import main; sys.exit(main())"
    streams = {name: write if name in closed else subprocess.PIPE for name in ("stdout", "stderr")}
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            # argparse forgives what it writes at once, and so knows of no closed pipe.
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
            | {"PYTHONPATH": str(tree)},
            stdout=streams["stdout"],
            stderr=streams["stderr"],
            check=False,
        )
    finally:
        os.close(write)
    return done.returncode, (done.stderr or b"").decode()


@pytest.mark.parametrize(("module", "words"), COMMANDS)
def test_a_command_whose_output_nobody_reads_ends_quietly(
    tree: Path, tmp_path: Path, module: str, words: list[str]
) -> None:
    words = [str(tmp_path) if word == "ROOT" else word for word in words]
    assert run(tree, module, words, ("stdout",)) == (1, "")


def test_errors_that_nobody_reads(tree: Path, tmp_path: Path) -> None:
    words = ["inventory", "--host-root", str(tmp_path / "none")]
    assert run(tree, "hook.cli", words, ("stdout", "stderr")) == (1, "")


def test_another_pipe_is_an_error_like_any_other() -> None:
    def broken() -> int:
        raise BrokenPipeError("elsewhere")

    with pytest.raises(BrokenPipeError, match="elsewhere"):
        until_closed(broken)
    assert until_closed(lambda: 3) == 3

# SPDX-License-Identifier: Apache-2.0
"""The systemd units and udev rules of `cdi watch`, as systemd's own tools read them."""

from __future__ import annotations

import configparser
import subprocess
from pathlib import Path

import pytest

from cdi import cli
from tests.needs import needs_program

TREE = Path(__file__).resolve().parents[2]
UNITS = sorted((TREE / "packaging/systemd").glob("nvhook-cdi-*.service"))


def read(unit: Path) -> configparser.ConfigParser:
    """A unit's settings."""
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.read_text())
    return parser


@needs_program("systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_reads_the_unit(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    # It wants the program and the manual to be there.
    lines = [line for line in unit.read_text().splitlines() if not line.startswith("Documentation=")]
    copy.write_text("\n".join(lines).replace("/usr/bin/nvhook", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False, timeout=60)
    assert [line for line in done.stderr.splitlines() if unit.name in line] == []
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_the_unit_starts_a_command_that_exists_and_keeps_others_out(unit: Path) -> None:
    settings = read(unit)
    words = settings["Service"]["ExecStart"].split()
    assert words[:2] == ["/usr/bin/nvhook", "cdi"]
    cli.parser().parse_args(words[2:])
    assert {"nvidia-cdi-refresh.service", "nvidia-cdi-refresh.path"} <= set(settings["Unit"]["Conflicts"].split())
    # Kernel events are sent into the host's network namespace only, and MPS has its pipes in /tmp.
    assert not {"PrivateNetwork", "PrivateTmp", "PrivateDevices"} & set(settings["Service"])


def test_there_are_two_units_and_one_rule_that_names_one() -> None:
    assert [unit.name for unit in UNITS] == ["nvhook-cdi-refresh.service", "nvhook-cdi-watch.service"]
    rule = (TREE / "packaging/udev/71-nvhook-cdi.rules").read_text()
    assert rule.count("nvhook-cdi-refresh.service") == 3

# SPDX-License-Identifier: Apache-2.0
"""systemd's units and the udev rule, judged by systemd's own tools where they are."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from hook import cli
from tests.needs import needs_program

TREE = Path(__file__).resolve().parents[2]
UNITS = sorted((TREE / "packaging/systemd").glob("*.service"))


def commands(unit: Path) -> list[list[str]]:
    """Each command that the unit starts."""
    return [shlex.split(line) for line in re.findall(r"^Exec\w+=[-+!]*(.*)$", unit.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_commands_are_ours_and_their_arguments_known(unit: Path) -> None:
    """A unit with an option that was renamed fails at the next boot only."""
    assert commands(unit)
    for program, *words in commands(unit):
        assert program == "/usr/bin/nvhook"
        assert words[0] in cli.PASSED_ON or cli.parser().parse_args(words).verb == words[0]


@needs_program("systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_reads_it(unit: Path, tmp_path: Path) -> None:
    """Where nvhook is not installed, /bin/true stands for its program."""
    copy = tmp_path / unit.name
    text = unit.read_text().replace("/usr/bin/nvhook", "/bin/true")
    copy.write_text(re.sub(r"^Documentation=.*\n", "", text, flags=re.MULTILINE))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    # It reads the machine's other units too.
    assert (done.returncode, [line for line in done.stderr.splitlines() if unit.name in line]) == (0, [])


def test_nodes_are_made_before_engines_start() -> None:
    text = (TREE / "packaging/systemd/nvhook-nodes.service").read_text()
    (before,) = re.findall(r"^Before=(.*)$", text, re.MULTILINE)
    assert {"docker.service", "containerd.service", "crio.service", "kubelet.service"} <= set(before.split())


def test_the_rule_starts_a_unit_that_exists() -> None:
    text = (TREE / "packaging/udev/nvhook.rules").read_text()
    wanted = re.findall(r'ENV\{SYSTEMD_WANTS\}\+="([^"]+)"', text)
    assert wanted
    assert [name for name in wanted if name not in {unit.name for unit in UNITS}] == []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            pairs = re.fullmatch(r'(?:[A-Z]+(?:\{\w+\})?(?:==|\+=|=)"[^"]*"(?:, )?)+', line)
            assert pairs is not None

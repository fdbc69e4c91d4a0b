# SPDX-License-Identifier: Apache-2.0
"""systemd's units and the udev rule, judged by systemd's own tools where they are."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from cdi import cli as cdi_cli
from hook import cli
from tests.needs import needs_program

TREE = Path(__file__).resolve().parents[2]
UNITS = sorted((TREE / "packaging/systemd").glob("*.service"))


def commands(unit: Path) -> list[list[str]]:
    """Each command that the unit starts; a reload is a signal."""
    return [shlex.split(line) for line in re.findall(r"^Exec(?!Reload)\w+=[-+!]*(.*)$", unit.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_commands_are_ours_and_their_arguments_known(unit: Path) -> None:
    """A unit with an option that was renamed fails at the next boot only."""
    assert commands(unit)
    for program, *words in commands(unit):
        assert program == "/usr/bin/nvhook"
        if words[0] == "cdi":
            cdi_cli.parser().parse_args(words[1:])
        else:
            assert cli.parser().parse_args(words).verb == words[0]


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


@pytest.mark.parametrize("name", ["refresh", "watch"])
def test_the_makers_of_cdi_files_keep_others_out(name: str) -> None:
    text = (TREE / f"packaging/systemd/nvhook-cdi-{name}.service").read_text()
    (conflicts,) = re.findall(r"^Conflicts=(.*)$", text, re.MULTILINE)
    assert {"nvidia-cdi-refresh.service", "nvidia-cdi-refresh.path"} <= set(conflicts.split())
    # Kernel events are sent into the host's network namespace only, and MPS has its pipes in /tmp.
    assert re.findall(r"^Private(?:Network|Tmp|Devices)=", text, re.MULTILINE) == []


def test_the_rule_of_cdi_files_starts_a_unit_that_exists() -> None:
    wanted = set(re.findall(r"nvhook[\w-]+\.service", (TREE / "packaging/udev/nvhook-cdi.rules").read_text()))
    assert wanted
    assert wanted <= {unit.name for unit in UNITS}


def test_the_rule_starts_a_unit_that_exists() -> None:
    text = (TREE / "packaging/udev/nvhook.rules").read_text()
    wanted = re.findall(r'ENV\{SYSTEMD_WANTS\}\+="([^"]+)"', text)
    assert wanted
    assert [name for name in wanted if name not in {unit.name for unit in UNITS}] == []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            pairs = re.fullmatch(r'(?:[A-Z]+(?:\{\w+\})?(?:==|\+=|=)"[^"]*"(?:, )?)+', line)
            assert pairs is not None


@needs_program("systemd-analyze")
def test_counting_is_timed(tmp_path: Path) -> None:
    """A timer goes with the service of its name; systemd reads both."""
    for name in ("nvhook-metrics.service", "nvhook-metrics.timer"):
        text = (TREE / "packaging/systemd" / name).read_text().replace("/usr/bin/nvhook", "/bin/true")
        (tmp_path / name).write_text(re.sub(r"^Documentation=.*\n", "", text, flags=re.MULTILINE))
    timer = tmp_path / "nvhook-metrics.timer"
    done = subprocess.run(["systemd-analyze", "verify", timer], capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "nvhook" in line]) == (0, [])

# SPDX-License-Identifier: Apache-2.0
"""What a start writes into the log, in real containers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import simhost
from tests.containers import hook
from tests.needs import needs_program
from tests.simhost import SimulatedHost
from tests.system.conftest import MakeBundle
from tests.system.prestart import MULTIARCH, nvhook, output, proc_hook, reported, visible
from tests.system.shim import Shim

pytestmark = needs_program("runc")

LINE = re.compile(r"\d{4}-\S+Z (error|warning|info|debug) nvhook\[([a-z-]+)\] (\S+): (.*)")


@pytest.fixture
def machine(tmp_path: Path) -> SimulatedHost:
    """A host of this test's own, whose configuration it may change."""
    return simhost.build(tmp_path / "host", simhost.Host())


def configure(machine: SimulatedHost, text: str) -> Path:
    """Write our configuration; where the log will be."""
    file = machine.root / "etc/nvhook/config.toml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    (machine.root / "var/log").mkdir(parents=True, exist_ok=True)
    return machine.root / "var/log/nvhook.log"


def read(log: Path, verb: str = "prestart") -> list[tuple[str, str]]:
    """Level and text of each line."""
    found = []
    for line in log.read_text().splitlines():
        match = LINE.fullmatch(line)
        assert match is not None, line
        assert match[2] == verb and match[3].startswith("nvhook-test-")
        found.append((match[1], match[4]))
    return found


def test_everything(prefix: Path, machine: SimulatedHost, make_bundle: MakeBundle) -> None:
    log = configure(machine, '[log]\nfile = "/var/log/nvhook.log"\nlevel = "debug"\n')
    env = visible("0", "utility") | {"CUDA_VERSION": "12.0.1", "NVIDIA_REQUIRE_CUDA": "cuda>=11.0"}
    output(make_bundle("true", env=env, prestart=nvhook(prefix, machine)))
    lines = read(log)
    texts = [text for _, text in lines]
    assert "configuration: /etc/nvhook/config.toml" in texts
    assert "environment NVIDIA_VISIBLE_DEVICES=0: used: names the devices" in texts
    assert any(text.startswith("requirement NVIDIA_REQUIRE_CUDA=cuda>=11.0: used") for text in texts)
    (compute,) = [text for text in texts if text.startswith("left out for want of a capability (compute): ")]
    assert machine.library("libcuda.so.1").name in compute
    assert not any(machine.library("libnvidia-ml.so.1").name in text for text in texts if "left out" in text)
    assert any(re.fullmatch(r"compatibility: image's CUDA 12\.0, driver's \S+: native", text) for text in texts)
    steps = [text for text in texts if re.search(r": \d+\.\d\d ms$", text)]
    assert any(text.startswith("device node /dev/nvidia0: ") for text in steps)
    assert any(text.startswith("loader cache /etc/ld.so.cache: ") for text in steps)
    level, last = lines[-1]
    assert level == "info" and re.fullmatch(r"GPUs 0 with utility: \d+ steps done; \d+\.\d\d ms", last)


def test_a_start_that_goes_well_says_nothing(prefix: Path, machine: SimulatedHost, make_bundle: MakeBundle) -> None:
    log = configure(machine, '[log]\nfile = "/var/log/nvhook.log"\n')
    output(make_bundle("true", env=visible("0"), prestart=nvhook(prefix, machine)))
    assert log.read_text() == ""
    assert make_bundle("true", env=visible("7"), prestart=nvhook(prefix, machine)).run().returncode != 0
    ((level, text),) = read(log)
    assert level == "error" and "no GPU '7' on this host" in text and "; remedy: ask for one of these" in text


def test_a_log_that_can_not_be_written_stops_nothing(
    prefix: Path, machine: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    configure(machine, '[log]\nfile = "/nowhere/nvhook.log"\n')
    hooks = reported(nvhook(prefix, machine), tmp_path / "report")
    output(make_bundle("true", env=visible("0"), prestart=hooks))
    report = (tmp_path / "report").read_text()
    assert report.startswith("nvhook: warning: cannot open the log /nowhere/nvhook.log: ")
    assert report.count("\n") == 1


def test_debug_is_for_stderr(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path) -> None:
    mine = [proc_hook(), hook(prefix / "bin/nvhook-prestart", "--debug", "--host-root", str(host.root))]
    output(make_bundle("true", env=visible("0"), prestart=reported(mine, tmp_path / "report")))
    assert all(text for _, text in read(tmp_path / "report"))
    assert any(text.startswith("device rules: ") for _, text in read(tmp_path / "report"))


def test_debug_of_the_other_hook(prefix: Path, make_bundle: MakeBundle, tmp_path: Path) -> None:
    finish = hook(prefix / "bin/nvhook-create-container", "--debug", "--link", f"x::{MULTIARCH}/libx.so.1")
    output(make_bundle("true", create_container=reported([finish], tmp_path / "report")))
    (line,) = (tmp_path / "report").read_text().splitlines()
    assert re.search(rf"debug nvhook\[create-container\] \S+: link {MULTIARCH}/libx.so.1 -> x: \d+\.\d\d ms$", line)


def test_the_runtime_writes_the_same_log(prefix: Path, machine: SimulatedHost, tmp_path: Path) -> None:
    log = configure(machine, '[log]\nfile = "/var/log/nvhook.log"\nlevel = "debug"\n')
    shim = Shim(prefix, machine, tmp_path)
    shim.output(shim.bundle("true"))
    assert not log.exists()
    shim.output(shim.bundle("true", env=visible("0", "utility")))
    lines = read(log, "runtime")
    texts = [text for _, text in lines]
    assert "environment NVIDIA_VISIBLE_DEVICES=0: used: names the devices" in texts
    assert "links and the loader cache are written into the root before the start" in texts
    assert any(re.fullmatch(r"loader cache /etc/ld.so.cache: .* \d+\.\d\d ms", text) for text in texts)
    level, last = lines[-1]
    assert level == "info" and re.match(r"GPUs 0 with utility: config.json written, \d+ steps done; ", last)
    assert shim.run(shim.bundle("true", env=visible("7"))).returncode != 0
    level, last = read(log, "runtime")[-1]
    assert level == "error" and "no GPU '7' on this host" in last


def test_the_runtime_says_nothing_of_a_good_start(prefix: Path, machine: SimulatedHost, tmp_path: Path) -> None:
    log = configure(machine, '[log]\nfile = "/var/log/nvhook.log"\n')
    shim = Shim(prefix, machine, tmp_path)
    shim.output(shim.bundle("true", env=visible("0")))
    assert log.read_text() == ""


@pytest.mark.parametrize(
    "words",
    [["nvidia-container-runtime-hook", "-debug", "prestart"], ["nvidia-container-toolkit", "--debug", "prestart"]],
)
def test_debug_by_nvidias_names(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / words[0]).symlink_to(prefix / "lib/nvhook/bin/launch")
    mine = [proc_hook(), hook(tmp_path / words[0], *words[1:], "--host-root", str(host.root))]
    output(make_bundle("true", env=visible("0"), prestart=reported(mine, tmp_path / "report")))
    assert any(text.startswith("device rules: ") for _, text in read(tmp_path / "report"))


def test_debug_of_nvidias_cdi_hook(prefix: Path, make_bundle: MakeBundle, tmp_path: Path) -> None:
    (tmp_path / "nvidia-cdi-hook").symlink_to(prefix / "lib/nvhook/bin/launch")
    words = ["create-symlinks", "--debug", "--link", f"x::{MULTIARCH}/libx.so.1"]
    mine = hook(tmp_path / "nvidia-cdi-hook", *words)
    output(make_bundle("true", create_container=reported([mine], tmp_path / "report")))
    ((level, text),) = read(tmp_path / "report", "create-container")
    assert level == "debug" and text.startswith(f"link {MULTIARCH}/libx.so.1 -> x: ")

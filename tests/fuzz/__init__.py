# SPDX-License-Identifier: Apache-2.0
"""Fuzzing by atheris (libFuzzer for Python), guided by what the packages execute.

    python -m tests.fuzz TARGET --seconds N [--record]

A target is a module `fuzz_TARGET` here with two functions: `seeds()`, inputs to begin with, and `TestOneInput(data)`,
which raises for a finding and for nothing else. It imports our packages inside these: they are instrumented first. Text
files in `corpus/TARGET` are inputs too, `*.hex` after decoding; a finding that was repaired is put there, so that every
run begins with it.

`--record` appends a line to docs/fuzzing.md. An input that is a finding is printed, in hexadecimal.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TREE = FOLDER.parent.parent

# What one input may take. libFuzzer itself and the interpreter are in the memory, too.
INPUT_SECONDS = 10
MEGABYTES = 2048
LONGEST_INPUT = 1 << 16


@dataclass(frozen=True)
class Outcome:
    """What one run did. `coverage` counts the edges of bytecode that some input reached; `findings` are inputs."""

    target: str
    seconds: int
    executions: int
    coverage: int
    findings: tuple[bytes, ...]
    log: str


def targets() -> list[str]:
    """The names of all targets."""
    return sorted(path.stem.removeprefix("fuzz_") for path in FOLDER.glob("fuzz_*.py"))


def corpus(target: str) -> list[bytes]:
    """The inputs that are kept as files."""
    files = sorted(path for path in (FOLDER / "corpus" / target).glob("*") if path.is_file())
    return [bytes.fromhex(path.read_text()) if path.suffix == ".hex" else path.read_bytes() for path in files]


def run(target: str, seconds: int, seed: int = 0) -> Outcome:
    """Fuzz one target for so long, in a child: libFuzzer ends the process that it runs in. Seed 0 is the clock's."""
    with tempfile.TemporaryDirectory(prefix="nvhook-fuzz-") as name:
        folder = Path(name)
        options = [
            f"-seed={seed}",
            f"-max_total_time={seconds}",
            f"-timeout={INPUT_SECONDS}",
            f"-rss_limit_mb={MEGABYTES}",
            f"-max_len={LONGEST_INPUT}",
            "-print_final_stats=1",
            f"-artifact_prefix={folder}/finding-",
        ]
        (folder / "corpus").mkdir()
        command = [sys.executable, "-m", "tests.fuzz.child", target, str(folder / "corpus"), *options]
        done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, errors="replace", check=False)
        log = done.stdout + done.stderr
        findings = tuple(path.read_bytes() for path in sorted(folder.glob("finding-*")))
    executions, coverage = _last(r"stat::number_of_executed_units:\s*(\d+)", log), _last(r"\bcov: (\d+)", log)
    if done.returncode != 0 and not findings:
        raise RuntimeError(f"the fuzzer itself failed with status {done.returncode}:\n{log[-3000:]}")
    return Outcome(target, seconds, executions, coverage, findings, log)


def _last(pattern: str, log: str) -> int:
    numbers = re.findall(pattern, log)
    return int(numbers[-1]) if numbers else 0

# SPDX-License-Identifier: Apache-2.0
"""The linters, as tests: one command is the whole gate."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pathspec
import pytest

TREE = Path(__file__).resolve().parents[2]

# A file of one of these kinds, or one that begins with "#!", is source and carries its licence.
SOURCE_SUFFIXES = {".c", ".h", ".py", ".pyi", ".sh", ".toml", ".json.in"}

# Recorded from the real world, so not our text: tests/data/*/README.md says where each comes from.
RECORDED = "tests/data/"

# Hosts that a file may name: those of standards and projects that the text refers to.
HOSTS_NAMED = {
    "www.apache.org",
    "www.debian.org",
    "example.com",
    "example.org",
    "github.com",
    "json-schema.org",
    "keepachangelog.com",
    "semver.org",
}

# Where somebody's checkout or interpreter lies. Split, or this file would hold them itself.
PRIVATE_PLACES = [re.compile(pattern) for pattern in (r"/wor" r"k/", r"/ro" r"ot/\w", r"\.py" r"env", r"/op" r"t/nvd")]


def files() -> list[Path]:
    """Every file that belongs to the project, by .gitignore: also in an sdist or a checkout without git."""
    ignored = pathspec.GitIgnoreSpec.from_lines((TREE / ".gitignore").read_text().splitlines())
    found = []
    for folder, folders, names in os.walk(TREE):
        here = Path(folder).relative_to(TREE)
        folders[:] = [
            name for name in folders if name != ".git" and not ignored.match_file(f"{(here / name).as_posix()}/")
        ]
        found += [TREE / here / name for name in names if not ignored.match_file((here / name).as_posix())]
    return sorted(found)


def python_files() -> list[str]:
    return [str(path) for path in files() if path.suffix in (".py", ".pyi")]


def texts() -> list[tuple[str, str]]:
    """Name and text of every file of ours. A binary one fails here."""
    return [
        (name, path.read_text(encoding="utf-8"))
        for path in files()
        if not (name := path.relative_to(TREE).as_posix()).startswith(RECORDED)
    ]


def check(*arguments: str) -> None:
    """Runs Python with these arguments at the tree's root. What it printed is the failure's text."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(arguments[:3])}\n{done.stdout}{done.stderr}", pytrace=False)


def test_ruff_check() -> None:
    check("-m", "ruff", "check", "--quiet", *python_files())


def test_ruff_format() -> None:
    check("-m", "ruff", "format", "--quiet", "--diff", *python_files())


def test_scripts_are_whole_and_may_be_started() -> None:
    scripts = [path for path in files() if path.read_bytes()[:2] == b"#!"]
    assert {"run", "test", "prepare"} <= {path.name for path in scripts}
    for path in scripts:
        assert path.stat().st_mode & 0o111 == 0o111, path
        shell = path.read_text().splitlines()[0].removeprefix("#!")
        if shell in ("/bin/sh", "/bin/bash"):
            done = subprocess.run([shell, "-n", path], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.timeout(600)
def test_mypy() -> None:
    # Without its cache: an import of a module that was made later stays an error there.
    check("-m", "mypy", f"--cache-dir={os.devnull}")


def test_minimum_python() -> None:
    """Nothing newer than Python 3.10 in syntax or library. Types in comments and strings don't count."""
    start = "from vermin import main; main()"
    check("-c", start, "--target=3.10-", "--no-tips", "--violations", *python_files())


def test_every_source_file_names_its_licence() -> None:
    missing = []
    for name, text in texts():
        if Path(name).suffix in SOURCE_SUFFIXES or text.startswith("#!"):
            head = "\n".join(text.splitlines()[:3])
            if "SPDX-License-Identifier: Apache-2.0" not in head:
                missing.append(name)
    assert missing == []


def test_no_private_place_is_named() -> None:
    found = [
        (name, match.group()) for name, text in texts() for place in PRIVATE_PLACES for match in place.finditer(text)
    ]
    assert found == []


def test_only_public_references_are_named() -> None:
    found = [
        (name, url)
        for name, text in texts()
        for url in re.findall(r"https?://[^\s\"'<>)`]+", text)
        if urlsplit(url).hostname not in HOSTS_NAMED
    ]
    assert found == []


def test_no_package_index_is_chosen() -> None:
    """Where packages come from is the machine's business: pip's and apt's own configuration."""
    option = re.compile(r"--(extra-)?index-ur" r"l|--find-link" r"s|PIP_INDEX_UR" r"L")
    assert [name for name, text in texts() if option.search(text)] == []


def test_packaging_is_no_package() -> None:
    """With an __init__.py it would hide the distribution of that name, which build tools import."""
    assert list((TREE / "packaging").rglob("__init__.py")) == []


def test_nothing_generated_is_kept() -> None:
    """Nothing that .gitignore names is in git all the same, and no other file is a build's output."""
    outputs = {".so", ".o", ".a", ".pyc", ".whl", ".gz", ".deb", ".rpm"}
    assert [str(path) for path in files() if path.suffix in outputs] == []
    if not (TREE / ".git").exists():
        return
    command = ["git", "-c", f"safe.directory={TREE}", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")

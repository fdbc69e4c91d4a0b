# SPDX-License-Identifier: Apache-2.0
"""The pages build without a warning, and what they say about the tree is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]
DOCS = TREE / "docs"


def test_the_pages_build(tmp_path: Path) -> None:
    """Sphinx warns of a page that no index names, a link that leads nowhere, a heading out of order."""
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / "html")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "html/architecture.html").exists()


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    text = (TREE / name).read_text()
    targets = [target for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in target]
    assert [target for target in targets if not (TREE / target).exists()] == []


def test_the_readme_is_a_page_that_opens_with_the_two_commands() -> None:
    lines = (TREE / "README.md").read_text().splitlines()
    assert len(lines) < 55
    assert [line.split()[0] for line in lines[:6] if line.startswith("    ")] == ["./demo", "./test"]


def test_modules_that_the_pages_name_exist() -> None:
    """`cdi.host`, `hook/cuda.c`, `tests/simhost`: a renamed one is still in the text."""
    missing = []
    for page in sorted(DOCS.glob("*.md")):
        for name in re.findall(
            r"`((?:cdi|hook|ldcache)\.\w+|(?:tests|packaging|hook|cdi|ldcache)/[\w./]+)`", page.read_text()
        ):
            path = TREE / (name if "/" in name else name.replace(".", "/"))
            if not path.exists() and not path.with_suffix(".py").exists():
                missing.append((page.name, name))
    assert missing == []


def test_sections_that_errors_point_at_exist() -> None:
    """A remedy may say `see docs/errors: mounts`."""
    headings = {line[3:].lower() for line in (DOCS / "errors.md").read_text().splitlines() if line.startswith("## ")}
    named = {
        section
        for package in ("cdi", "hook", "ldcache")
        for path in (TREE / package).rglob("*.py")
        for section in re.findall(r"see docs/errors: ([\w ]+)", path.read_text())
    }
    assert named <= headings


def test_tests_that_the_security_page_names_exist() -> None:
    """Each escape is followed by the tests that fail without its defence; a renamed one would be no evidence."""
    text = (DOCS / "security.md").read_text()
    named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", text)
    assert len(named) > 30
    there: dict[str, str] = {}
    for path in (TREE / "tests").rglob("test_*.py"):
        # A file of unit tests may have a namesake among those of whole systems.
        there[path.name] = there.get(path.name, "") + path.read_text()
    missing = [
        (file, function) for file, function in named if function and f"\ndef {function}(" not in there.get(file, "")
    ]
    assert missing == [] and {file for file, _ in named} <= there.keys()
    rows = [line for line in text.splitlines() if line.startswith("| CVE-")]
    assert len(rows) >= 7 and all("::test_" in row.rpartition("| `")[2] for row in rows)

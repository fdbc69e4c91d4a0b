# SPDX-License-Identifier: Apache-2.0
"""The man pages: made of the parsers, complete, and without a word from groff."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi import cli as cdi_cli
from cdi.host import config
from hook import cli, install
from hook.names import containercli, ctk
from ldcache import cli as ldcache_cli
from tests.needs import needs_program

TREE = Path(__file__).resolve().parents[2]
PAGES = {
    "nvhook.1": cli.parser,
    "nvhook-cdi.1": cdi_cli.parser,
    "nvhook-ldcache.1": ldcache_cli.parser,
    "nvidia-ctk.1": ctk.parser,
    "nvidia-container-cli.1": containercli.parser,
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("man")
    subprocess.run([sys.executable, TREE / "packaging/man.py", folder], check=True)
    return folder


def option_names(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Of a parser and of all verbs below it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from option_names(verb)
        elif action.help != argparse.SUPPRESS:
            yield from (name for name in action.option_strings if name not in ("-h", "--help"))


def plain(page: Path) -> str:
    return page.read_text().replace("\\-", "-")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_every_option(pages: Path, name: str) -> None:
    text = plain(pages / name)
    names = set(option_names(PAGES[name]()))
    assert len(names) > 2
    assert {option for option in names if option not in text} == set()


def test_the_configuration_has_every_key(pages: Path) -> None:
    text = plain(pages / "nvhook-config.toml.5")
    assert [name for name in config.KEYS if f".B {name}\n" not in text] == []


def test_every_launcher_has_a_page(pages: Path) -> None:
    names = {path.name.rpartition(".")[0] for path in pages.iterdir()}
    assert {*install.LAUNCHERS, *install.NVIDIA_LAUNCHERS} - names == set()


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("nvhook.1", ["docker or containerd or", "podman and crio: run", "auto: for UUIDs", "libcuda to load"]),
        ("nvhook-cdi.1", ["auto: what this host is", "csv: a list instead", "index, uuid, type-index"]),
        ("nvidia-ctk.1", ["yaml or json", "config-file; others", "nvhook's own: the folder"]),
    ],
)
def test_what_is_typed_as_it_stands_keeps_its_small_letter(pages: Path, name: str, kept: list[str]) -> None:
    lines = plain(pages / name).splitlines()
    assert [text for text in kept if not any(line.startswith(text) for line in lines)] == []
    assert any(line.startswith("Default: ") for line in lines)


def test_a_summary_begins_with_a_small_letter_but_in_names(pages: Path) -> None:
    lines = [plain(pages / name).splitlines()[2] for name in ("nvhook.1", "nvhook-cdi.1", "nvidia-ctk.1")]
    assert [line.partition(" - ")[2].split()[0] for line in lines] == ["puts", "Container", "NVIDIA's"]


@needs_program("groff")
def test_groff_has_nothing_to_say(pages: Path) -> None:
    for page in sorted(pages.iterdir()):
        if page.read_text().startswith(".so "):
            continue
        done = subprocess.run(
            ["groff", "-man", "-ww", "-z", "-Tutf8", page], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), page.name

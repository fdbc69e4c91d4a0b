# SPDX-License-Identifier: Apache-2.0
"""Forward compatibility: the decision. What containers then do: tests/system/test_kinds.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hook import compat
from ldcache import elf, root
from tests.simhost import elfwriter

SECTION = compat.SECTION.decode()
HOSTS = [("535.104.05", True), ("550.54.14", False), ("550.90.07", False), ("550.100", False), ("560.35.03", False)]


def image(top: Path, *libraries: tuple[str, bytes]) -> int:
    """A root with these files in its compat folder."""
    folder = top / "usr/local/cuda/compat"
    folder.mkdir(parents=True)
    for name, content in libraries:
        (folder / name).write_bytes(content)
    return root.open_root(str(top))


def noted(text: bytes, owner: bytes = compat.OWNER) -> bytes:
    return elfwriter.with_note(elfwriter.shared_object("libcuda.so.1"), SECTION, owner, text)


@pytest.mark.parametrize(("driver", "used"), HOSTS)
@pytest.mark.parametrize("with_note", [True, False])
def test_hosts(tmp_path: Path, driver: str, used: bool, with_note: bool) -> None:
    text = json.dumps({"format": 1, "CUDA version": "12.4", "driver": [470, 535], "device": [1]}).encode()
    library = noted(text) if with_note else elfwriter.shared_object("libcuda.so.1")
    made = compat.decide(image(tmp_path, ("libcuda.so.550.54.14", library)), driver)
    assert (made.used, made.folder) == (used, "/usr/local/cuda/compat" if used else "")
    assert made.reason
    assert made.warnings == []


@pytest.mark.parametrize(
    ("library", "words"),
    [
        (noted(b"{"), "cannot be read"),
        (noted(b"[" * 60000), "cannot be read"),
        (noted(b"{}"), "lists no driver branches"),
        (noted(b'{"driver": ["535"]}'), "lists no driver branches"),
        (noted(b'{"driver": [535]}', b"Somebody"), "Somebody"),
        (noted(b"x" * 70000), "more than 65536"),
        (b"no library", "not an ELF file"),
        (b"", "not an ELF file"),
    ],
)
def test_odd_notes(tmp_path: Path, library: bytes, words: str) -> None:
    """Such a library is judged as one without a note, with a warning."""
    made = compat.decide(image(tmp_path, ("libcuda.so.550.54.14", library)), "535.104.05")
    assert made.used
    assert words in made.warnings[0]


@pytest.mark.parametrize(
    ("note", "cuda", "used"),
    [
        (b'{"CUDA version": "12.9"}', "12.6", True),
        (b'{"cuda Version": "12.10"}', "12.9", True),
        (b'{"CUDA version": "12.6", "driver": [540]}', "12.6", False),
        (b'{"CUDA version": "12.2"}', "12.6", False),
        (b'{"CUDA version": "12.9"}', "", False),
        (b'{"CUDA version": 12}', "12.6", False),
        (b"{}", "12.6", False),
        (None, "12.6", False),
    ],
)
def test_by_the_cuda_version(tmp_path: Path, note: bytes | None, cuda: str, used: bool) -> None:
    """Of a host whose driver has no branch, in a folder of its machine's own; the driver's branches say nothing."""
    library = noted(note) if note else elfwriter.shared_object("libcuda.so.1")
    base = image(tmp_path, ("libcuda.so.1.1", library))
    (tmp_path / "usr/local/cuda/compat").rename(tmp_path / "usr/local/cuda/compat_orin")
    place = "/usr/local/cuda/compat_orin"
    made = compat.decide(base, "", cuda, place)
    assert (made.used, made.folder) == (used, place if used else "")
    assert f"{place}/libcuda.so.1.1" in made.reason
    assert bool(made.warnings) == (note is not None and b'"12.' not in note)


def test_no_such_folder(tmp_path: Path) -> None:
    made = compat.decide(root.open_root(str(tmp_path)), "535.104.05")
    assert (made.used, made.reason, made.warnings) == (False, "", [])


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("550.54.14", (550, 54, 14)),
        ("570.04", (570, 4)),
        ("1", None),
        ("", None),
        ("550.", None),
        ("550.x", None),
        ("1" * 9 + ".1", None),
        ("1.2.3.4.5", None),
        ("５.1", None),
    ],
)
def test_versions(text: str, numbers: tuple[int, ...] | None) -> None:
    assert compat.version(text) == numbers


GOOD = noted(b'{"driver": [535]}')


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=6), st.integers(0, len(GOOD)))
def test_damaged_notes(tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], length: int) -> None:
    content = bytearray(GOOD)
    for at, value in changes:
        content[at] = value
    path = tmp_path_factory.mktemp("damaged") / "library"
    path.write_bytes(content[: max(length, 64)])
    with path.open("rb") as file:
        try:
            elf.note(file.fileno(), compat.SECTION, compat.NOTE_MAX)
        except elf.InvalidElf:
            pass


def test_many_files_by_odd_names(tmp_path: Path) -> None:
    """Of warnings the first few are enough, and of versions."""
    odd = [(f"libcuda.so.x{number:04}", b"") for number in range(2000)]
    versions = [(f"libcuda.so.{number}.1", b"") for number in range(1000, 2000)]
    made = compat.decide(image(tmp_path, *odd, *versions), "535.104.05")
    assert len(made.warnings) == 5
    assert made.warnings[3] == "and 1997 more such files in /usr/local/cuda/compat"
    assert made.reason.endswith("holds several versions: 1000.1, 1001.1, 1002.1, and 997 more versions")

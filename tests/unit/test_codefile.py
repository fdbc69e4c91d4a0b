# SPDX-License-Identifier: Apache-2.0
"""The file with the code of all hot modules: what is in it, and that all works with it, without and with a bad one."""

from __future__ import annotations

import marshal
import subprocess
import sys
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import CodeType

import pytest

from hook import codefile, install
from tests.hotlist import OURS

STATE = '{"ociVersion": "1.0.2", "id": "a", "status": "created", "pid": 1, "bundle": "/nowhere"}'


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """An installed copy."""
    install.install(tmp_path / "prefix")
    return tmp_path / "prefix/lib/nvhook"


def prestart(library: Path) -> subprocess.CompletedProcess[str]:
    """The hook, whose bundle is not there."""
    return subprocess.run(
        [library.parents[1] / "bin/nvhook-prestart"], input=STATE, capture_output=True, text=True, check=False
    )


def file(library: Path) -> Path:
    """The one file."""
    (found,) = (library / "bin").glob("hot.*")
    return found


def modules(library: Path) -> dict[str, tuple[bool, str, CodeType]]:
    """What is in it. The bytes differ from run to run: marshal notes which objects are shared."""
    content = file(library).read_bytes().removeprefix(MAGIC_NUMBER)
    return {name: (*facts, marshal.loads(code)) for name, (*facts, code) in marshal.loads(content).items()}


def test_it_has_all_hot_modules_and_no_other(library: Path) -> None:
    assert set(codefile.hot(library)) | set(codefile.BEFORE) == OURS
    assert file(library).name == f"hot.{sys.implementation.cache_tag}"


def test_modules_come_from_it(library: Path) -> None:
    """Their own files are gone, but for those that are loaded before."""
    before = prestart(library)
    assert (before.returncode, before.stderr.count("\n")) == (1, 2)
    for name, path in codefile.hot(library).items():
        if path.name != "__init__.py" or name not in codefile.PACKAGES:
            path.unlink()
            (path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc").unlink()
    after = prestart(library)
    assert (after.returncode, after.stdout, after.stderr) == (1, before.stdout, before.stderr)


@pytest.mark.parametrize("content", [None, b"", b"\x00" * 5000])
def test_without_a_sound_one_the_modules_files_are_taken(library: Path, content: bytes | None) -> None:
    """One of another Python has another magic number."""
    before = prestart(library)
    file(library).unlink()
    if content is not None:
        (library / "bin" / f"hot.{sys.implementation.cache_tag}").write_bytes(content)
    after = prestart(library)
    assert (after.returncode, after.stdout, after.stderr) == (1, before.stdout, before.stderr)


def test_lines_in_tracebacks_are_the_sources() -> None:
    source = '''"""Text.

Hot."""
from __future__ import annotations

def f(a: Nothing = 1) -> Nothing:
    b: int
    return a / 0
'''
    names: dict[str, object] = {}
    exec(marshal.loads(codefile.code(source.encode(), "there.py")), names)
    function = names["f"]
    assert callable(function)
    with pytest.raises(ZeroDivisionError) as caught:
        function()
    last = caught.traceback[-1]
    assert (str(last.path).rpartition("/")[2], last.lineno + 1) == ("there.py", 8)
    assert (function.__annotations__, function.__doc__, names.get("__doc__")) == ({}, None, None)


def test_a_packages_script_writes_the_same(library: Path) -> None:
    before = modules(library)
    file(library).unlink()
    subprocess.run([install.interpreter(), "-I", "-B", library / "hook/codefile.py"], check=True)
    assert modules(library) == before

# SPDX-License-Identifier: Apache-2.0
"""What the hot entries import, held against the written list."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests import imports
from tests.hotlist import BUILT_IN, COMPILED, OURS

TREE = Path(__file__).resolve().parents[2]
PACKAGES = ("ldcache", "cdi", "hook")

ENTRIES = ("hook.start", "hook.prestart", "hook.injection", "hook.create_container")

# Imports inside a function of a hot module that a container start does not reach, each with its reason.
NOT_REACHED = {
    ("cdi.jsontext", "json"): "the fallback where _json is not what we know, and for the text of an error",
}

PROGRAM = """
import sys
sys.path[:0] = {folders!r}
before = set(sys.modules)
import {modules}
sys.stdout.write(" ".join(sorted(set(sys.modules) - before)))
"""


def loaded(*modules: str, program: str = PROGRAM) -> set[str]:
    """What the import of these modules adds to a bare interpreter's own."""
    backend = importlib.util.find_spec("_cffi_backend")
    assert backend is not None and backend.origin is not None
    folders = [str(TREE), str(Path(backend.origin).parent)]
    text = program.format(folders=folders, modules=", ".join(modules))
    command = [sys.executable, "-I", "-S", "-B", "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_imports_nothing_else(entry: str) -> None:
    assert loaded(entry) - OURS - COMPILED - BUILT_IN == set()


def test_the_list_holds_what_is_imported_and_no_more() -> None:
    names = loaded(*ENTRIES)
    assert {name for name in names if name.partition(".")[0] in PACKAGES} - COMPILED == OURS


def test_hot_modules_import_hot_modules_only() -> None:
    """Imports inside functions too, which the tests above do not see."""
    known = imports.modules(TREE, PACKAGES)
    allowed = OURS | COMPILED | BUILT_IN
    found = [
        (name, other)
        for name in sorted(OURS)
        for other in sorted(imports.imported(name, known[name], known, at_run_time=True))
        if other not in allowed and (name, other) not in NOT_REACHED
    ]
    assert found == []


def test_a_cold_import_is_found() -> None:
    """The tests above can fail: dataclasses brings its forty modules along."""
    assert "inspect" in loaded("hook.start", "dataclasses") - OURS - COMPILED - BUILT_IN


def test_use_imports_no_more_than_import() -> None:
    """JSON text in and out, a look-up, an error with its text: everything that a start does on its way."""
    program = PROGRAM + USE
    names = loaded(*ENTRIES, "cdi.jsontext", "ldcache.root", program=program)
    assert names - OURS - COMPILED - BUILT_IN == set()


USE = """
before.update(set(sys.modules))
from cdi import jsontext
from ldcache import root
jsontext.dumps(jsontext.loads('{{"a": [1, 2.5, "\\u00e9", null, true]}}'))
top = root.open_root("/")
root.read_file(top, "/proc/self/status")
try:
    root.open_path(top, "/nothing/here")
except OSError as error:
    str(error)
sys.stdout.write("\\n" + " ".join(sorted(set(sys.modules) - before)))
"""


def test_a_hot_module_says_so() -> None:
    """Whoever opens the file learns that each import has a price."""
    known = imports.modules(TREE, PACKAGES)
    silent = [
        name
        for name in sorted(OURS)
        if known[name].name != "__init__.py" and "\nHot" not in known[name].read_text(encoding="utf-8")
    ]
    assert silent == []

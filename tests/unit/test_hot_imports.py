# SPDX-License-Identifier: Apache-2.0
"""What the hot entries import, held against the written list."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import imports
from tests.hotlist import BUILT_IN, COMPILED, OURS

TREE = Path(__file__).resolve().parents[2]
PACKAGES = ("ldcache", "cdi", "hook")

ENTRIES = (
    "hook.start",
    "hook.runtime",
    "hook.bundle",
    "hook.child",
    "hook.shim",
    "hook.steps",
    "hook.cgroup",
    "hook.prestart",
    "hook.injection",
    "hook.create_container",
    # Only where something is to be logged, or starts are counted.
    "hook.log",
    "hook.record",
    # Only where nodes are made in a live container.
    "hook.cgroup",
    "hook.cdihook",
    # Only where a CDI file asks for it.
    "hook.params",
    # Only where a container gets EGL.
    "hook.profile",
    "hook.runtimehook",
    "hook.steps",
    # What a runtime shim uses of CDI.
    "cdi.annotations",
    "cdi.inject",
    "cdi.registry",
)

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


def test_a_start_without_a_log_does_not_import_it() -> None:
    assert "hook.log" not in loaded("hook.start", "hook.prestart", "hook.injection", "hook.create_container")


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


def test_an_injection_imports_no_more(tmp_path: Path) -> None:
    """Folders read, a device resolved and injected, a name that is not there: all that is hot of CDI."""
    spec = {
        "cdiVersion": "0.5.0",
        "kind": "acme.test/widget",
        "devices": [{"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/null"}], "env": ["A=1.5"]}}],
        "containerEdits": {"mounts": [{"hostPath": "/a", "containerPath": "/a", "options": ["bind"]}]},
    }
    (tmp_path / "a.json").write_text(json.dumps(spec))
    (tmp_path / "b.json").write_text("# YAML")
    program = PROGRAM + INJECTION.replace("FOLDER", repr(str(tmp_path)))
    names = loaded("cdi.annotations", "cdi.inject", "cdi.registry", program=program)
    assert names - OURS - COMPILED - BUILT_IN == set()


INJECTION = """
before.update(set(sys.modules))
from cdi import annotations, inject, registry
from ldcache.errors import NvhookError
found = registry.scan([FOLDER], registry.load_plain)
assert len(found.devices) == len(found.failed) == 1
names = annotations.devices({{"cdi.k8s.io/a": "acme.test/widget=0"}})
made = inject.inject({{"mounts": []}}, registry.resolve(found, names))
assert made["linux"]["devices"][0]["major"] == 1 and len(made["mounts"]) == 1
try:
    registry.resolve(found, ["a"])
except NvhookError as error:
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

# SPDX-License-Identifier: Apache-2.0
"""`ldcache` <- `cdi` <- `hook`: a package imports only leftwards, and discovery knows no applier."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import imports

TREE = Path(__file__).resolve().parents[2]
PACKAGES = ("ldcache", "cdi", "hook")

# The modules of cdi that know the format and nothing else.
FORMAT = (
    "advice",
    "annotations",
    "decode",
    "inject",
    "names",
    "reader",
    "registry",
    "report",
    "source",
    "spec",
    "transform",
    "validate",
    "versions",
)

# (whose modules, what they must not import, why). A name stands for itself and all below it.
RULES = (
    ("ldcache", "cdi", "the loader cache knows nothing of devices"),
    ("ldcache", "hook", "the loader cache knows nothing of containers"),
    ("cdi", "hook", "what a host has does not depend on who applies it"),
    ("cdi.host", "cdi.cli", "discovery does not know the commands"),
    ("cdi.host", "cdi.generate", "discovery does not know what is made of it"),
    *(
        rule
        for format_module in FORMAT
        for rule in (
            ("cdi.host", f"cdi.{format_module}", "discovery does not know what is made of it"),
            (f"cdi.{format_module}", "cdi.host", "the format is one thing, this host another"),
            (f"cdi.{format_module}", "cdi.generate", "who reads a spec does not know who made it"),
        )
    ),
    ("cdi.jsontext", "cdi.host", "only cdi.host asks the host"),
    ("ldcache", "tests", "the product stands without its tests"),
    ("cdi", "tests", "the product stands without its tests"),
    ("hook", "tests", "the product stands without its tests"),
)

# The runtime shim does what an engine does with CDI files.
READS_FILES = {"cdi.annotations", "cdi.inject", "cdi.registry"}

# An applier reads the inventory; the parts of cdi.host that look at the host are for the command line alone.
# `cdi` itself holds the version.
READS_THE_INVENTORY = {
    "cdi",
    "cdi.capabilities",
    "cdi.devices",
    "cdi.host.fingerprint",
    "cdi.host.settings",
    "cdi.host.store",
    "cdi.jsontext",
    "cdi.logline",
}
COMMAND_LINE = {"hook.cdiplanner", "hook.cli", "hook.names.ctk", "hook.names.ctkconfig"}


def below(name: str, top: str) -> bool:
    return name == top or name.startswith(f"{top}.")


def violations(known: dict[str, Path]) -> list[str]:
    found = []
    for name, path in known.items():
        names = imports.imported(name, path, known)
        for whose, what, why in RULES:
            if below(name, whose):
                found += [f"{name} imports {one}: {why}" for one in sorted(names) if below(one, what)]
        if below(name, "hook") and name not in COMMAND_LINE:
            found += [
                f"{name} imports {one}: an applier never discovers"
                for one in sorted(names)
                if below(one, "cdi") and one not in READS_THE_INVENTORY | READS_FILES
            ]
    return found


def test_imports_go_leftwards() -> None:
    known = imports.modules(TREE, PACKAGES)
    assert {"ldcache.kernel", "cdi.jsontext", "hook.prestart"} <= set(known)
    assert violations(known) == []


def test_every_rule_is_about_modules_that_exist() -> None:
    """A rule about a renamed module would hold for ever."""
    known = {*imports.modules(TREE, PACKAGES), *PACKAGES, "tests"}
    named = {name for rule in RULES for name in rule[:2]} | READS_THE_INVENTORY | COMMAND_LINE
    assert named - known == set()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ldcache.bad", "import cdi.jsontext"),
        ("ldcache.bad", "def f() -> None:\n    from hook import plan"),
        ("ldcache.bad", "if TYPE_CHECKING:\n    from cdi.host.store import x"),
        ("cdi.bad", "from hook.plan import Plan"),
        ("cdi.host.bad", "from .. import spec"),
        ("cdi.host.bad", "from ..generate import spec"),
        ("hook.bad", "from cdi.host import nvml"),
        ("hook.bad", "import tests.simhost"),
    ],
)
def test_a_violation_is_found(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    found = violations({**imports.modules(TREE, PACKAGES), name: path})
    assert len([line for line in found if line.startswith(f"{name} imports")]) == 1

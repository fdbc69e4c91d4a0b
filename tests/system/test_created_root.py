# SPDX-License-Identifier: Apache-2.0
"""Where a createContainer hook finds the container's root: in what the runtime says, never in the image.

And arguments that another version wrote.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.containers import Hook, hook
from tests.needs import needs_program
from tests.system.prestart import output, reported
from tests.system.ways import NAMES, Ways, identities

pytestmark = needs_program("runc")


def without(folder: Path, prefix: Path, change: str) -> list[Hook]:
    """The hook, with another state than the runtime's: `change` is a sed script."""
    launcher = prefix / "bin/nvhook-create-container"
    return [hook("/bin/sh", "-c", f"sed '{change}' | {launcher} --link made::/etc/made 2>{folder}/report")]


BUNDLE = 's/"bundle":"[^"]*"/"bundle":"{}"/'


def test_a_planted_config_json(ways: Ways) -> None:
    """The bundle can't be read, and the working directory, the image, holds a config.json that names the host."""
    image = ways.image("debian")
    planted = {"root": {"path": "/"}, "linux": {"namespaces": [{"type": "mount"}]}}
    (image / "config.json").write_text(json.dumps(planted))
    for bundle in ("\\/nowhere", ".", ""):
        hooks = without(ways.folder, ways.prefix, BUNDLE.format(bundle))
        done = ways.bundle(image, "true", create_container=hooks).run()
        assert done.returncode != 0
        words = ways.report.read_text()
        assert "cannot open /nowhere/config.json" in words or "names no absolute `bundle`" in words
    assert not (image / "etc/made").exists() and not Path("/etc/made").exists()


def test_cruns_root_where_the_bundle_is_closed(ways: Ways) -> None:
    """Mounts are then those of the namespace."""
    image = ways.image("debian")
    root = str(image).replace("/", "\\/")
    change = BUNDLE.format("\\/") + f';s/"bundle"/"root":"{root}","bundle"/'
    hooks = without(ways.folder, ways.prefix, change)
    assert output(ways.bundle(image, "readlink /etc/made", create_container=hooks)) == "made\n"
    assert "config.json is not to be read here" in ways.report.read_text()


def test_cruns_root_that_is_the_hosts(ways: Ways) -> None:
    image = ways.image("debian")
    change = BUNDLE.format("\\/") + ';s/"bundle"/"root":"\\/","bundle"/'
    hooks = without(ways.folder, ways.prefix, change)
    assert ways.bundle(image, "true", create_container=hooks).run().returncode != 0
    assert not Path("/etc/made").exists()


def test_a_library_of_a_closed_bundle_is_found_in_the_mount_table(ways: Ways) -> None:
    image = ways.image("debian")
    bundle = ways.file(image, f"resolve -s {' '.join(NAMES)}")
    (entry,) = [entry for block in bundle.edits for entry in block.get("hooks", [])]
    root = str(image).replace("/", "\\/")
    change = BUNDLE.format("\\/") + f';s/"bundle"/"root":"{root}","bundle"/'
    program = 'change=$1; shift; sed "$change" | "$@"'
    entry["args"] = ["/bin/sh", "-c", program, "sh", change, entry["path"], *entry["args"][1:]]
    entry["path"] = "/bin/sh"
    assert [line.split()[-1] for line in output(bundle).splitlines()] == identities(ways.host)


def test_parts_of_another_version(ways: Ways) -> None:
    image = ways.image("debian")
    hooks = [hook(ways.prefix / "bin/nvhook-create-container", "--time-travel", "3", "--fast", "--link", "x::/etc/x")]
    hooks = reported(hooks, ways.report)
    assert output(ways.bundle(image, "readlink /etc/x", create_container=hooks)) == "x\n"
    assert ways.report.read_text().splitlines() == [
        "nvhook: warning: left out what this version does not know: --time-travel 3",
        "nvhook: warning: left out what this version does not know: --fast",
    ]

# SPDX-License-Identifier: Apache-2.0
"""cdi.registry: folders of specs, which file wins, and what is told of those that don't count."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cdi import reader, registry, source
from ldcache.errors import NvhookError
from tests import cdidata


def write(path: Path, spec: Any = None, text: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(spec) if text is None else text)
    return path


def devices(*names: str, value: str = "1", **members: Any) -> dict[str, Any]:
    return cdidata.minimal(
        devices=[{"name": name, "containerEdits": {"env": [f"A={value}"]}} for name in names], **members
    )


def scan(*folders: Path) -> registry.Registry:
    return registry.scan([str(folder) for folder in folders], reader.load)


def files(found: registry.Registry) -> dict[str, str]:
    return {name.partition("=")[2]: Path(file.path).name for name, (file, _) in found.devices.items()}


def test_a_later_folder_wins_device_by_device(tmp_path: Path) -> None:
    low = write(tmp_path / "low/a.json", devices("w0", "w1"))
    write(tmp_path / "high/b.json", devices("w0"))
    found = scan(tmp_path / "low", tmp_path / "high")
    assert files(found) == {"w0": "b.json", "w1": "a.json"}
    assert found.shadowed == {"acme.test/widget=w0": [str(low)]}
    assert (found.conflicts, found.failed, found.skipped) == ({}, {}, {})


def test_three_files_of_one_folder(tmp_path: Path) -> None:
    paths = [str(write(tmp_path / f"{name}.json", devices("w0", name + "0"))) for name in "abc"]
    found = scan(tmp_path)
    assert files(found) == {"a0": "a.json", "b0": "b.json", "c0": "c.json"}
    assert found.conflicts == {"acme.test/widget=w0": paths}
    with pytest.raises(NvhookError, match=r"w0 \(defined by each of .*a.json and .*b.json and .*c.json\)"):
        registry.resolve(found, ["acme.test/widget=w0"])


def test_equal_names_of_two_kinds_are_two_devices(tmp_path: Path) -> None:
    write(tmp_path / "a.json", devices("w0"))
    write(tmp_path / "b.json", devices("w0", kind="acme.test/gadget"))
    assert sorted(scan(tmp_path).devices) == ["acme.test/gadget=w0", "acme.test/widget=w0"]


def test_what_is_not_read_says_why(tmp_path: Path) -> None:
    write(tmp_path / "good.yaml", devices("w0"))
    for name in ("a.yml", "a.JSON", "a.yaml.bak", "README"):
        write(tmp_path / name, devices("lost"))
    write(tmp_path / "sub.json/a.json", devices("lost"))
    write(tmp_path / "broken.json", text="{")
    write(tmp_path / "twice.json", devices("w1", "w1", kind=""))
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "dangling.yaml").symlink_to("nowhere")
    found = scan(tmp_path)
    assert files(found) == {"w0": "good.yaml"}
    assert {Path(path).name for path in found.skipped} == {"a.yml", "a.JSON", "a.yaml.bak", "README", "sub.json"}
    assert {Path(path).name: len(reasons) for path, reasons in found.failed.items()} == {
        "broken.json": 1,
        "twice.json": 2,
        "pipe.yaml": 1,
        "dangling.yaml": 1,
    }
    assert "not a regular file" in found.failed[str(tmp_path / "pipe.yaml")][0]


def test_names_that_look_odd_and_are_read(tmp_path: Path) -> None:
    write(tmp_path / ".json", devices("w0"))
    write(tmp_path / "real/target.txt", devices("w1"))
    (tmp_path / "link.yaml").symlink_to("real/target.txt")
    assert files(scan(tmp_path)) == {"w0": ".json", "w1": "link.yaml"}


def test_folders_that_are_not_there_or_none(tmp_path: Path) -> None:
    write(tmp_path / "file", text="")
    found = scan(tmp_path / "nowhere", tmp_path / "file")
    assert found.failed == {str(tmp_path / "file"): ["Not a directory"]}


def test_a_folder_that_is_a_link_is_followed(tmp_path: Path) -> None:
    """As after library 1.1.0; `cdi list` says that releases do not."""
    write(tmp_path / "real/a.json", devices("w0"))
    (tmp_path / "link").symlink_to("real")
    assert files(scan(tmp_path / "link")) == {"w0": "a.json"}


def test_edits_come_in_the_order_of_the_request(tmp_path: Path) -> None:
    write(tmp_path / "a.json", devices("w0", "w1", containerEdits={"env": ["A=top"]}))
    write(tmp_path / "b.json", devices("g0", kind="acme.test/gadget", value="g"))
    found = scan(tmp_path)
    names = ["acme.test/gadget=g0", "acme.test/widget=w1", "acme.test/widget=w0", "acme.test/widget=w1"]
    values = [edits.get("env") for edits in registry.resolve(found, names)]
    assert values == [None, ["A=g"], ["A=top"], ["A=1"], ["A=1"], ["A=1"]]
    assert registry.resolve(found, []) == []


def test_plain_json_needs_no_yaml(tmp_path: Path) -> None:
    write(tmp_path / "a.json", devices("w0"))
    write(tmp_path / "b.yaml", text="# YAML\n" + json.dumps(devices("w1")))
    found = registry.scan([str(tmp_path)], registry.load_plain)
    assert files(found) == {"w0": "a.json"}
    assert found.failed == {str(tmp_path / "b.yaml"): ["not plain JSON"]}
    assert found.unparsed == [str(tmp_path / "b.yaml")]
    with pytest.raises(source.NotPlain):
        registry.load_plain(str(tmp_path / "b.yaml"))


def test_a_file_that_goes_away_between_look_and_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", devices("w0"))

    def load(name: str) -> Any:
        path.unlink()
        return reader.load(name)

    assert registry.scan([str(tmp_path)], load).failed == {str(path): ["No such file or directory"]}

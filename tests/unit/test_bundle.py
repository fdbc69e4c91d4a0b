# SPDX-License-Identifier: Apache-2.0
"""hook.bundle: which folder a bundle is, however it is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hook import bundle


@pytest.mark.parametrize("name", ["plain", "ends.", "ends.."])
@pytest.mark.parametrize(
    "form", ["{folder}", "{folder}/", "{folder}/.", "{folder}/./", "{name}", "{name}/", "./{name}"]
)
def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: str) -> None:
    """The container's root is a path below it."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"ociVersion": "1.0.2", "root": {"path": "rootfs"}}))
    monkeypatch.chdir(tmp_path)
    opened = bundle.Bundle(form.format(folder=folder, name=name))
    assert Path(opened.container.root_path) == folder / "rootfs"
    assert Path(opened.path) == folder / "config.json"


def test_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"ociVersion": "1.0.2", "root": {"path": "rootfs"}}))
    monkeypatch.chdir(tmp_path)
    for place in (".", "./"):
        assert bundle.Bundle(place).container.root_path == f"{tmp_path}/rootfs"

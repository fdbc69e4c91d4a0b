# SPDX-License-Identifier: Apache-2.0
"""Our verdicts and results against those of the Go library, on all that is recorded in tests/data/cdi."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cdi import annotations as container_annotations
from cdi import cli, decode, names, reader, report, validate, versions
from tests import cdidata

CASES = cdidata.cases()
INJECTIONS: list[dict[str, Any]] = cdidata.load("inject")
NAMES: dict[str, list[dict[str, Any]]] = cdidata.load("names")
TEXTS: list[dict[str, Any]] = cdidata.load("text")

RELEASES = ("0.5.4", "0.6.2", "0.7.2", "0.8.1", "1.0.1", "1.1.0", "HEAD")


def test_the_data_is_whole() -> None:
    assert (len(CASES), len(INJECTIONS), len(TEXTS)) == (189, 58, 23)
    assert {name: len(found) for name, found in NAMES.items()} == {
        "qualified_names": 28,
        "annotation_keys": 10,
        "annotation_parse": 9,
    }
    assert versions.RELEASES == RELEASES


@pytest.mark.parametrize("release", RELEASES)
def test_the_verdict_of_each_release(release: str) -> None:
    # A crash of the library is no acceptance.
    wrong = [
        case["name"]
        for case in CASES
        if (release in validate.check(case["spec"]).read_by()) != (case["valid_by_library"][release] is True)
    ]
    assert wrong == []


def test_the_version_that_a_content_needs() -> None:
    wrong = [
        case["name"]
        for case in CASES
        if case.get("min_version") is not None
        and versions.minimum_version(validate.check(case["spec"]).spec) != case["min_version"]
    ]
    assert wrong == []


def test_the_command_on_all_specs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As files, through the YAML reader, with the schema as second gate."""
    for case in CASES:
        (tmp_path / f"{case['name']}.json").write_text(json.dumps(case["spec"]))
    files = [str(tmp_path / f"{case['name']}.json") for case in CASES]
    assert cli.main(["validate", "--json", *files]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert [found["file"] for found in printed] == files
    for case, found in zip(CASES, printed, strict=True):
        verdicts = {release: release in found["read_by"] for release in RELEASES}
        assert verdicts == {name: value is True for name, value in case["valid_by_library"].items()}, case["name"]
        assert found["valid"] == case["valid"], case["name"]
        assert bool(found["problems"]) != case["valid"]
        if case["valid"]:
            assert found["needed_version"] == case["min_version"]


def test_the_command_names_the_oldest_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for case in CASES:
        if not case["valid"]:
            continue
        path = tmp_path / "spec.json"
        path.write_text(json.dumps(case["spec"]))
        assert cli.main(["validate", str(path)]) == 0, case["name"]
        line = capsys.readouterr().out.splitlines()[0]
        oldest = next(release for release in RELEASES if case["valid_by_library"][release] is True)
        text = "no release of the library reads it" if oldest == "HEAD" else f"read by library {oldest} and newer"
        assert line.endswith(f"; {text}"), case["name"]


def test_the_schema_refuses_what_the_rules_refuse() -> None:
    """Nothing else; and all that a schema can say, where decoding has nothing against a file."""
    for case in CASES:
        decoder = decode.Decoder()
        spec = decoder.spec(case["spec"])
        refused = report.schema_problems(spec) != []
        if case["valid"]:
            assert not refused, case["name"]
        elif not any("HEAD" in finding.refused_by for finding in decoder.findings):
            texts = [problem.what for problem in validate.check(case["spec"]).problems()]
            comparing = all("is too low" in text or "a second" in text for text in texts)
            assert refused != comparing, case["name"]


@pytest.mark.parametrize("case", TEXTS, ids=lambda case: str(case["name"]))
def test_texts(tmp_path: Path, case: dict[str, Any]) -> None:
    path = tmp_path / f"s{case['ext']}"
    path.write_bytes(case["text"].encode())
    found = report.judge(str(path))
    assert found.valid == case["valid"], found.problems
    if case["valid"]:
        assert [f"{found.kind}={name}" for name in found.devices] == case["devices"]
        assert found.needed_version == case["min_version"]


def test_texts_of_files_modes() -> None:
    """What the coerced numbers are, of which the verdict says nothing."""
    for name in ("filemode-octal-0660", "filemode-octal-0o660"):
        text = next(case["text"] for case in TEXTS if case["name"] == name)
        spec = validate.check(reader.parse(text)).spec
        assert spec["devices"][0]["containerEdits"]["deviceNodes"][0]["fileMode"] == 0o660


@pytest.mark.parametrize("case", INJECTIONS, ids=lambda case: str(case["name"]))
def test_injections(
    tmp_path: Path, case: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command, from files: the registry, the reader and the injection together."""
    missing = cdidata.missing_on_host(case.get("needs_host", []))
    if missing:
        pytest.skip(f"needs {missing} on this machine")
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    for file in case["cdi_specs"]:
        text = file["text"] if "text" in file else json.dumps(file["spec"])
        (folders[file["dir"]] / file["file"]).write_text(text)
    options = [word for folder in folders for word in ("--spec-dir", str(folder))]
    assert cli.main(["list", "--json", *options]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [device["name"] for device in listed["devices"]] == case["listed_devices"]
    failing = {path.replace("<dir0>", str(folders[0])) for path in case.get("cache_errors", {})}
    lost = {path for conflict in listed["conflicts"] for path in conflict["files"]}
    assert lost | {failed["path"] for failed in listed["failed"]} == failing

    (tmp_path / "config.json").write_text(json.dumps(case["oci_before"]))
    devices = [word for name in case["devices"] for word in ("--device", name)]
    with (tmp_path / "config.json").open() as config:
        monkeypatch.setattr(sys, "stdin", config)
        status = cli.main(["inject", *options, *devices])
    printed = capsys.readouterr()
    assert status == (0 if case["ok"] else 1)
    if case["ok"]:
        assert cdidata.comparable(json.loads(printed.out)) == cdidata.comparable(case["oci_after_expected"])
        return
    assert printed.out == ""
    error = next(line for line in printed.err.splitlines() if line.startswith("nvhook: error: "))
    assert all(name in error for name in case.get("unresolved", []))


@pytest.mark.parametrize("case", NAMES["qualified_names"], ids=lambda case: repr(case["device"]))
def test_qualified_names(case: dict[str, Any]) -> None:
    if case["valid"]:
        assert names.parse_qualified(case["device"]) == (case["vendor"], case["class"], case["name"])
    else:
        with pytest.raises(names.InvalidName):
            names.parse_qualified(case["device"])


@pytest.mark.parametrize("case", NAMES["annotation_keys"], ids=lambda case: f"{case['plugin']}_{case['device_id']}")
def test_annotation_keys(case: dict[str, Any]) -> None:
    if case["valid"]:
        assert container_annotations.key(case["plugin"], case["device_id"]) == case["key"]
    else:
        with pytest.raises(container_annotations.InvalidAnnotation):
            container_annotations.key(case["plugin"], case["device_id"])


@pytest.mark.parametrize("case", NAMES["annotation_parse"], ids=lambda case: str(case["annotations"]))
def test_annotations(case: dict[str, Any]) -> None:
    if case["valid"]:
        assert container_annotations.devices(case["annotations"]) == case["devices"]
    else:
        with pytest.raises(container_annotations.InvalidAnnotation):
            container_annotations.devices(case["annotations"])


def test_a_slash_in_an_id_becomes_an_underscore() -> None:
    assert container_annotations.key("acme.test", "dev/0") == "cdi.k8s.io/acme.test_dev_0"

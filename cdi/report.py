# SPDX-License-Identifier: Apache-2.0
"""What `cdi validate` says of one file.

Cold: it imports jsonschema. The verdict is that of the rules (`cdi.validate`), as the library gives it; the schema
is a second gate behind them, run on the spec after decoding, so that it never sees what readers coerce. It
describes no more than the rules do, and a test holds that it never refuses what they take.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdi import advice, reader, source, spec, validate, versions

SCHEMA = Path(__file__).with_name("schema") / "cdi.schema.json"

Place = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Report:
    """`problems` and `warnings` are pairs of place and text; `read_by` are releases of the Go library, oldest
    first, which may be some for a file that is refused: older ones know fewer rules."""

    path: str
    problems: tuple[Place, ...]
    warnings: tuple[Place, ...] = ()
    read_by: tuple[str, ...] = ()
    kind: str = ""
    devices: tuple[str, ...] = ()
    needed_version: str = ""

    @property
    def valid(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """The object that `cdi validate --json` prints for a file."""
        made: dict[str, Any] = {"file": self.path, "valid": self.valid, "read_by": list(self.read_by)}
        if self.valid:
            made |= {"kind": self.kind, "devices": list(self.devices), "needed_version": self.needed_version}
        made["problems"] = [{"path": where, "what": what} for where, what in self.problems]
        made["warnings"] = [{"path": where, "what": what} for where, what in self.warnings]
        return made

    def lines(self) -> Iterator[str]:
        """The same for a person."""
        if self.valid:
            devices = "1 device" if len(self.devices) == 1 else f"{len(self.devices)} devices"
            yield f"{self.path}: valid, {self.kind}, {devices}; {self.oldest()}"
        else:
            yield f"{self.path}: refused" + (f"; only {readers(self.read_by)} reads it" if self.read_by else "")
        for where, what in self.problems:
            yield f"  {where}: {what}" if where else f"  {what}"
        for where, what in self.warnings:
            yield f"  warning: {where}: {what}" if where else f"  warning: {what}"

    def oldest(self) -> str:
        """The oldest library release that reads a valid file, in words."""
        first = next(iter(self.read_by), versions.HEAD)
        return "no release of the library reads it" if first == versions.HEAD else f"read by library {first} and newer"


def readers(read_by: tuple[str, ...]) -> str:
    """Releases in words, as a range."""
    return f"library {read_by[0]}" if len(read_by) == 1 else f"library {read_by[0]} to {read_by[-1]}"


def judge(path: str) -> Report:
    """Read and judge a file, whatever its name. Raises OSError as `source.read_file` does."""
    data = source.read_file(path)
    try:
        checked = validate.check(reader.parse(data))
    except reader.InvalidText as error:
        return Report(path, (("", str(error)),))
    problems = [(problem.where, problem.what) for problem in checked.problems()] or schema_problems(checked.spec)
    if problems:
        return Report(path, tuple(problems), read_by=tuple(checked.read_by()))
    return Report(
        path,
        problems=(),
        warnings=(*_name_warnings(path), *advice.warnings(checked.spec)),
        read_by=tuple(checked.read_by()),
        kind=checked.spec["kind"],
        devices=tuple(spec.device_names(checked.spec)),
        needed_version=versions.minimum_version(checked.spec),
    )


def _name_warnings(path: str) -> list[Place]:
    if path.endswith(tuple(spec.SUFFIXES)):
        return []
    return [("", "readers look at names that end in .json or .yaml, and at no others")]


def schema_problems(value: dict[str, Any]) -> list[Place]:
    """What the schema has against a decoded spec."""
    import jsonschema

    validator = jsonschema.Draft7Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    found = []
    for error in validator.iter_errors(value):
        parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path]
        found.append(("".join(parts).lstrip("."), f"against the schema: {error.message[:200]}"))
    return found

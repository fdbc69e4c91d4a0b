# SPDX-License-Identifier: Apache-2.0
"""A CDI spec's file: its text, and how it is put in its place.

A spec is a JSON value, as `cdi.decode` gives it. What is written is quoted so that no reader can take a string for
something else, and is checked first: readers refuse a whole file for one bad member, and their user only sees
"unresolvable device".
"""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any, Literal

from cdi import validate, versions
from ldcache.errors import NvhookError

Spec = dict[str, Any]
Format = Literal["yaml", "json"]

# Readers look at these and at no other name, `.yml` and `.JSON` included.
SUFFIXES: dict[str, Format] = {".yaml": "yaml", ".json": "json"}


REMEDY = "give --output a place that you may write, or run as root"
# What neither another user nor a retry changes.
REMEDIES = {
    errno.ENOSPC: "make room there, or give --output another place",
    errno.EDQUOT: "make room there, or give --output another place",
    errno.EROFS: "give --output a place that is not read-only, such as /var/run/cdi",
    errno.EISDIR: "give --output the name of a file",
    errno.ENOTDIR: "give --output a file in a folder",
    errno.EEXIST: "give --output a file in a folder",
}


class InvalidSpec(ValueError):
    """A spec that some reader refuses. `problems` has all reasons, each with its place in the spec."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def device_names(spec: Spec) -> list[str]:
    """The names of a spec's devices, in its order."""
    return [device["name"] for device in spec.get("devices", []) if "name" in device]


def problems(spec: Any, release: str = versions.NEWEST_RELEASE) -> list[str]:
    """Why a release of the library would refuse a spec of ours; empty if it reads just what stands there.

    Stricter than it is where it guesses: a member's name counts by case, and a number is no string.
    """
    checked = validate.check(spec)
    found = [str(problem) for problem in checked.problems(release)]
    if not found and checked.spec != without_null(spec):
        found.append("would be read as something else: a name in other letters, or a number for a string")
    return found


def without_null(value: Any) -> Any:
    """The value without members that are None, which readers take for absent."""
    if isinstance(value, dict):
        return {name: without_null(item) for name, item in value.items() if item is not None}
    return [without_null(item) for item in value] if isinstance(value, list) else value


def without_empty(value: Any) -> Any:
    """The value without members that are None or empty: old readers refuse even an empty new field."""
    if isinstance(value, dict):
        kept = {name: without_empty(item) for name, item in value.items()}
        return {name: item for name, item in kept.items() if item not in (None, "", [], {})}
    if isinstance(value, list):
        return [without_empty(item) for item in value]
    return value


def serialise(spec: Spec, form: Format, release: str = versions.NEWEST_RELEASE) -> str:
    """The file's text. Raises InvalidSpec for a spec that this release would refuse."""
    found = problems(spec, release)
    if found:
        raise InvalidSpec(found)
    return _json(spec) if form == "json" else _yaml(spec)


# Readers take JSON as YAML: that knows no surrogate pairs, so a character beyond 16 bits must stand for itself;
# these must not, for they are forbidden there, or count as line breaks.
ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def _json(spec: Spec) -> str:
    text = json.dumps(spec, indent=2, ensure_ascii=False)
    return ESCAPED.sub(lambda match: f"\\u{ord(match.group()):04x}", text) + "\n"


class _Quoted(str):
    """A string that is written between double quotes."""

    __slots__ = ()


def _quoted(value: Any, keys: bool = False) -> Any:
    """The value with its strings quoted, and with `keys` the names of its members too."""
    if isinstance(value, dict):
        # All names are a spec's own but those of annotations.
        return {_Quoted(name) if keys else name: _quoted(item, name == "annotations") for name, item in value.items()}
    if isinstance(value, list):
        return [_quoted(item) for item in value]
    return _Quoted(value) if isinstance(value, str) else value


def _yaml(spec: Spec) -> str:
    import yaml

    base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

    class Dumper(base):  # type: ignore[misc]
        # A list that stands in two places would come out as `&id001` and `*id001`.
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent(dumper: Any, text: _Quoted) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style='"')

    # All strings but the field names: readers parse YAML 1.1, which makes 8 of 010 and true of yes, and our
    # own dumper's idea of what needs quotes is not theirs (1e3).
    Dumper.add_representer(_Quoted, represent)
    text: str = yaml.dump(
        _quoted(spec), Dumper=Dumper, explicit_start=True, sort_keys=False, default_flow_style=False, width=4096
    )
    return text


def write(path: Path, text: str) -> None:
    """Put a spec file in its place, whole and readable by all, at one moment. Raises NvhookError.

    Engines watch the folder: they see a rename only if it comes from the same folder, and the temporary file
    only if its name ends like a spec's. The mode is set before the rename, or a rootless engine would meet a
    file that it can't read.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _make_folder(path.parent)
        # One that was left behind by a process of our number: in a container, that is the same one each time.
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        what = f"cannot write {path}: {error.strerror}"
        raise NvhookError(what, REMEDIES.get(error.errno or 0, REMEDY)) from error


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        return
    # mkdir's mode goes through the caller's umask, and a folder that others can't search hides its specs.
    folder.chmod(0o755)

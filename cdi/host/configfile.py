# SPDX-License-Identifier: Apache-2.0
"""`nvhook config`: prints the configuration as a file, changes it, and keeps what somebody wrote in it.

A file that is there is edited where it stands, comments and order kept. Where there is none, one is made of the
settings in force, those of NVIDIA's file if that is obeyed; what equals the default is a comment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from cdi.host import config, settings, store
from ldcache import root
from ldcache.errors import NvhookError

HEAD = """\
# Configuration of nvhook; docs/configuration.md explains each key. A key behind # has its default.
"""

# settings.NOT_ENFORCED ends with this file.
NO_LONGER = (
    f"with {settings.OURS} in force the runtime honours capabilities and enforces requirements, which it does not by "
    f"{settings.NVIDIAS}: keep that by compat.capabilities=all, compat.requirements=warn and "
    "compat.unknown-capability=warn"
)


def text(root_fd: int, changes: dict[str, Any]) -> tuple[str, list[str]]:
    """The configuration file with these changes, and warnings. Raises NvhookError."""
    in_force = config.read(root_fd)
    warnings = list(in_force["warnings"])
    if in_force["source"] == settings.OURS:
        made = edited(root.read_file(root_fd, settings.OURS, settings.FILE_MAX).decode(), changes)
    else:
        values = in_force["values"]
        if values.get("runtime.mode") == "csv":
            # Ours has no such mode: auto sees what the host is.
            values["runtime.mode"] = "auto"
        if in_force["source"] == settings.NVIDIAS and values.get("runtime.mode", "auto") != "legacy":
            warnings.append(NO_LONGER)
        made = fresh(values | changes)
    # What was written is read as the hook will read it.
    config.parse(settings.OURS, made.encode())
    return made, warnings


def fresh(values: dict[str, Any]) -> str:
    """A file with these values and, as comments, the defaults of all other keys."""
    lines = [HEAD]
    table = ""
    for name in sorted(config.KEYS, key=lambda name: ("." in name, name)):
        above, _, key = name.rpartition(".")
        if above != table:
            lines.append(f"[{above}]\n")
            table = above
        value = values.get(name, settings.DEFAULTS[name])
        sign = "" if name in values else "#"
        lines.append(f"# {config.KEYS[name].text}\n{sign}{key} = {written(value)}\n")
    return "\n".join(lines)


def edited(before: str, changes: dict[str, Any]) -> str:
    """A file's text with some keys set. All else stays as it is, to the byte."""
    import tomlkit

    document = tomlkit.parse(before)
    for name, value in changes.items():
        above, _, key = name.rpartition(".")
        table: Any = document
        if above:
            if above not in document:
                document[above] = tomlkit.table()
            table = document[above]
        table[key] = ",".join(value) if isinstance(value, list) else value
    return tomlkit.dumps(document)


def written(value: Any) -> str:
    """A value as TOML; a list as names between commas. JSON's strings are TOML's, and its true and false."""
    return json.dumps(",".join(value) if isinstance(value, list) else value, ensure_ascii=False)


def change(word: str) -> tuple[str, Any]:
    """The argument of --set: KEY=VALUE, or KEY alone for true. Raises NvhookError."""
    name, equals, value = word.partition("=")
    key = config.KEYS.get(name)
    if key is None:
        hint = config.suggestion(name, list(config.KEYS))
        raise NvhookError(f"{name!a} is no key of {settings.OURS}{hint}", "docs/configuration.md has all keys")
    words = {"true": True, "false": False}
    plain: Any = words.get(value, value) if equals else True
    return name, config.judged("--set", name, plain, key.convert)


def write(root_fd: int, content: str) -> None:
    """Put the file in its place, by rename. Raises NvhookError."""
    folder, name = root.split(settings.OURS)
    try:
        parent = root.open_path(root_fd, root.split(folder)[0])
        try:
            os.mkdir(root.split(folder)[1], 0o755, dir_fd=parent)
        except FileExistsError:
            pass
        finally:
            os.close(parent)
        place = root.open_path(root_fd, folder)
        try:
            store.write_own(place, name, content.encode())
        finally:
            os.close(place)
    except OSError as error:
        raise NvhookError(f"cannot write {settings.OURS}: {error.strerror}", "run this as root") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nvhook config`."""
    add = parser.add_argument
    add("--host-root", type=os.path.abspath, default="/", metavar="DIR", help="the folder that stands for the host's /")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key; repeatable")
    add("--in-place", action="store_true", help=f"write {settings.OURS} instead of printing it")


def run(arguments: argparse.Namespace) -> int:
    """`nvhook config`. Raises NvhookError."""
    changes = dict(change(word) for word in arguments.set)
    root_fd = root.open_host(arguments.host_root)
    try:
        made, warnings = text(root_fd, changes)
        for warning in warnings:
            print(f"nvhook: warning: {warning}", file=sys.stderr)
        if arguments.in_place:
            write(root_fd, made)
        else:
            sys.stdout.write(made)
    finally:
        os.close(root_fd)
    return 0

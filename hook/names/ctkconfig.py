# SPDX-License-Identifier: Apache-2.0
"""`nvidia-ctk config`: NVIDIA's configuration file, printed or changed. nvhook obeys it where there is none of its own.

What is there is kept, comments too. A key that nvhook does not know is an error, as it is NVIDIA's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from cdi.host import config, settings, store
from ldcache.errors import NvhookError

HEAD = """\
# NVIDIA's configuration file as nvhook reads it. Where /etc/nvhook/config.toml exists, this one is not read.
# A key behind # has its default; keys that have no effect in nvhook are not listed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options, and the command `default`."""
    parser.add_argument("--config-file", "--config", "-c", default=settings.NVIDIAS, metavar="FILE", help="the file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY[=VALUE]", help="change a key; repeatable")
    parser.add_argument("--in-place", "-i", action="store_true", help="change the file itself")
    parser.add_argument("--output", "-o", metavar="FILE", help="default: stdout")
    more = parser.add_subparsers(dest="what", metavar="default")
    default = more.add_parser("default", aliases=["create-default", "generate-default"], help="a file of defaults")
    default.add_argument("--output", "-o", metavar="FILE", help="default: stdout")


def run(arguments: argparse.Namespace) -> int:
    """The command. Raises NvhookError."""
    if arguments.what is not None:
        write(arguments.output, defaults())
        return 0
    path = arguments.config_file
    before = read(path)
    made = changed(path, before if before is not None else defaults(), arguments.set)
    # What is written is judged as nvhook will read it.
    for warning in config.parse(path, made.encode(), nvidias=True)[1]:
        print(f"nvidia-ctk: warning: {warning}", file=sys.stderr)
    if os.path.exists(settings.OURS) and path == settings.NVIDIAS:
        print(f"nvidia-ctk: warning: {settings.OURS} exists, so {path} has no effect", file=sys.stderr)
    write(path if arguments.in_place else arguments.output, made)
    return 0


def read(path: str) -> str | None:
    """The file's text, None where there is none. Raises NvhookError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NvhookError(f"cannot read {path}: {reason}", "give a TOML file that you may read") from error


def defaults() -> str:
    """The keys of NVIDIA's file that mean something here, each a comment with its default."""
    lines = [HEAD]
    table = ""
    # A table's keys stand together: TOML allows its head once.
    for name in sorted(config.NVIDIA, key=lambda name: name.rpartition(".")[::2]):
        ours = config.NVIDIA[name][0]
        if ours is None or ours not in settings.DEFAULTS:
            continue
        above, _, key = name.rpartition(".")
        if above != table:
            lines.append(f"[{above}]")
            table = above
        value = settings.DEFAULTS[ours]
        if ours == "compat.forward-compatibility":
            value = "ldconfig"
        lines.append(f"#{key} = {json.dumps(','.join(value) if isinstance(value, list) else value)}")
    return "\n".join(lines) + "\n"


def changed(path: str, text: str, words: list[str]) -> str:
    """The text with keys set; `KEY` alone is true, `KEY=nil` takes a key away. Raises NvhookError."""
    if not words:
        return text
    import tomlkit
    from tomlkit.exceptions import ParseError

    try:
        document: Any = tomlkit.parse(text)
    except ParseError as error:
        raise NvhookError(f"{path} is no TOML: {error}", "repair the file, or remove it") from error
    for word in words:
        name, equals, value = word.partition("=")
        if name not in config.NVIDIA:
            hint = config.suggestion(name, list(config.NVIDIA))
            raise NvhookError(f"{name!a} is no key of {settings.NVIDIAS}{hint}", "`nvidia-ctk config default` has keys")
        *above, key = name.split(".")
        table = document
        for depth, part in enumerate(above, 1):
            if part not in table:
                table[part] = tomlkit.table()
            table = config.judged(path, ".".join(above[:depth]), table[part], config.table)
        if equals and value == "nil":
            table.pop(key, None)
        else:
            table[key] = converted(name, value) if equals else True
    return tomlkit.dumps(document)


def converted(name: str, value: str) -> Any:
    """The value as the key's kind asks: a list between colons or commas, a boolean, or the text."""
    kind = config.NVIDIA[name][1]
    if kind in (config.strings, config.hooks):
        return [item for item in value.split(":" if ":" in value else ",") if item]
    return {"true": True, "false": False}.get(value, value) if kind is config.boolean else value


def write(path: str | None, text: str) -> None:
    """To stdout, or to a file by rename. Raises NvhookError."""
    if not path:
        sys.stdout.write(text)
        return
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(target.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            store.write_own(folder, target.name, text.encode())
        finally:
            os.close(folder)
    except OSError as error:
        raise NvhookError(f"cannot write {path}: {error.strerror}", "run this as root") from error

# SPDX-License-Identifier: Apache-2.0
"""The command `cdi`: Container Device Interface files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ldcache.errors import NvhookError


def parser() -> argparse.ArgumentParser:
    """All verbs and their options."""
    top = argparse.ArgumentParser(prog="cdi", description="Container Device Interface files.")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    add_generate(verbs.add_parser("generate", help="write a spec of this host's GPUs"))
    return top


def add_generate(verb: argparse.ArgumentParser) -> None:
    """The options of `cdi generate`."""
    from cdi.host import inventory

    verb.add_argument("--output", type=Path, metavar="FILE", help="a .yaml or .json file; default: stdout")
    verb.add_argument("--format", choices=("yaml", "json"), help="default: as --output ends, else yaml")
    verb.add_argument("--hook-path", metavar="FILE", help="the installed launcher nvhook-create-container")
    inventory.add_root_arguments(verb)


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0 done, 1 failed, 2 usage."""
    top = parser()
    arguments = top.parse_args(argv)
    try:
        check_generate(top, arguments)
        return run_generate(arguments)
    except NvhookError as error:
        print(f"nvhook: error: {error.what}\n  remedy: {error.remedy}", file=sys.stderr)
        return 1


def check_generate(top: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Usage errors, which end the program with status 2."""
    from cdi import spec

    output, hook_path = arguments.output, arguments.hook_path
    if output is not None and output.suffix not in spec.SUFFIXES:
        top.error(f"--output {output}: engines read files that end in .yaml or .json, and no others")
    if hook_path is not None and not hook_path.startswith("/"):
        top.error(f"--hook-path {hook_path}: must be absolute, for a runtime does not search")


def run_generate(arguments: argparse.Namespace) -> int:
    """`cdi generate`. Raises NvhookError."""
    from cdi import generate, spec
    from cdi.host import inventory

    output = arguments.output
    form = arguments.format or (spec.SUFFIXES[output.suffix] if output is not None else "yaml")
    hook_path = arguments.hook_path or find_hook()
    found, _ = inventory.current(inventory.options_of(arguments))
    made = generate.make(found, hook_path)
    warn(found["warnings"] + generate.left_out(found))
    try:
        text = spec.serialise(made, form)
    except spec.InvalidSpec as error:
        remedy = "report this to nvhook, with the output of `nvhook inventory --json`"
        raise NvhookError(f"the spec would not be read: {error}", remedy) from error
    if output is None:
        sys.stdout.write(text)
        return 0
    warn([f"{name} in the same folder is no spec that can be read" for name in generate.refuse_conflict(output, made)])
    spec.write(output, text)
    return 0


def warn(lines: list[str]) -> None:
    """Warnings on stderr; stdout may be the spec."""
    for line in lines:
        print(f"nvhook: warning: {line}", file=sys.stderr)


def find_hook() -> str:
    """The installed launcher: the one beside this very copy of nvhook, else a packaged or a local one."""
    from cdi import generate

    library = Path(__file__).resolve().parents[1]
    folders = [Path("/usr/bin"), Path("/usr/local/bin")]
    if library.parts[-2:] == ("lib", "nvhook") and (library / "bin/launch").is_file():
        # Only there is this an installed copy; above a checkout, `bin` may be anybody's.
        folders.insert(0, library.parents[1] / "bin")
    for path in (folder / generate.HOOK_NAME for folder in folders):
        if path.is_file():
            return str(path)
    path = Path("/usr/bin", generate.HOOK_NAME)
    warn([f"{path} is not there yet: no container starts with this spec before `nvhook install` or --hook-path"])
    return str(path)

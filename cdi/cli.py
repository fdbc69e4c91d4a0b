# SPDX-License-Identifier: Apache-2.0
"""The command `cdi`: Container Device Interface files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ldcache import VERSION
from ldcache.errors import NvhookError

if TYPE_CHECKING:
    from cdi import generate, registry, spec


def parser() -> argparse.ArgumentParser:
    """All verbs and their options."""
    top = argparse.ArgumentParser(prog="cdi", description="Container Device Interface files.")
    top.add_argument("--version", action="version", version=f"%(prog)s {VERSION}", help="print the version")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    add_generate(verbs.add_parser("generate", help="write a spec of this host's GPUs"))
    verbs.add_parser("check", help="whether the files say what the host is now", add_help=False)
    watch_verb = verbs.add_parser("watch", help="keep a spec of this host's GPUs fresh", allow_abbrev=False)
    add_generate(watch_verb)
    add_watch(watch_verb)
    add_list(verbs.add_parser("list", help="devices, the file that defines each, and files that do not count"))
    add_validate(verbs.add_parser("validate", help="whether engines read a file, and which ones"))
    add_inject(verbs.add_parser("inject", help="put devices into the config.json on stdin"))
    add_transform(verbs.add_parser("transform", help="change a spec"))
    return top


def add_generate(verb: argparse.ArgumentParser) -> None:
    """The options of `cdi generate`."""
    from cdi import content, modes
    from cdi.host import inventory

    verb.add_argument("--output", type=Path, metavar="FILE", help="a .yaml or .json file; default: stdout")
    verb.add_argument("--format", choices=("yaml", "json"), help="default: json in a file, else yaml")
    verb.add_argument("--hook-path", metavar="FILE", help="the installed launcher nvhook-create-container")
    content.add_arguments(verb)
    modes.add_arguments(verb)
    verb.add_argument("--load-kmods", action="store_true", help="first load missing kernel modules and make nodes")
    verb.add_argument("--strict", action="store_true", help="fail if a GPU has to be left out")
    inventory.add_root_arguments(verb)
    # A file outlives this look, and a GPU that is lost has its UUID in /proc all the same.
    verb.set_defaults(nvml="health")


def add_watch(verb: argparse.ArgumentParser) -> None:
    """The options of `cdi watch` that `cdi generate` has not."""
    from cdi.host import inventory

    add, seconds = verb.add_argument, inventory.seconds
    add("--debug", action="store_true", help="say why each look is taken")
    add("--once", action="store_true", help="take one look and end: 0 if the file is fresh then, else 3")
    add("--interval", type=seconds, default=10.0, metavar="S", help="between looks without an event; default: 10")
    add("--quiet", type=seconds, default=1.0, metavar="S", help="how long to wait until it is quiet; default: 1")


def add_list(verb: argparse.ArgumentParser) -> None:
    """The options of `cdi list`."""
    add_spec_dir(verb)
    verb.add_argument("--json", action="store_true", help="all that is known, as one JSON object")


def add_validate(verb: argparse.ArgumentParser) -> None:
    """The options of `cdi validate`."""
    verb.add_argument("files", nargs="+", metavar="FILE")
    verb.add_argument("--json", action="store_true", help="a list with one JSON object for each file")


def add_inject(verb: argparse.ArgumentParser) -> None:
    """The options of `cdi inject`."""
    add_spec_dir(verb)
    verb.add_argument(
        "--device", action="append", default=[], metavar="V/C=N", help="a device's qualified name; may be repeated"
    )


def add_transform(verb: argparse.ArgumentParser) -> None:
    """The options of `cdi transform root`."""
    root = verb.add_subparsers(dest="what", required=True, metavar="WHAT").add_parser(
        "root", help="move the paths below one folder to another"
    )
    root.add_argument("--from", required=True, dest="old", metavar="DIR", help="where the paths are below now")
    root.add_argument("--to", required=True, dest="new", metavar="DIR", help="what stands for it from then on")
    root.add_argument("--input", default="-", metavar="FILE", help="default: stdin")
    root.add_argument("--output", type=Path, metavar="FILE", help="a .yaml or .json file; default: stdout")
    root.add_argument("--format", choices=("yaml", "json"), help="default: as --output ends, else yaml")
    root.add_argument("--relative-to", choices=("host", "container"), default="host", help="default: host")


def add_spec_dir(verb: argparse.ArgumentParser) -> None:
    """Where specs are looked for."""
    verb.add_argument(
        "--spec-dir",
        action="append",
        metavar="DIR",
        help="a folder of specs; may be repeated, a later one has priority; default: /etc/cdi and /var/run/cdi",
    )


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0 done, 1 failed, 2 usage."""
    words = sys.argv[1:] if argv is None else argv
    top = parser()
    try:
        if words[:1] == ["check"]:
            from cdi import check

            return check.main(words[1:])
        arguments = top.parse_args(words)
        arguments.words = words[1:]
        if arguments.verb in CHECKS:
            CHECKS[arguments.verb](top, arguments)
        return VERBS[arguments.verb](arguments)
    except NvhookError as error:
        show(error)
        return 1


def show(error: NvhookError) -> None:
    """An error's two lines."""
    print(f"nvhook: error: {printable(error.what)}\n  remedy: {printable(error.remedy)}", file=sys.stderr)


def printable(text: str) -> str:
    """A line for a terminal: files' names and contents may have line breaks, control characters, and no UTF-8."""
    return "".join(letter if letter.isprintable() or letter == "\t" else ascii(letter)[1:-1] for letter in text)


def check_generate(top: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Usage errors, which end the program with status 2. Raises NvhookError where the mode can't be told."""
    from cdi import content, modes
    from cdi.host import inventory

    check_output(top, arguments)
    hook_path = arguments.hook_path
    if hook_path is not None and not hook_path.startswith("/"):
        top.error(f"--hook-path {hook_path}: must be absolute, for a runtime does not search")
    try:
        arguments.content = content.options_of(arguments)
        # A daemon may start before there is a driver; what it starts tells then.
        if arguments.verb == "generate" or arguments.mode != "auto":
            modes.refuse(modes.resolve(arguments.mode, inventory.options_of(arguments)), arguments)
    except ValueError as error:
        top.error(str(error))


def check_output(top: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuses a name that nobody would read."""
    from cdi import spec

    output = arguments.output
    if output is not None and output.suffix not in spec.SUFFIXES:
        top.error(f"--output {output}: engines read files that end in .yaml or .json, and no others")


def check_transform(top: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Usage errors of `cdi transform root`."""
    check_output(top, arguments)
    for option, path in (("--from", arguments.old), ("--to", arguments.new)):
        if not path.startswith("/"):
            top.error(f"{option} {path}: must be absolute")


def run_generate(arguments: argparse.Namespace) -> int:
    """`cdi generate`. Raises NvhookError."""
    from cdi import ceiling, content, generate, replacement, spec

    output = arguments.output
    hook_path = "" if arguments.no_hooks else arguments.hook_path or find_hook(arguments.host_root)
    if arguments.load_kmods:
        from cdi.host import devicefiles

        done: list[str] = []
        warn(devicefiles.make(arguments.host_root, arguments.dev_root or "/", True, True, False, done.append))
        note(done)
    whole, said = of_this_host(arguments, hook_path)
    if "no-additional-gids-for-device-nodes" not in content.flags(arguments):
        whole = ceiling.add_groups(whole)
    made, dropped = ceiling.fit(whole, content.ceiling_of(arguments))
    warn(said + dropped + unhooked(made, arguments))
    try:
        # JSON is YAML, and `cdi check` reads it without the YAML library.
        text = spec.serialise(made, arguments.format or ("yaml" if output is None else "json"))
    except spec.InvalidSpec as error:
        remedy = "report this to nvhook, with the output of `nvhook inventory --json`"
        raise NvhookError(f"the spec would not be read: {error}", remedy) from error
    if output is None:
        sys.stdout.write(text)
        return 0
    warn([f"{name} in the same folder is no spec that can be read" for name in generate.refuse_conflict(output, made)])
    warn(replacement.check(output, made, arguments.content.capabilities))
    spec.write(output, text)
    return 0


def of_this_host(arguments: argparse.Namespace, hook_path: str) -> tuple[dict[str, Any], list[str]]:
    """The spec of the mode asked for, and what is to be said of it. Raises NvhookError."""
    from cdi import generate, modes
    from cdi.host import inventory

    options = inventory.options_of(arguments)
    mode = modes.resolve(arguments.mode, options)
    wanted: generate.Options = arguments.content
    if mode != "nvml":
        other = modes.make(mode, options, hook_path, modes.lists_of(arguments), wanted)
        if arguments.strict:
            generate.refuse_left_out(other.left_out)
        return other.spec, other.warnings
    found, _ = inventory.current(options)
    made = generate.make(found, hook_path, wanted)
    if arguments.strict:
        generate.refuse_left_out(generate.left_out(found, wanted))
    note(generate.notes(found, made, wanted))
    return made, found["warnings"] + generate.left_out(found, wanted)


def run_watch(arguments: argparse.Namespace) -> int:
    """`cdi watch`. Raises NvhookError."""
    from cdi import watch

    # All others are for the `cdi generate` that it starts.
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_watch(own)
    for option in ("--output", "--format"):
        own.add_argument(option)
    return watch.run(arguments, own.parse_known_args(arguments.words)[1])


def form_of(arguments: argparse.Namespace) -> spec.Format:
    """The form of what is written: as asked for, else as the file's name ends."""
    from cdi import spec

    if arguments.format is not None:
        form: spec.Format = arguments.format
        return form
    return "yaml" if arguments.output is None else spec.SUFFIXES[arguments.output.suffix]


def scan(arguments: argparse.Namespace) -> registry.Registry:
    """The registry of the folders that were asked for."""
    from cdi import reader, registry

    return registry.scan(arguments.spec_dir or registry.FOLDERS, reader.load)


def run_list(arguments: argparse.Namespace) -> int:
    """`cdi list`: a line `NAME<tab>FILE` for each device on stdout, what does not count on stderr."""
    from cdi import registry

    found = scan(arguments)
    if arguments.json:
        print(json.dumps(listed(found), indent=2))
        return 0
    for folder in filter(os.path.islink, arguments.spec_dir or registry.FOLDERS):
        warn([f"{folder} is a link: no release of the CDI library up to 1.1.0 looks into it"])
    for name, (file, _) in sorted(found.devices.items()):
        print(printable(f"{name}\t{file.path}"))
    for name, paths in sorted(found.shadowed.items()):
        if name in found.devices:
            warn([f"{name} in {path} is shadowed by {found.devices[name][0].path}" for path in paths])
    warn_of_lost(found)
    return 0


def listed(found: registry.Registry) -> dict[str, Any]:
    """The object that `cdi list --json` prints."""
    return {
        "devices": [
            {"name": name, "file": file.path, "shadows": found.shadowed.get(name, [])}
            for name, (file, _) in sorted(found.devices.items())
        ],
        "conflicts": [{"name": name, "files": paths} for name, paths in sorted(found.conflicts.items())],
        "failed": [{"path": path, "reasons": reasons} for path, reasons in found.failed.items()],
        "skipped": [{"path": path, "reason": reason} for path, reason in found.skipped.items()],
    }


def warn_of_lost(found: registry.Registry) -> None:
    """Why a device that somebody expects may not be there."""
    for name, paths in sorted(found.conflicts.items()):
        warn([f"{name} is unresolvable: defined by each of {' and '.join(paths)}"])
    for path, reasons in found.failed.items():
        warn([f"{path} is not read: {reason}" for reason in reasons])
    warn([f"{path} is skipped: {reason}" for path, reason in found.skipped.items()])


def run_validate(arguments: argparse.Namespace) -> int:
    """`cdi validate`: 0 if every file is read and valid."""
    from cdi import report

    reports = []
    status = 0
    for path in arguments.files:
        try:
            found = report.judge(path)
        except OSError as error:
            show(unreadable(path, error))
            status = 1
            continue
        reports.append(found)
        status |= not found.valid
        if not arguments.json:
            print("\n".join(map(printable, found.lines())))
    if arguments.json:
        print(json.dumps([found.to_json() for found in reports], indent=2))
    return int(status)


def unreadable(path: str, error: OSError) -> NvhookError:
    """The error of a file that could not be read."""
    from cdi import source

    remedy = f"give a regular file of at most {source.SIZE_MAX >> 20} MiB that you may read"
    return NvhookError(f"cannot read {path}: {error.strerror}", remedy)


# A configuration of 16 MiB is none that a runtime would take.
CONFIG_MAX = 16 << 20


def run_inject(arguments: argparse.Namespace) -> int:
    """`cdi inject`: the edited configuration on stdout, or nothing there and an error."""
    from cdi import inject, jsontext, registry
    from ldcache import root

    remedy = "give the container's config.json on stdin"
    try:
        oci = jsontext.loads(root.read(sys.stdin.fileno(), CONFIG_MAX, "stdin"))
    except (OSError, jsontext.InvalidJson) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise NvhookError(f"cannot read the configuration on stdin: {reason}", remedy) from error
    if not isinstance(oci, dict):
        raise NvhookError("the configuration on stdin is no JSON object", remedy)
    found = scan(arguments)
    try:
        edits = registry.resolve(found, arguments.device)
    except NvhookError:
        warn_of_lost(found)
        raise
    try:
        text = json.dumps(inject.inject(oci, edits), indent=2, allow_nan=False)
    except ValueError as error:
        # Python reads 1e999 as infinity, for which JSON has no text.
        raise NvhookError("the configuration on stdin has a number beyond all bounds", remedy) from error
    print(text)
    return 0


def run_transform(arguments: argparse.Namespace) -> int:
    """`cdi transform root`. Raises NvhookError."""
    from cdi import reader, source, spec, transform, validate, versions
    from ldcache import root

    name = "stdin" if arguments.input == "-" else arguments.input
    try:
        if arguments.input == "-":
            data = root.read(sys.stdin.fileno(), source.SIZE_MAX, name)
        else:
            data = source.read_file(name)
        checked = validate.check(reader.parse(data))
    except OSError as error:
        raise unreadable(name, error) from error
    except reader.InvalidText as error:
        raise NvhookError(f"{name} is no spec: {error}", "see `cdi validate`") from error
    problems = [str(problem) for problem in checked.problems()]
    if problems:
        raise NvhookError(f"{name} is no spec: {'; '.join(problems[:3])}", "see `cdi validate` for all of it")
    made = transform.root(checked.spec, arguments.old, arguments.new, arguments.relative_to)
    text = spec.serialise(made, form_of(arguments), versions.HEAD)
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        spec.write(arguments.output, text)
    return 0


def warn(lines: list[str]) -> None:
    """Warnings on stderr; stdout may be the spec."""
    for line in lines:
        print(f"nvhook: warning: {printable(line)}", file=sys.stderr)


def note(lines: list[str]) -> None:
    """What is as it was asked for, and good to know."""
    for line in lines:
        print(f"nvhook: note: {printable(line)}", file=sys.stderr)


def find_hook(host_root: str = "/") -> str:
    """The launcher, as it is or will be installed: the one beside this very copy of nvhook, else a packaged or a local
    one. Where it is looked for is below the host root, since the host's runtime starts it."""
    from cdi import finish

    library = Path(__file__).resolve().parents[1]
    folders = [Path("/usr/bin"), Path("/usr/local/bin")]
    if library.parts[-2:] == ("lib", "nvhook") and (library / "bin/launch").is_file():
        # Only there is this an installed copy; above a checkout, `bin` may be anybody's.
        folders.insert(0, library.parents[1] / "bin")
    paths = [str(folder / finish.HOOK_NAME) for folder in folders]
    return next((path for path in paths if is_installed(host_root, path)), f"/usr/bin/{finish.HOOK_NAME}")


def is_installed(host_root: str, path: str) -> bool:
    """Whether the host has this file. Raises NvhookError where there is no such root."""
    from cdi.host import platform
    from ldcache import root

    root_fd = root.open_host(host_root)
    try:
        return platform.is_file(root_fd, path)
    finally:
        os.close(root_fd)


def unhooked(made: dict[str, Any], arguments: argparse.Namespace) -> list[str]:
    """That a spec's hook is not there, unless somebody has said where it will be."""
    hooks = made.get("containerEdits", {}).get("hooks", [])
    if arguments.hook_path or not hooks or is_installed(arguments.host_root, hooks[0]["path"]):
        return []
    path = hooks[0]["path"]
    return [f"{path} is not there yet: no container starts with this spec before `nvhook install` or --hook-path"]


CHECKS = {"generate": check_generate, "watch": check_generate, "transform": check_transform}
VERBS = {
    "generate": run_generate,
    "watch": run_watch,
    "list": run_list,
    "validate": run_validate,
    "inject": run_inject,
    "transform": run_transform,
}

# SPDX-License-Identifier: Apache-2.0
"""`nvhook configure`: registers nvhook with a container engine, takes it out again, or tells whether it is in."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from hook.engines import containerd, crio, docker, files, k3s, lowlevel, managed, podman, status
from hook.engines.files import Change, Host
from hook.engines.registration import HOOK, RUNTIME, Plan, Registration
from hook.engines.settings import Edit
from hook.start import one_line
from ldcache.errors import NvhookError

ENGINES: dict[str, Callable[[Host, Registration], Plan]] = {
    "docker": docker.plan,
    "containerd": containerd.plan,
    "crio": crio.plan,
    "podman": podman.plan,
    "k3s": k3s.plan_of("k3s"),
    "rke2": k3s.plan_of("rke2"),
}

# Those that read hook files.
HOOKED = ("podman", "crio")

# docker's and containerd's own rule is about as wide; a name is a file's too.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*", re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nvhook configure`."""
    add = parser.add_argument
    add("engine", nargs="?", choices=tuple(ENGINES), metavar="ENGINE", help=" or ".join(ENGINES))
    add("--name", default="nvidia", type=runtime_name, help="the runtime's name for the engine; default: nvidia")
    add("--set-default", action="store_true", help="make it the runtime of containers that ask for none")
    add("--cdi", action="store_true", help="switch the engine's own reading of CDI files on")
    add("--hook", action="store_true", help="podman and crio: run the prestart hook for every container besides")
    add("--remove", action="store_true", help="take the runtime out again")
    add("--status", action="store_true", help="tell which engines have nvhook; 3 if one has not read it yet")
    add("--json", action="store_true", help="with --status: as a list of JSON objects")
    add("--dry-run", action="store_true", help="print a diff, and change nothing")
    add("--force", action="store_true", help="replace, or remove, another runtime of that name; ignore the operator")
    add("--config", type=absolute, metavar="FILE", help="the engine's file, where it is not the usual one")
    add("--runtime-path", type=absolute, metavar="FILE", help=f"default: the installed {RUNTIME}")
    add("--root", default="/", metavar="DIR", help="the folder that stands for the host's /")


def runtime_name(text: str) -> str:
    """An argument that names a runtime."""
    if not NAME.fullmatch(text) or text in ("runc", "crun"):
        raise argparse.ArgumentTypeError(f"{text!r}: letters, digits, _ and -, and not runc or crun")
    return text


def absolute(text: str) -> str:
    """An argument that is a path on the host."""
    if not text.startswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is not absolute")
    return text


def run(arguments: argparse.Namespace) -> int:
    """`nvhook configure`. Raises NvhookError."""
    wrong = wrong_use(arguments)
    if wrong is not None:
        print(f"nvhook configure: {wrong}", file=sys.stderr)
        return 2
    with Host(arguments.root) as host:
        if arguments.status:
            return tell(host, arguments)
        wanted = registration(host, arguments)
        if arguments.remove:
            return remove(host, arguments, wanted)
        return configure(host, arguments, wanted)


def wrong_use(arguments: argparse.Namespace) -> str | None:
    """What is wrong with options that don't go together."""
    if arguments.engine is None and not arguments.status:
        return "name an engine, or give --status"
    if arguments.json and not arguments.status:
        return "--json goes with --status"
    if arguments.hook and arguments.engine not in HOOKED:
        return f"--hook goes with {' and '.join(HOOKED)}: no other engine has hook files"
    return None


def registration(host: Host, arguments: argparse.Namespace) -> Registration:
    """What the arguments ask for."""
    return Registration(
        name=arguments.name,
        runtime=arguments.runtime_path or installed(host, RUNTIME, arguments.remove),
        set_default=arguments.set_default,
        cdi=arguments.cdi,
        hook=installed(host, HOOK, arguments.remove) if arguments.hook else None,
        config=arguments.config,
        removing=arguments.remove,
    )


def installed(host: Host, name: str, missing_ok: bool) -> str:
    """A launcher's absolute path: beside the command that runs, else a packaged or a local one.

    Raises NvhookError where there is none: an engine would start no container by it.
    """
    folders = ["/usr/bin", "/usr/local/bin"]
    if host.is_real():
        library = Path(__file__).resolve().parents[2]
        if library.parts[-2:] == ("lib", "nvhook") and (library / "bin/launch").is_file():
            folders.insert(0, str(library.parents[1] / "bin"))
        folders.insert(0, str(Path(sys.argv[0]).resolve().parent))
    for folder in folders:
        # By name alone: an image's link may lead to where nothing is yet.
        if os.path.lexists(f"{host.folder.rstrip('/')}{folder}/{name}"):
            return f"{folder}/{name}"
    if missing_ok:
        return f"/usr/bin/{name}"
    what = f"{name} is not installed: it is neither in {' nor in '.join(folders)}"
    raise NvhookError(what, "run `nvhook install` or install the package, or give --runtime-path")


def configure(host: Host, arguments: argparse.Namespace, wanted: Registration) -> int:
    """Put the runtime in. Raises NvhookError; nothing is written then."""
    engine = arguments.engine
    if not arguments.force:
        managed.refuse_operator(host)
    if host.is_real():
        managed.refuse_rootless(host, engine, arguments.config)
    if engine == "docker":
        managed.refuse_docker(host, arguments.config)
    plan = ENGINES[engine](host, wanted)
    changes = [(edit, files.added(host, edit)) for edit in plan.edits]
    refuse_conflicts(host, arguments, plan, changes)
    changed = [(edit, change) for edit, change in changes if change.new != change.old]
    if arguments.dry_run:
        show(engine, [change for _, change in changed])
        warn(plan.notes)
        return 0
    for edit, change in changed:
        files.put_in(host, edit, change, wanted.name)
        print(f"{engine}: {'changed' if change.old is not None else 'made'} {edit.path}")
    for edit, change in changes:
        if change.new == change.old:
            files.join(host, edit, wanted.name)
    warn(plan.notes)
    if os.geteuid() == 0 and host.is_real():
        keep_lowlevel(host, wanted, plan)
    report(engine, plan, [change for _, change in changed])
    return 0


def refuse_conflicts(host: Host, arguments: argparse.Namespace, plan: Plan, changes: list[tuple[Edit, Change]]) -> None:
    """Show what would be replaced, and raise NvhookError, unless that is wanted."""
    if plan.foreign:
        raise NvhookError(plan.foreign[0], f"take it out there, or give the runtime another name than {arguments.name}")
    found = plan.shadowed + [line for edit, change in changes for line in edit.conflicts(change.old or "")]
    if found and not arguments.force:
        show(arguments.engine, [change for _, change in changes])
        raise NvhookError(found[0], "give --force to replace it as shown, or --name for another name")


def show(engine: str, changes: list[Change]) -> None:
    """A diff for people, in what letters stdout has."""
    text = "".join(change.diff() for change in changes) or f"{engine}: unchanged\n"
    encoding = sys.stdout.encoding
    print(text.encode(encoding, "backslashreplace").decode(encoding), end="")


def keep_lowlevel(host: Host, wanted: Registration, plan: Plan) -> None:
    """Say which runtime the launcher passes on to, from now until the next boot."""
    path = plan.lowlevel or lowlevel.find()
    if path is None:
        warn(["neither runc nor crun is installed: no container starts before one is"])
        return
    try:
        lowlevel.write(host, os.path.basename(wanted.runtime), path)
    except OSError as error:
        warn([f"cannot write /run/nvhook/runtime.{os.path.basename(wanted.runtime)}: {error.strerror}"])


def report(engine: str, plan: Plan, changed: list[Change]) -> None:
    """What to do now: nothing where nothing changed."""
    if not changed:
        print(f"{engine}: unchanged")
        return
    lines = [line for change in changed for line in change.diff().splitlines() if line[:1] in ("+", "-")]
    command = plan.restart if not plan.reload or any("cdi" in line for line in lines) else plan.reload
    if command:
        print(f"{engine}: to put it in force: {command}")


def remove(host: Host, arguments: argparse.Namespace, wanted: Registration) -> int:
    """Take the runtime out. Raises NvhookError; nothing is written then."""
    if host.is_real():
        managed.refuse_rootless(host, arguments.engine, arguments.config)
    plan = ENGINES[arguments.engine](host, wanted)
    left = {} if arguments.force else {edit.path: files.foreign(host, edit, wanted.name) for edit in plan.edits}
    for line in [*plan.shadowed, *plan.foreign, *(line for lines in left.values() for line in lines)]:
        print(one_line(f"{arguments.engine}: {line}: left alone"))
    # The other way round: what refers to a file goes before it.
    changes = [
        (edit, files.kept(host, edit) if left.get(edit.path) else files.removed(host, edit, wanted.name))
        for edit in reversed(plan.edits)
    ]
    changed = [(edit, change) for edit, change in changes if change.new != change.old]
    if arguments.dry_run:
        show(arguments.engine, [change for _, change in changed])
        return 0
    for edit, change in changes:
        files.take_out(host, edit, change, wanted.name)
    for edit, change in changed:
        print(f"{arguments.engine}: {'removed' if change.new is None else 'changed'} {edit.path}")
    report(arguments.engine, plan, [change for _, change in changed])
    return 0


def tell(host: Host, arguments: argparse.Namespace) -> int:
    """`--status`: a line for each engine; 3 if nvhook is in the files of one that is not in force."""
    found = [row for row in status.rows(host) if arguments.engine in (None, row.engine)]
    if arguments.json:
        print(json.dumps(status.as_json(found), indent=2))
    else:
        print("\n".join(one_line(row.line()) for row in found) or "no engine runs here or has a file")
    return 3 if any(row.problem for row in found) else 0


def warn(lines: list[str]) -> None:
    """Warnings on stderr."""
    for line in lines:
        print(f"nvhook: warning: {one_line(line)}", file=sys.stderr)

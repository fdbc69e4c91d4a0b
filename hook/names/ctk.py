# SPDX-License-Identifier: Apache-2.0
"""`nvidia-ctk` (NVIDIA's Container Toolkit 1.14 to 1.20): each command becomes one of nvhook's.

Variables stand in for options that are not given, as there; of options with several names all are known.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cdi import VERSION, content
from hook.names import ctkconfig
from ldcache.errors import NvhookError
from ldcache.output import until_closed

FORMATS = {".json": "json", ".yaml": "yaml", ".yml": "yaml"}


class Parser(argparse.ArgumentParser):
    """Abbreviations are off: NVIDIA's parser knows none, and a script's misspelt option must not become another."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})  # type: ignore[arg-type]


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = Parser(prog="nvidia-ctk", description="NVIDIA's Container Toolkit's command, answered by nvhook.")
    top.add_argument("--version", "-v", action="version", version=f"nvhook {VERSION}")
    for names in (("--debug", "-d"), ("--quiet",)):
        top.add_argument(*names, action="store_true", help="accepted; what is said does not depend on it")
    top.add_argument("--config", dest="top_config", metavar="FILE", help="the configuration is found without it")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    add_cdi(commands.add_parser("cdi", help="CDI files"))
    add_runtime(commands.add_parser("runtime", help="register with container engines"))
    ctkconfig.add_arguments(commands.add_parser("config", help="NVIDIA's configuration file, printed or changed"))
    add_system(commands.add_parser("system", help="device nodes"))
    commands.add_parser("info", help="nothing")
    return top


def commands_of(group: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """A group's commands."""
    return group.add_subparsers(dest="what", required=True, metavar="COMMAND", parser_class=Parser)


def option(verb: argparse.ArgumentParser, *names: str, many: bool = False, env: str = "", help: str) -> None:
    """An option with a value; of one that may be repeated, each value may be several between commas."""
    default = os.environ.get(env) if env else None
    text = f"{help}; default: ${env}" if env else help
    key = key_of(names[0])
    if many:
        verb.add_argument(*names, dest=key, action="append", default=None, metavar="VALUE", help=text)
        verb.set_defaults(**{f"env_{key}": default})
    else:
        verb.add_argument(*names, dest=key, default=default, metavar="VALUE", help=text)


def key_of(name: str) -> str:
    """An option's attribute."""
    return name.lstrip("-").replace("-", "_").replace(".", "_")


def values(arguments: argparse.Namespace, name: str) -> list[str]:
    """The values of a repeatable option, from the command line, else from its variable."""
    given = getattr(arguments, key_of(name))
    from_env = getattr(arguments, f"env_{key_of(name)}")
    texts = given if given is not None else [from_env] if from_env else []
    return [item.strip() for text in texts for item in text.split(",") if item.strip()]


def add_cdi(group: argparse.ArgumentParser) -> None:
    """`cdi generate`, `list` and `transform root`."""
    verbs = commands_of(group)
    make = verbs.add_parser("generate", help="write a CDI file for this host")
    prefix = "NVIDIA_CTK_CDI_GENERATE"
    option(make, "--output", env="NVIDIA_CTK_CDI_OUTPUT_FILE_PATH", help="the file; none is stdout")
    option(make, "--format", env=f"{prefix}_OUTPUT_FORMAT", help="yaml or json")
    option(make, "--mode", "--discovery-mode", env=f"{prefix}_MODE", help="as of `cdi generate`")
    option(make, "--driver-root", env="NVIDIA_CTK_DRIVER_ROOT", help="where the driver's files lie")
    option(make, "--dev-root", env="NVIDIA_CTK_DEV_ROOT", help="where the device nodes lie")
    option(make, "--vendor", "--cdi-vendor", env=f"{prefix}_VENDOR", help="of the devices' names")
    option(make, "--class", "--cdi-class", env=f"{prefix}_CLASS", help="of the devices' names")
    option(make, "--nvidia-cdi-hook-path", "--nvidia-ctk-path", env="NVIDIA_CTK_CDI_HOOK_PATH", help="has no effect")
    option(make, "--ldconfig-path", env=f"{prefix}_LDCONFIG_PATH", help="has no effect: no ldconfig is run")
    for names, env, help in (
        (("--device-name-strategy",), "DEVICE_NAME_STRATEGIES", "index, uuid or type-index"),
        (("--device-id", "--device-ids", "--device", "--devices"), "DEVICE_IDS", "only these"),
        (("--library-search-path",), "LIBRARY_SEARCH_PATHS", "a folder of the driver's libraries"),
        (("--config-search-path",), "CONFIG_SEARCH_PATHS", "not supported"),
        (("--disable-hook", "--disable-hooks"), "DISABLED_HOOKS", "a part that the hook leaves out"),
        (("--enable-hook", "--enable-hooks"), "ENABLED_HOOKS", "a part that the hook does"),
        (("--feature-flag", "--feature-flags"), "FEATURE_FLAGS", "as of `cdi generate`"),
        (("--csv.file",), "CSV_FILES", "a list of Tegra's instead of the usual ones"),
        (("--csv.ignore-pattern",), "CSV_IGNORE_PATTERNS", "links to leave out"),
    ):
        option(make, *names, many=True, env=f"{prefix}_{env}", help=help)
    option(make, "--csv.compat-container-root", env=f"{prefix}_CSV_CONTAINER_COMPAT_ROOT", help="of images for Tegra")
    make.add_argument("--no-all-device", action="store_true", help="no device `all`")
    option(make, "--host-root", help="nvhook's own: the folder that stands for the host's /")
    show = verbs.add_parser("list", help="the names of the CDI devices, one a line")
    option(show, "--spec-dir", many=True, env="NVIDIA_CTK_CDI_SPEC_DIRS", help="a folder of specs; repeatable")
    move = commands_of(verbs.add_parser("transform", help="change a CDI file")).add_parser(
        "root", help="move the paths below one folder to another"
    )
    move.set_defaults(what="transform")
    for name in ("--from", "--to", "--input", "--output", "--relative-to"):
        option(move, name, help="as of `cdi transform root`")


def add_runtime(group: argparse.ArgumentParser) -> None:
    """`runtime configure`."""
    verb = commands_of(group).add_parser("configure", help="register the runtime with an engine")
    verb.add_argument("--runtime", default="docker", choices=("docker", "containerd", "crio"), help="the engine")
    option(verb, "--config", help="the engine's file")
    option(verb, "--nvidia-runtime-name", help="default: nvidia")
    option(verb, "--nvidia-runtime-path", "--runtime-path", help="default: the installed nvhook-runtime")
    option(verb, "--config-mode", help="config-file; others are not supported")
    for name in ("--drop-in-config", "--executable-path", "--config-source", "--nvidia-runtime-hook-path"):
        option(verb, name, help="has no effect")
    option(verb, "--oci-hook-path", help="not supported")
    verb.add_argument("--nvidia-set-as-default", "--set-as-default", action="store_true", help="the default runtime")
    verb.add_argument("--cdi.enabled", "--cdi.enable", "--enable-cdi", dest="cdi", action="store_true", help="CDI too")
    verb.add_argument("--dry-run", action="store_true", help="print a diff")


def add_system(group: argparse.ArgumentParser) -> None:
    """`system create-device-nodes` and `create-dev-char-symlinks`."""
    verbs = commands_of(group)
    nodes = verbs.add_parser("create-device-nodes", help="make the driver's device nodes")
    nodes.add_argument("--control-devices", action="store_true", help="those of GPUs are made too")
    links = verbs.add_parser("create-dev-char-symlinks", help="make the links in /dev/char")
    option(links, "--dev-char-path", help="/dev/char")
    links.add_argument("--create-all", action="store_true", help="first make all nodes that there can be")
    links.add_argument("--create-device-nodes", action="store_true", help="first make the nodes")
    for verb in (nodes, links):
        option(verb, "--driver-root", "--root", help="where modprobe would look; the host's own is asked")
        option(verb, "--dev-root", help="where the device nodes lie")
        option(verb, "--host-root", help="nvhook's own: the folder that stands for the host's /")
        verb.add_argument("--load-kernel-modules", action="store_true", help="first load the modules that are missing")
        verb.add_argument("--dry-run", action="store_true", help="say what would be done")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status, as nvhook's: 0 done, 1 failed, 2 usage, 3 stale or unhealthy."""
    words = list(sys.argv[1:] if argv is None else argv)
    return until_closed(lambda: answer(words))


def answer(words: list[str]) -> int:
    """The exit status of a command and its options."""
    if words and words[0] == "hook":
        # The hooks of old CDI files; their command line is nvidia-cdi-hook's.
        from hook import start

        return start.dispatch(["nvidia-cdi-hook", *words[1:]])
    arguments = parser().parse_args(words)
    try:
        if arguments.command == "info":
            return 0
        if arguments.command == "config":
            return ctkconfig.run(arguments)
        status = 0
        for command in translated(arguments):
            status = status or run(command)
        return status
    except NvhookError as error:
        print(f"nvidia-ctk: error: {error.what}\n  remedy: {error.remedy}", file=sys.stderr)
        return 1


def run(command: list[str]) -> int:
    """One of nvhook's commands. `cdi list` prints names alone here, and their number, as NVIDIA's does."""
    from hook import cli

    if command[:2] != ["cdi", "list"]:
        return cli.main(command)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = cli.main(command)
    names = [line.partition("\t")[0] for line in printed.getvalue().splitlines()]
    print(f"Found {len(names)} CDI devices", file=sys.stderr)
    for name in names:
        print(name)
    return status


def translated(arguments: argparse.Namespace) -> list[list[str]]:
    """The words of nvhook's commands that do the same. Raises NvhookError where none does."""
    makers = {
        "generate": generate,
        "list": lambda given: [["cdi", "list", *repeated("--spec-dir", values(given, "--spec-dir"))]],
        "transform": lambda given: [["cdi", "transform", "root", *single(given, TRANSFORM)]],
        "configure": configure,
        "create-device-nodes": create_nodes,
        "create-dev-char-symlinks": create_links,
    }
    return makers[arguments.what](arguments)


TRANSFORM = {name: name for name in ("--from", "--to", "--input", "--output", "--relative-to")}
GENERATE = {
    name: name
    for name in (
        *("--mode", "--driver-root", "--dev-root", "--vendor", "--class", "--host-root"),
        "--csv.compat-container-root",
    )
}
# Feature flags without which the file would be another, and what to do instead.
LOST_FLAGS = {
    "enable-explicit-driver-libraries": "drop it; install the image's own libglvnd",
    "enable-coherent-annotations": "drop it; write a file for some GPUs by --device-id and --class",
}
NODES = {name: name for name in ("--dev-root", "--host-root")}
CONFIGURE = {"--config": "--config", "--nvidia-runtime-name": "--name", "--nvidia-runtime-path": "--runtime-path"}


def single(arguments: argparse.Namespace, names: dict[str, str]) -> list[str]:
    """Options with one value that are given, by nvhook's names."""
    given = {ours: getattr(arguments, key_of(theirs)) for theirs, ours in names.items()}
    return [f"{name}={value}" for name, value in given.items() if value]


def repeated(name: str, items: list[str]) -> list[str]:
    """An option for each value."""
    return [f"{name}={item}" for item in items]


def no_effect(arguments: argparse.Namespace, reasons: dict[str, str]) -> None:
    """Warn of options that change nothing here."""
    for name, reason in reasons.items():
        if getattr(arguments, key_of(name)):
            print(f"nvidia-ctk: warning: {name} has no effect: {reason}", file=sys.stderr)


def unsupported(name: str, remedy: str) -> NvhookError:
    """An option without which the result would be another."""
    return NvhookError(f"{name} is not supported", remedy)


def generate(arguments: argparse.Namespace) -> list[list[str]]:
    """`cdi generate`."""
    if values(arguments, "--config-search-path"):
        raise unsupported("--config-search-path", "drop it; nvhook looks where the driver's files are installed")
    asked = values(arguments, "--feature-flag")
    for flag in asked:
        if flag in LOST_FLAGS:
            raise unsupported(f"--feature-flag {flag}", LOST_FLAGS[flag])
        if flag not in content.FLAGS:
            print(f"nvidia-ctk: warning: --feature-flag {flag} has no effect: nobody knows it", file=sys.stderr)
    no_effect(
        arguments,
        {
            "--nvidia-cdi-hook-path": "the file names the installed nvhook-create-container",
            "--ldconfig-path": "no ldconfig is run",
        },
    )
    words = ["cdi", "generate", *single(arguments, GENERATE)]
    for name in ("--device-name-strategy", "--device-id", "--library-search-path", "--disable-hook", "--enable-hook"):
        words += repeated(name, values(arguments, name))
    for name in ("--csv.file", "--csv.ignore-pattern"):
        words += repeated(name, values(arguments, name))
    words += repeated("--feature-flag", [flag for flag in asked if flag in content.FLAGS])
    if arguments.no_all_device or os.environ.get("NVIDIA_CTK_CDI_GENERATE_NO_ALL_DEVICE") in ("1", "true"):
        words.append("--no-all-device")
    return [words + output(arguments.output, arguments.format)]


def output(path: str | None, form: str | None) -> list[str]:
    """Where and in which form: the name's end decides where no form is given, and one without an end gets it."""
    if not path:
        return [f"--format={form.lower()}"] if form else []
    chosen = form.lower() if form else FORMATS.get(Path(path).suffix, "yaml")
    if Path(path).suffix not in (".json", ".yaml"):
        path = f"{path}.{chosen}"
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    except OSError as error:
        raise NvhookError(f"cannot make {os.path.dirname(path)}: {error.strerror}", "run this as root") from error
    return [f"--output={path}", f"--format={chosen}"]


def configure(arguments: argparse.Namespace) -> list[list[str]]:
    """`runtime configure`."""
    if arguments.config_mode not in (None, "config-file") or arguments.oci_hook_path:
        raise unsupported("--config-mode other than config-file", "use `nvhook configure podman` for a hook's file")
    no_effect(
        arguments,
        {
            "--drop-in-config": "nvhook chooses the drop-in's place by the engine's own configuration",
            "--executable-path": "the engine's program is not run",
            "--config-source": "the engine's files are read",
            "--nvidia-runtime-hook-path": "the runtime needs no hook's path",
        },
    )
    switches = {
        "--set-default": arguments.nvidia_set_as_default,
        "--cdi": arguments.cdi,
        "--dry-run": arguments.dry_run,
    }
    words = ["configure", arguments.runtime, *single(arguments, CONFIGURE)]
    return [words + [name for name, wanted in switches.items() if wanted]]


def create_nodes(arguments: argparse.Namespace) -> list[list[str]]:
    """`system create-device-nodes`, or the first half of what makes links."""
    if arguments.driver_root not in (None, "", "/"):
        # NVIDIA's runs modprobe in a chroot there, whose modules may be those of a driver container.
        if arguments.load_kernel_modules:
            raise unsupported(
                "--load-kernel-modules with a driver root", "load the driver's modules where it came from"
            )
    words = ["nodes", "create", *node_options(arguments)]
    return [words + ["--load-kmods"] * arguments.load_kernel_modules]


def create_links(arguments: argparse.Namespace) -> list[list[str]]:
    """`system create-dev-char-symlinks`. Links lead to nodes, so all links means all nodes first."""
    if arguments.dev_char_path not in (None, "", "/dev/char"):
        raise unsupported(f"--dev-char-path {arguments.dev_char_path}", "use --dev-root for nodes below another folder")
    first = arguments.create_all or arguments.create_device_nodes or arguments.load_kernel_modules
    return [*(create_nodes(arguments) if first else []), ["nodes", "link", *node_options(arguments)]]


def node_options(arguments: argparse.Namespace) -> list[str]:
    """What both verbs of `nvhook nodes` take."""
    return [*single(arguments, NODES), *["--dry-run"] * arguments.dry_run]

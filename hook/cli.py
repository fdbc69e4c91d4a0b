# SPDX-License-Identifier: Apache-2.0
"""The command `nvhook`: cold verbs for people and timers; the hot ones are passed on.

Each verb imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ldcache import VERSION
from ldcache.errors import NvhookError
from ldcache.output import until_closed


def parser() -> argparse.ArgumentParser:
    """All verbs and their options."""
    top = argparse.ArgumentParser(prog="nvhook", description="Puts an NVIDIA GPU into an OCI container.")
    top.add_argument("--version", action="version", version=f"%(prog)s {VERSION}", help="print the version")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, text in PASSED_ON.items():
        verbs.add_parser(name, help=text, add_help=False)
    inventory = verbs.add_parser("inventory", help="what this host has")
    add_inventory_options(inventory)
    plan = verbs.add_parser("plan", help="print as JSON what would be done for a bundle, and do nothing")
    plan.add_argument("--bundle", required=True, metavar="DIR", help="the folder that holds config.json")
    plan.add_argument("--host-root", default="/", metavar="DIR", help="the folder that stands for the host's /")
    plan.add_argument("--applier", choices=APPLIERS, default="prestart", help="who would do it")
    config = verbs.add_parser("config", help="print or change the configuration file")
    add_config_options(config)
    configure = verbs.add_parser("configure", help="register with docker, containerd, CRI-O or podman")
    add_configure_options(configure)
    add_nodes_options(verbs.add_parser("nodes", help="make the driver's device nodes and their links in /dev/char"))
    add_metrics_options(verbs.add_parser("metrics", help="count starts, failures and times for a node exporter"))
    verify = verbs.add_parser("verify", help="run CUDA kernels and check every element")
    add_verify_options(verify)
    install = verbs.add_parser("install", help="install the hooks for container engines")
    install.add_argument("--prefix", type=Path, default=Path("/usr/local"), help="default: /usr/local")
    install.add_argument("--nvidia-names", action="store_true", help="the hooks by NVIDIA's names too")
    return top


APPLIERS = ("prestart", "shim", "cdi-hook", "cdi")

PASSED_ON = {
    "cdi": "CDI files: generate, watch, check, list, validate, inject, transform",
    "ldcache": "loader caches: print, build, check, merge",
    "prestart": "the OCI prestart hook; the container's state on stdin",
    "create-container": "the one hook that our CDI files name",
    "poststart": "does nothing",
    "poststop": "does nothing",
}


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0 done, 1 failed, 2 usage, 3 stale or unhealthy."""
    words = sys.argv[1:] if argv is None else argv
    return until_closed(lambda: run(words))


def run(words: list[str]) -> int:
    """The exit status of a verb and its options."""
    try:
        if words and words[0] in PASSED_ON:
            return pass_on(words[0], words[1:])
        arguments = parser().parse_args(words)
        return VERBS[arguments.verb](arguments)
    except NvhookError as error:
        from hook.start import one_line

        print(f"nvhook: error: {one_line(error.what)}\n  remedy: {one_line(error.remedy)}", file=sys.stderr)
        return 1


def pass_on(verb: str, words: list[str]) -> int:
    """Verbs that have a command line of their own."""
    if verb == "cdi":
        import cdi.cli

        return cdi.cli.main(words)
    if verb == "ldcache":
        import ldcache.cli

        return ldcache.cli.main(words)
    from hook import start

    return start.dispatch([verb, *words])


def add_inventory_options(verb: argparse.ArgumentParser) -> None:
    """Options of `nvhook inventory`."""
    from cdi.host import inventory

    inventory.add_arguments(verb)


def add_config_options(verb: argparse.ArgumentParser) -> None:
    """Options of `nvhook config`."""
    from cdi.host import configfile

    configfile.add_arguments(verb)


def add_configure_options(verb: argparse.ArgumentParser) -> None:
    """Options of `nvhook configure`."""
    from hook.engines import cli

    cli.add_arguments(verb)


def add_nodes_options(verb: argparse.ArgumentParser) -> None:
    """Options of `nvhook nodes`."""
    from cdi.host import devicefiles

    devicefiles.add_arguments(verb)


def add_metrics_options(verb: argparse.ArgumentParser) -> None:
    """Options of `nvhook metrics`."""
    from hook import metrics

    metrics.add_arguments(verb)


def add_verify_options(verb: argparse.ArgumentParser) -> None:
    """Options of `nvhook verify`."""
    from hook import verify

    verify.add_arguments(verb)


def run_plan(arguments: argparse.Namespace) -> int:
    """`nvhook plan`: the Plan of a bundle as JSON on stdout."""
    place, host_root = arguments.bundle, arguments.host_root
    if arguments.applier.startswith("cdi"):
        from hook import cdiplanner

        made = cdiplanner.plan(place, host_root, arguments.applier == "cdi")
    else:
        from hook import planner

        made = (planner.plan_runtime if arguments.applier == "shim" else planner.plan)(place, host_root)
    print(json.dumps(made, indent=2))
    return 0


def run_inventory(arguments: argparse.Namespace) -> int:
    """`nvhook inventory`."""
    from cdi.host import inventory

    return inventory.run(arguments)


def run_config(arguments: argparse.Namespace) -> int:
    """`nvhook config`."""
    from cdi.host import configfile

    return configfile.run(arguments)


def run_configure(arguments: argparse.Namespace) -> int:
    """`nvhook configure`."""
    from hook.engines import cli

    return cli.run(arguments)


def run_nodes(arguments: argparse.Namespace) -> int:
    """`nvhook nodes`."""
    from cdi.host import devicefiles

    return devicefiles.run(arguments)


def run_metrics(arguments: argparse.Namespace) -> int:
    """`nvhook metrics`."""
    from hook import metrics

    return metrics.run(arguments)


def run_verify(arguments: argparse.Namespace) -> int:
    """`nvhook verify`."""
    from hook import verify

    return verify.run(arguments)


def run_install(arguments: argparse.Namespace) -> int:
    """`nvhook install`."""
    from hook import install

    for launcher in install.install(arguments.prefix, arguments.nvidia_names):
        print(launcher)
    return 0


VERBS = {
    "config": run_config,
    "configure": run_configure,
    "inventory": run_inventory,
    "metrics": run_metrics,
    "nodes": run_nodes,
    "plan": run_plan,
    "verify": run_verify,
    "install": run_install,
}

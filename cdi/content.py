# SPDX-License-Identifier: Apache-2.0
"""The options of `cdi generate` that say what a spec is to have."""

from __future__ import annotations

import argparse

from cdi import ceiling, finish, generate, hookless, names, versions
from cdi.host import settings

# nvidia-ctk's feature flags that mean something here; sandboxutils is not asked in any case.
FLAGS = (
    "disable-ipc-discoverer",
    "disable-multiple-csv-devices",
    "disable-nvsandboxutils",
    "disable-nvsandbox-utils",
    "no-additional-gids-for-device-nodes",
)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """The options."""

    def several(name: str, metavar: str, text: str, *others: str) -> None:
        verb.add_argument(name, *others, action="append", default=[], metavar=metavar, help=f"{text}; may be repeated")

    verb.add_argument("--no-hooks", action="store_true", help="mount each library by each of its names instead")
    verb.add_argument(
        "--layout",
        choices=tuple(hookless.LAYOUTS),
        help="with --no-hooks, where images' loaders look: debian (multiarch), lib64 (Fedora's and others'), musl, or "
        "both of the first two; default: both",
    )
    several("--disable-hook", "PART", "leave out a part of the hook's work, or `all`", "--disable-hooks")
    several("--enable-hook", "PART", "do this part whatever is disabled", "--enable-hooks")
    several("--capabilities", "NAMES", "of NVIDIA_DRIVER_CAPABILITIES, or `all`; default: all but compat32")
    several("--device-name-strategy", "HOW", f"{', '.join(generate.STRATEGIES)}; default: index and uuid")
    several("--device-id", "ID", "as in NVIDIA_VISIBLE_DEVICES; default: all", "--device-ids", "--device")
    several("--feature-flag", "NAME", f"of nvidia-ctk's: {', '.join(FLAGS)}", "--feature-flags")
    verb.add_argument("--no-all-device", action="store_true", help="no device `all`")
    verb.add_argument("--vendor", "--cdi-vendor", default="nvidia.com", help="default: nvidia.com")
    verb.add_argument("--class", "--cdi-class", default="gpu", dest="device_class", help="default: gpu")
    verb.add_argument(
        "--spec-version-max",
        choices=versions.KNOWN[2:],
        metavar="VERSION",
        help="the newest version of the CDI specification that may be used; from 0.6.0 on, devices carry their NUMA "
        "node, from 0.7.0 on containers are given the groups of nodes that not everybody may open; default: "
        f"{ceiling.DEFAULT}, which podman 4 reads",
    )


def ceiling_of(arguments: argparse.Namespace) -> str:
    """The newest version that may be used."""
    return arguments.spec_version_max or ceiling.DEFAULT


def flags(arguments: argparse.Namespace) -> set[str]:
    """The feature flags that the arguments name."""
    return {item for value in arguments.feature_flag for part in value.split(",") if (item := part.strip())}


def options_of(arguments: argparse.Namespace) -> generate.Options:
    """The content that the arguments of `cdi generate` ask for. Raises ValueError."""

    def items(values: list[str]) -> list[str]:
        return [item for value in values for part in value.split(",") if (item := part.strip())]

    def known(option: str, values: list[str], valid: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if value not in valid:
                raise ValueError(f"{option} {value}: use some of {', '.join(valid)}")
        return tuple(dict.fromkeys(values))

    if arguments.layout is not None and not arguments.no_hooks:
        raise ValueError("--layout: only of use with --no-hooks")
    if arguments.no_hooks and (arguments.disable_hook or arguments.enable_hook):
        raise ValueError("--no-hooks: leaves no hook whose parts could be chosen")
    kind = f"{arguments.vendor}/{arguments.device_class}"
    names.parse_kind(kind)
    if min(len(part) for part in kind.split("/", 1)) < 2:
        raise ValueError(f"{kind}: a vendor or class of one character crashes engines")
    granted = known("--capabilities", items(arguments.capabilities), (*settings.CAPABILITIES, "all"))
    if "all" in granted:
        granted = settings.CAPABILITIES
    known("--feature-flag", sorted(flags(arguments)), FLAGS)
    strategies = known("--device-name-strategy", items(arguments.device_name_strategy), generate.STRATEGIES)
    return generate.Options(
        layout=(arguments.layout or "both") if arguments.no_hooks else None,
        parts=finish.chosen_parts(items(arguments.disable_hook), items(arguments.enable_hook)),
        capabilities=granted or generate.DEFAULTS.capabilities,
        strategies=strategies or generate.DEFAULTS.strategies,
        device_ids=tuple(items(arguments.device_id)) or None,
        all_device=not arguments.no_all_device,
        kind=kind,
        sockets="disable-ipc-discoverer" not in flags(arguments),
        # Under a ceiling that somebody chose, what has to go is said; by default nobody misses it.
        numa=arguments.spec_version_max is not None,
    )

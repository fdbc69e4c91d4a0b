# SPDX-License-Identifier: Apache-2.0
"""containerd's CRI: `/etc/containerd/config.toml` and the files that it imports.

How imports are merged decides where the runtime goes (`mergeConfig` in containerd's config.go). Up to 1.7 a file
that has a plugin's section replaces that section whole, so the runtime goes into the last file that has one. From 2.0
on, which brought version 3 of the file, sections are merged key by key, so it goes into a file of its own; such a
file must not have a higher version than the main one.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
from typing import Any

from hook.engines.files import Host
from hook.engines.registration import Plan, Registration, other_path
from hook.engines.settings import Edit, Item, Setting
from hook.engines.tomlfile import TomlText
from hook.engines.values import REMEDY, Keys, find, strings, table, tables
from ldcache.errors import NvhookError

CONFIG = "/etc/containerd/config.toml"
# The CRI plugin by the version of the file; a file without one is version 1.
PLUGINS = {1: "cri", 2: "io.containerd.grpc.v1.cri"}
PLUGIN = "io.containerd.cri.v1.runtime"
RUNC = "io.containerd.runc.v2"
IMPORTS_MAX = 256

Both = tuple[list[Setting | Item], list[Setting]]


class Config:
    """One file, or with `imports` followed, all that a containerd reads, in its order."""

    def __init__(self, host: Host, path: str) -> None:
        self.path = path
        self.files: dict[str, dict[str, Any]] = {}
        pending = [path]
        while pending and len(self.files) < IMPORTS_MAX:
            one = pending.pop(0)
            text = None if one in self.files else host.read(one)
            if text is None:
                continue
            value = TomlText(one, text).value()
            self.files[one] = value
            for pattern in strings(value, ("imports",), one):
                pending += _matching(host, os.path.dirname(one), pattern)

    def main(self) -> dict[str, Any]:
        """The main file's value; {} for a missing or an empty one."""
        return self.files.get(self.path, {})

    def patterns(self) -> list[str]:
        """The main file's imports, absolute."""
        folder = os.path.dirname(self.path)
        return [os.path.normpath(os.path.join(folder, one)) for one in strings(self.main(), ("imports",), self.path)]


def _matching(host: Host, folder: str, pattern: str) -> list[str]:
    path = os.path.normpath(os.path.join(folder, pattern))
    if "*" not in path or "\0" in path:
        return [path]
    top = host.folder.rstrip("/")
    return [found[len(top) :] for found in sorted(glob.glob(glob.escape(top) + path))]


def plan(host: Host, wanted: Registration) -> Plan:
    """What containerd needs. Raises NvhookError for a file of it that can't be read."""
    config = Config(host, wanted.config or CONFIG)
    version = _version(host, config)
    cri = ("plugins", PLUGINS.get(version, PLUGIN))
    base = _base(config, cri, wanted)
    made = Plan(restart="systemctl restart containerd", lowlevel=_binary(base))
    settings, switches = _settings(config, cri, wanted, base, version)
    if version < 3:
        made.edits = _replacing(config, cri, version, wanted, (settings, switches))
    else:
        made.edits = _merging(config, version, wanted, (settings, switches))
        _look_for_others(made, config, cri, wanted)
    disabled = strings(config.main(), ("disabled_plugins",), config.path)
    if any(name in ("cri", *PLUGINS.values(), PLUGIN) for name in disabled):
        made.notes.append(f"{config.path} has the CRI plugin in disabled_plugins: Kubernetes can't use this containerd")
    if not config.files and host.exists("/var/lib/rancher"):
        made.notes.append("k3s and rke2 have a containerd of their own: `nvhook configure k3s`, or `rke2`")
    return made


def _version(host: Host, config: Config) -> int:
    """The main file's version; for a new file the newest that this containerd reads."""
    main = config.main()
    if main:
        return version_of(main, config.path)
    return 3 if host.is_real() and _release() >= 2 else 2


def version_of(value: dict[str, Any], path: str) -> int:
    """The version of a file of containerd's; 1 where none is in it. Raises NvhookError."""
    version = value.get("version", 1)
    if type(version) is not int or version < 0:
        raise NvhookError(f"{path}: version is {version!r}", REMEDY)
    return max(version, 1)


def _release() -> int:
    """The installed containerd's major version; 0 where there is none."""
    try:
        done = subprocess.run(["containerd", "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r" v?(\d+)\.\d+", done.stdout)
    return int(match.group(1)) if match else 0


def _base(config: Config, cri: Keys, wanted: Registration) -> dict[str, Any]:
    """The runtime whose options ours takes over: the default one, else runc, else crun."""
    runtimes, default = _runtimes(config, cri)
    for name in (default, "runc", "crun"):
        found = runtimes.get(name)
        if not isinstance(found, dict) or not str(found.get("runtime_type", RUNC)).startswith("io.containerd.runc."):
            continue
        program = os.path.basename(_binary(found) or "")
        if program != os.path.basename(wanted.runtime) and not program.startswith("nvidia-container-runtime"):
            return found
    return {}


def _runtimes(config: Config, cri: Keys) -> tuple[dict[str, Any], str]:
    """All runtimes of all files, and the default one's name."""
    runtimes: dict[str, Any] = {}
    default = "runc"
    for path, value in config.files.items():
        section = table(value, (*cri, "containerd"), path)
        runtimes |= runtimes_of(value, cri, path)
        default = str(section.get("default_runtime_name") or default)
    return runtimes, default


def runtimes_of(value: dict[str, Any], cri: Keys, path: str) -> dict[str, dict[str, Any]]:
    """The runtimes in one file by name, their `options` tables too. Raises NvhookError."""
    keys = (*cri, "containerd", "runtimes")
    found = tables(value, keys, path)
    for name in found:
        table(value, (*keys, name, "options"), path)
    return found


def _binary(base: dict[str, Any]) -> str | None:
    path = (base.get("options") or {}).get("BinaryName")
    return path if isinstance(path, str) and path.startswith("/") else None


def _settings(config: Config, cri: Keys, wanted: Registration, base: dict[str, Any], version: int) -> Both:
    """The runtime's table with what `base` has, and the switches: those asked for, and all of them."""
    inherited = {key: value for key, value in base.items() if key != "options"}
    options = {**(base.get("options") or {}), "BinaryName": wanted.runtime}
    if version == 1:
        # What the runtimes of containerd 1.0 to 1.2 were named by; later ones look at BinaryName.
        options["Runtime"] = wanted.runtime
    entry = {**inherited, "runtime_type": base.get("runtime_type", RUNC), "options": options}
    above = (*cri, "containerd")
    conflict = other_path(wanted, "options", "BinaryName")
    default = Setting((*above, "default_runtime_name"), wanted.name, dangling=True)
    # containerd 1.7 knows it; 2.0 has it on.
    cdi = Setting((*cri, "enable_cdi"), True)
    runc = Setting((*above, "runtimes", "runc"), {"runtime_type": RUNC})
    settings: list[Setting | Item] = [Setting((*above, "runtimes", wanted.name), entry, own=True, conflict=conflict)]
    runtimes, name = _runtimes(config, cri)
    if name == "runc" and runtimes.get("runc", runc.value) == runc.value:
        # A file that names any runtime names all there are: the built-in runc is gone then (containerd#7982).
        settings.append(runc)
    settings += [default] if wanted.set_default else []
    settings += [cdi] if wanted.cdi else []
    return settings, [default, cdi]


def _replacing(config: Config, cri: Keys, version: int, wanted: Registration, both: Both) -> list[Edit]:
    """The edits where sections replace each other: of the last file that has one, else of the main file; and of
    those that have our runtime from a time when they were the last."""
    keys = (*cri, "containerd", "runtimes", wanted.name, "options", "BinaryName")
    having = [path for path, value in config.files.items() if find(value, cri) is not None]
    last = having[-1] if having else config.path
    paths = [last, *(path for path in having if path != last and wanted.is_ours(find(config.files[path], keys)))]
    head: list[Setting | Item] = [] if version == 1 else [Setting(("version",), version, head=True)]
    return [Edit(path, TomlText, [*head, *both[0]], both[1]) for path in paths]


def _merging(config: Config, version: int, wanted: Registration, both: Both) -> list[Edit]:
    """The edits where keys are merged: a file of our own, in a folder that `imports` covers."""
    folders = [os.path.dirname(one) for one in config.patterns() if os.path.basename(one) == "*.toml"]
    folder = next((one for one in folders if "*" not in one), f"{os.path.dirname(config.path)}/conf.d")
    head = Setting(("version",), version, head=True)
    own = Edit(f"{folder}/99-nvhook-{wanted.name}.toml", TomlText, [head, *both[0]], both[1], ours=True)
    main: list[Setting | Item] = [head]
    if folder not in folders or f"{folder}/*.toml" in config.main()["imports"]:
        # In the second case it may have been us who put it in, and it goes with the last of our files.
        main.append(Item(("imports",), f"{folder}/*.toml"))
    return [own, Edit(config.path, TomlText, main)]


def _look_for_others(made: Plan, config: Config, cri: Keys, wanted: Registration) -> None:
    """Other files that have a runtime of this name: what those before ours say is overruled, key by key."""
    own = made.edits[0].path
    paths = [path for path in config.files if path != own]
    for path in paths:
        there = find(config.files[path], (*cri, "containerd", "runtimes", wanted.name))
        reason = None if there is None else other_path(wanted, "options", "BinaryName")(there)
        if reason is not None:
            later = path != config.path and path > own
            (made.foreign if later else made.shadowed).append(f"{path}: the runtime {wanted.name} {reason}")

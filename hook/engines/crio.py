# SPDX-License-Identifier: Apache-2.0
"""CRI-O: a file of ours in `/etc/crio/crio.conf.d`, which is read behind `/etc/crio/crio.conf` (crio.conf.d(5))."""

from __future__ import annotations

import os
from typing import Any

from hook.engines import hookfile
from hook.engines.files import Host
from hook.engines.registration import Plan, Registration, other_path
from hook.engines.settings import Edit, Item, Setting
from hook.engines.tomlfile import TomlText
from hook.engines.values import find, tables

CONFIG = "/etc/crio/crio.conf"
FOLDER = "/etc/crio/crio.conf.d"
RUNTIMES = ("crio", "runtime", "runtimes")
DEFAULT = ("crio", "runtime", "default_runtime")


def plan(host: Host, wanted: Registration) -> Plan:
    """What CRI-O needs. Raises NvhookError for a file of it that can't be read."""
    own = f"{FOLDER}/99-nvhook-{wanted.name}.conf"
    main = wanted.config or CONFIG
    made = Plan(restart="systemctl restart crio")
    runtimes: dict[str, Any] = {}
    default = None
    for path in files(host, main, own):
        value = TomlText(path, host.read(path) or "").value()
        runtimes_there = tables(value, RUNTIMES, path)
        there = runtimes_there.get(wanted.name)
        reason = None if there is None else other_path(wanted, "runtime_path")(there)
        if reason is not None:
            (made.foreign if path != main and path > own else made.shadowed).append(
                f"{path}: the runtime {wanted.name} {reason}"
            )
        runtimes |= runtimes_there
        default = find(value, DEFAULT) or default
    base = _base(runtimes, default, wanted)
    entry = {**base, "runtime_path": wanted.runtime, "runtime_type": "oci"}
    conflict = other_path(wanted, "runtime_path")
    switch = Setting(DEFAULT, wanted.name, dangling=True)
    settings: list[Setting | Item] = [Setting((*RUNTIMES, wanted.name), entry, own=True, conflict=conflict)]
    settings += [switch] if wanted.set_default else []
    made.edits = [Edit(own, TomlText, settings, [switch], ours=True), *hookfile.edits(host, wanted)]
    program = base.get("runtime_path")
    made.lowlevel = program if isinstance(program, str) and program.startswith("/") else None
    if wanted.cdi:
        made.notes.append("CRI-O reads CDI files always: there is nothing to switch on")
    return made


def files(host: Host, main: str = CONFIG, own: str | None = None) -> list[str]:
    """The files that CRI-O reads, in its order, without `own`."""
    try:
        names = sorted(os.listdir(host.place(FOLDER)))
    except OSError:
        names = []
    paths = [main, *(f"{FOLDER}/{name}" for name in names if not name.startswith("."))]
    return [path for path in paths if path != own and host.exists(path)]


def _base(runtimes: dict[str, Any], default: Any, wanted: Registration) -> dict[str, Any]:
    """The runtime whose options ours takes over: the default one, else crun, else runc."""
    for name in (default, "crun", "runc"):
        found = runtimes.get(str(name))
        if not isinstance(found, dict) or name == wanted.name or found.get("runtime_type", "oci") not in ("", "oci"):
            continue
        program = os.path.basename(str(found.get("runtime_path", "")))
        if program != os.path.basename(wanted.runtime) and not program.startswith("nvidia-container-runtime"):
            return found
    return {}

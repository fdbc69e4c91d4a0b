# SPDX-License-Identifier: Apache-2.0
"""podman: a file of ours in `/etc/containers/containers.conf.d` (containers.conf(5), podman 4.0 and later).

podman reads the distribution's containers.conf, the host's, and the files of that folder in the order of their names;
of two runtimes of one name the later counts. There is no daemon, so nothing has to be restarted; rootless podman reads
the same files.
"""

from __future__ import annotations

import os
from typing import Any

from hook.engines import hookfile
from hook.engines.files import Host
from hook.engines.registration import Plan, Registration
from hook.engines.settings import Edit, Item, Setting
from hook.engines.tomlfile import TomlText
from hook.engines.values import strings, table

RUNTIMES = ("engine", "runtimes")
MAIN = ("/usr/share/containers/containers.conf", "/etc/containers/containers.conf")
FOLDER = "/etc/containers/containers.conf.d"


def plan(host: Host, wanted: Registration) -> Plan:
    """What podman needs. Raises NvhookError for a file of it that can't be read."""
    own = wanted.config or f"{FOLDER}/99-nvhook-{wanted.name}.conf"
    made = Plan()

    def conflict(there: Any) -> str | None:
        program = there[0] if isinstance(there, list) and len(there) == 1 else None
        return None if wanted.is_ours(program) else f"is the runtime {there}"

    for path in files(host):
        there = runtimes_of(TomlText(path, host.read(path) or "").value(), path).get(wanted.name)
        reason = None if there is None or path == own else conflict(there)
        if reason is not None:
            (made.foreign if _order(path) > _order(own) else made.shadowed).append(
                f"{path}: the runtime {wanted.name} {reason}"
            )
    runtime = Setting((*RUNTIMES, wanted.name), [wanted.runtime], own=True, conflict=conflict)
    default = Setting(("engine", "runtime"), wanted.name, dangling=True)
    settings: list[Setting | Item] = [runtime, *([default] if wanted.set_default else [])]
    edit = Edit(own, TomlText, settings, [default], ours=wanted.config is None)
    made.edits = [edit, *hookfile.edits(host, wanted)]
    if wanted.cdi:
        made.notes.append("podman reads CDI files always: there is nothing to switch on")
    return made


def runtimes_of(value: dict[str, Any], path: str) -> dict[str, list[str]]:
    """The runtimes in one file by name: the paths at which each may be. Raises NvhookError."""
    return {name: strings(value, (*RUNTIMES, name), path) for name in table(value, RUNTIMES, path)}


def files(host: Host) -> list[str]:
    """The files that are there, in podman's order."""
    try:
        names = sorted(os.listdir(host.place(FOLDER)))
    except OSError:
        names = []
    paths = [*MAIN, *(f"{FOLDER}/{name}" for name in names if name.endswith(".conf"))]
    return [path for path in paths if host.exists(path)]


def _order(path: str) -> tuple[int, str]:
    """By which podman's files sort as it reads them; a user's own comes last."""
    if path in MAIN:
        return MAIN.index(path), ""
    return 2 if os.path.dirname(path) == FOLDER else 3, path

# SPDX-License-Identifier: Apache-2.0
"""podman: a file of ours in `/etc/containers/containers.conf.d` (containers.conf(5), podman 4.0 and later).

There is no daemon, so nothing has to be restarted; rootless podman reads the same folder.
"""

from __future__ import annotations

import os
from typing import Any

from hook.engines import hookfile
from hook.engines.files import Host
from hook.engines.registration import Plan, Registration
from hook.engines.settings import Edit, Item, Setting
from hook.engines.tomlfile import TomlText

FOLDER = "/etc/containers/containers.conf.d"


def plan(host: Host, wanted: Registration) -> Plan:
    """What podman needs."""

    def conflict(there: Any) -> str | None:
        program = there[0] if isinstance(there, list) and len(there) == 1 else None
        return None if wanted.is_ours(program) else f"is the runtime {there}"

    runtime = Setting(("engine", "runtimes", wanted.name), [wanted.runtime], own=True, conflict=conflict)
    default = Setting(("engine", "runtime"), wanted.name, dangling=True)
    settings: list[Setting | Item] = [runtime, *([default] if wanted.set_default else [])]
    path = wanted.config or f"{FOLDER}/99-nvhook-{wanted.name}.conf"
    edit = Edit(path, TomlText, settings, [default], ours=wanted.config is None)
    made = Plan([edit, *hookfile.edits(host, wanted)])
    if wanted.cdi:
        made.notes.append("podman reads CDI files always: there is nothing to switch on")
    return made


def files(host: Host) -> list[str]:
    """The files of the folder, in podman's order."""
    try:
        names = sorted(os.listdir(host.place(FOLDER)))
    except OSError:
        return []
    return [f"{FOLDER}/{name}" for name in names if name.endswith(".conf")]

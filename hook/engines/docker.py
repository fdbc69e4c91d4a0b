# SPDX-License-Identifier: Apache-2.0
"""docker: `/etc/docker/daemon.json` (dockerd(8); `runtimes` and `default-runtime` are read again on SIGHUP)."""

from __future__ import annotations

from hook.engines.files import Host
from hook.engines.jsonfile import JsonText
from hook.engines.registration import Plan, Registration, other_path
from hook.engines.settings import Edit, Item, Setting

CONFIG = "/etc/docker/daemon.json"


def plan(host: Host, wanted: Registration) -> Plan:
    """What docker needs. An entry's further members, such as `runtimeArgs`, are left as they are."""
    entry = Setting(("runtimes", wanted.name), {"path": wanted.runtime}, own=True, conflict=other_path(wanted, "path"))
    default = Setting(("default-runtime",), wanted.name, dangling=True)
    # docker 25 knows it, and has it on from 28.2 on.
    cdi = Setting(("features", "cdi"), True)
    settings: list[Setting | Item] = [entry]
    settings += [default] if wanted.set_default else []
    settings += [cdi] if wanted.cdi else []
    edit = Edit(wanted.config or CONFIG, JsonText, settings, [default, cdi])
    return Plan([edit], restart="systemctl restart docker", reload="systemctl reload docker")

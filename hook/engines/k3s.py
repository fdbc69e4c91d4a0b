# SPDX-License-Identifier: Apache-2.0
"""k3s and rke2: the template of which they make their containerd's configuration at each start.

A template is no TOML, so ours is a block of lines between two marks. A new one begins with the built-in template
(k3s 1.24.17, 1.25.13, 1.26.8 and later), which has runc and its options. The version of the file that was made last
tells which template is read: `config-v3.toml.tmpl` came with containerd 2.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from hook.engines import containerd
from hook.engines.files import Host
from hook.engines.registration import Plan, Registration, other_path
from hook.engines.settings import Edit, Setting
from hook.engines.tomlfile import TomlText
from hook.engines.values import find
from ldcache.errors import NvhookError

TOP = "/var/lib/rancher"
BASE = '{{ template "base" . }}\n'
TEMPLATES = {2: "config.toml.tmpl", 3: "config-v3.toml.tmpl"}
BLOCK = re.compile(r"\n?# nvhook (\S+): begin\n(.*?)# nvhook \1: end\n", re.DOTALL)
BINARY = re.compile(r'BinaryName = "(.*)"$', re.MULTILINE)
RUNC = {"k3s": "data/current/bin/runc", "rke2": "bin/runc"}


class BlockText:
    """A text with marked blocks, as a value of names and bodies."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text

    def value(self) -> dict[str, Any]:
        """The blocks."""
        return {match.group(1): match.group(2) for match in BLOCK.finditer(self.text)}

    def set(self, keys: tuple[str, ...], value: Any) -> None:
        """Put a block in the place of the one of that name, or behind everything."""
        (name,) = keys
        block = f"\n# nvhook {name}: begin\n{value}# nvhook {name}: end\n"
        for match in BLOCK.finditer(self.text):
            if match.group(1) == name:
                self.text = self.text[: match.start()] + block + self.text[match.end() :]
                return
        text = self.text if self.text.strip() else BASE
        self.text = (text if text.endswith("\n") else f"{text}\n") + block

    def delete(self, keys: tuple[str, ...]) -> None:
        """Take a block out."""
        self.text = BLOCK.sub(lambda match: "" if match.group(1) == keys[0] else match.group(), self.text)


def made_by(engine: str) -> str:
    """The file that `k3s` or `rke2` made for its containerd at its last start."""
    return f"{TOP}/{engine}/agent/etc/containerd/config.toml"


def templates(engine: str) -> list[str]:
    """The files that may be the template, by the order of TEMPLATES."""
    return [f"{os.path.dirname(made_by(engine))}/{name}" for name in TEMPLATES.values()]


def registered(host: Host, engine: str) -> tuple[dict[str, str], set[str], dict[str, Any]]:
    """The templates that are there and count, each with its text; the names of the blocks in them; each runtime's
    program in the file made last. Raises NvhookError."""
    path = made_by(engine)
    value = TomlText(path, host.read(path) or "").value()
    version = _version(value, path)
    # Before the first start either may come to count.
    paths = [f"{os.path.dirname(path)}/{TEMPLATES[version]}"] if value else templates(engine)
    texts = {one: text for one in paths if (text := host.read(one)) is not None}
    blocks = {name for one, text in texts.items() for name in BlockText(one, text).value()}
    runtimes = containerd.runtimes_of(value, ("plugins", containerd.PLUGINS.get(version, containerd.PLUGIN)), path)
    return texts, blocks, {name: find(entry, ("options", "BinaryName")) for name, entry in runtimes.items()}


def _version(value: dict[str, Any], path: str) -> int:
    """Which of TEMPLATES is read."""
    return 3 if containerd.version_of(value, path) >= 3 else 2


def plan_of(engine: str) -> Callable[[Host, Registration], Plan]:
    """The plan of `k3s` or `rke2`."""
    return lambda host, wanted: plan(host, wanted, engine)


def plan(host: Host, wanted: Registration, engine: str) -> Plan:
    """What k3s or rke2 needs. Raises NvhookError where it was never started, so that nothing tells its version."""
    made_last = made_by(engine)
    text = host.read(made_last)
    if text is None:
        raise NvhookError(f"{engine} has made no {made_last} yet", f"start {engine} once, then run this again")
    value = TomlText(made_last, text).value()
    version = _version(value, made_last)
    plugin = containerd.PLUGINS.get(version, containerd.PLUGIN)
    template = wanted.config or f"{os.path.dirname(made_last)}/{TEMPLATES[version]}"
    made = Plan(restart=f"systemctl restart {engine}, or {engine}-agent")
    if engine == "rke2":
        made.restart = "systemctl restart rke2-server, or rke2-agent"
    there = find(value, ("plugins", plugin, "containerd", "runtimes", wanted.name))
    reason = None if there is None else other_path(wanted, "options", "BinaryName")(there)
    old = BlockText(template, host.read(template) or "")
    if reason is not None and wanted.name not in old.value():
        # Twice the same table is no TOML, and containerd would not start.
        made.foreign.append(f"{made_last}: the runtime {wanted.name} {reason}")
    body = _body(plugin, wanted)
    conflict = _conflict(wanted)
    made.edits = [Edit(template, BlockText, [Setting((wanted.name,), body, own=True, conflict=conflict)])]
    if wanted.set_default:
        line = f"default-runtime: {wanted.name}"
        made.notes.append(f"{engine} takes its default from /etc/rancher/{engine}/config.yaml: {line}")
    if wanted.cdi and version == 2:
        made.notes.append(f"whether CDI is on with containerd 1.7 is for {engine}'s template to say: enable_cdi = true")
    runc = f"{TOP}/{engine}/{RUNC[engine]}"
    made.lowlevel = runc if host.exists(runc) else None
    return made


def _body(plugin: str, wanted: Registration) -> str:
    table = f"plugins.'{plugin}'.containerd.runtimes.'{wanted.name}'"
    lines = [f"[{table}]", '  runtime_type = "io.containerd.runc.v2"', f"[{table}.options]"]
    lines += [f'  BinaryName = "{wanted.runtime}"', "  SystemdCgroup = {{ .SystemdCgroup }}"]
    return "".join(f"{line}\n" for line in lines)


def _conflict(wanted: Registration) -> Callable[[Any], str | None]:
    def conflict(there: Any) -> str | None:
        program = BINARY.search(there)
        ours = program is not None and wanted.is_ours(program.group(1))
        return None if ours else "is a block with another runtime"

    return conflict

# SPDX-License-Identifier: Apache-2.0
"""An inventory for people: what `nvhook inventory` prints."""

from __future__ import annotations

from typing import Any

from cdi.host import store


def table(made: dict[str, Any]) -> str:
    """An inventory for people."""
    loaded = made["driver"]
    cuda = f", CUDA {loaded['cuda']}" if loaded["cuda"] else ""
    flavour = f", {loaded['flavour']} module" if loaded["flavour"] else ""
    blocks = [f"driver {loaded['version']}{flavour}{cuda}"]
    blocks.append(_gpu_rows(made))
    blocks.append(_rows("libraries", made["libraries"], ("capability", "class", "path", "soname", "links")))
    blocks.append(_rows("programs", made["programs"], ("capability", "path")))
    blocks.append(_rows("graphics files", made["files"], ("capability", "path", "container_path")))
    blocks.append(_rows("firmware", made["firmware"], ("path",)))
    blocks.append(_rows("sockets", made["sockets"], ("capability", "kind", "path")))
    blocks.append(_node_rows([*made["nodes"], *(node for gate in made["gates"].values() for node in gate["nodes"])]))
    blocks.append(_mig_rows(made))
    blocks.append(_imex_row(made["imex"]))
    blocks += [f"warning: {text}" for text in made["warnings"]]
    return "\n".join(block for block in blocks if block)


def _gpu_rows(made: dict[str, Any]) -> str:
    rows = [["index", "minor", "bus id", "UUID", "NUMA", "name"]]
    for gpu in made["gpus"]:
        values = (gpu[name] for name in ("index", "minor", "bus_id", "uuid", "numa_node", "name"))
        rows.append(["-" if value is None else str(value) for value in values])
    lines = ["GPUs:", *_aligned(rows)] if made["gpus"] else ["GPUs: none"]
    lines += [f"  in MIG mode without a MIG device: {gpu['bus_id']}" for gpu in store.undivided(made)]
    return "\n".join([*lines, *(f"  left out: {fault['bus_id']}: {fault['reason']}" for fault in made["faults"])])


def _mig_rows(made: dict[str, Any]) -> str:
    if not made["mig"]:
        return ""
    indexes = {gpu["bus_id"]: gpu["index"] for gpu in made["gpus"]}
    rows = [["id", "instances", "profile", "UUID", "nodes"]]
    for entry in made["mig"]:
        paths = " ".join(node["host_path"] for node in entry["nodes"]) or "missing"
        numbers = f"gi {entry['gi']} ci {entry['ci']}"
        name = f"{indexes[entry['gpu']]}:{entry['index']}"
        rows.append([name, numbers, entry["profile"] or "-", entry["uuid"] or "-", paths])
    return "\n".join(["MIG devices:", *_aligned(rows)])


def _imex_row(runs: list[dict[str, Any]]) -> str:
    ends = ((run["channel"], run["channel"] + run["count"] - 1) for run in runs)
    shown = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in ends)
    return f"IMEX channels: {shown}" if shown else ""


def _node_rows(found: list[dict[str, Any]]) -> str:
    rows = []
    for node in found:
        owner = f"{node['uid']}:{node['gid']}"
        rows.append([node["role"], node["host_path"], f"{node['major']}:{node['minor']}", f"{node['mode']:04o}", owner])
    return "\n".join(["nodes:", *_aligned(rows)]) if rows else "nodes: none"


def _rows(title: str, items: list[dict[str, Any]], names: tuple[str, ...]) -> str:
    if not items:
        return f"{title}: none"
    rows = []
    for item in items:
        values = (item[name] for name in names)
        rows.append([" ".join(value) if isinstance(value, list) else str(value) for value in values])
    return "\n".join([f"{title}: {len(items)}", *_aligned(rows)])


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]

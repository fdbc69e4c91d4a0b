# SPDX-License-Identifier: Apache-2.0
"""`nvhook plan --applier cdi-hook` and `--applier cdi`: what a CDI file brings to a bundle, and what its hook would do.

Cold. A bundle whose config.json has our hook was edited by an engine: that hook is planned, with the arguments that
stand there. Else the file is the one that `cdi generate` would write now, and the devices those that the container
asks for; the edits are made as an engine makes them, and nothing is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from cdi import cli, devices, finish, generate, inject
from cdi.host import inventory, settings, store
from hook import bundle, create_container, request, requirements, state
from hook.create_container import Parts
from hook.plan import Plan
from hook.planner import merged, nothing, open_rootfs
from ldcache import root
from ldcache.errors import NvhookError

# The layout of `cdi generate --no-hooks`.
LAYOUT = "both"


def plan(place: str, host_root: str, hookless: bool) -> dict[str, Any]:
    """As `planner.plan`, and `devices`: CDI names; `parts` of the hook's work, with `part`, `done` and the `reason`;
    `hooks`: the hook's arguments. Raises NvhookError where an engine would find no device, or the hook would fail."""
    opened = bundle.Bundle(place)
    container = opened.container
    none: dict[str, Any] = {"devices": [], "parts": [], "hooks": []}
    if hook_words(container) is not None:
        # The engine has set the variable to `void`, and what was asked for is not to be seen any more.
        return nothing(request.decide(container, settings.DEFAULTS)) | none | planned(container)
    if not request.possible(container, host_root):
        return nothing(request.decide(container, settings.DEFAULTS)) | none
    known, _ = inventory.current(store.Options(host_root, nvml="health"))
    decision = request.decide(container, settings.of(known))
    decision.configuration = settings.source(known)
    if decision.request is None:
        return nothing(decision) | none
    options = generate.Options(layout=LAYOUT if hookless else None)
    spec = generate.make(known, "" if hookless else cli.find_hook(), options)
    names = device_names(known, decision.request)
    blocks = [spec["containerEdits"], *(device_edits(spec, name) for name in names)] if names else []
    made = nothing(decision) | none
    made["request"] = decision.request.to_json()
    made["devices"] = [f"{generate.KIND}={name}" for name in names]
    made["edits"] = merged(blocks)
    made["compatibility"] = compatibility(decision.request, known, "")
    warnings = [*decision.warnings, *generate.left_out(known, options), *generate.notes(known, spec, options)]
    if not names:
        warnings.append("no GPU is asked for, and a CDI file brings the driver's files with a GPU only")
    config = inject.inject(opened.config, [on_this_machine(block, host_root) for block in blocks])
    edited = state.Container(container.bundle)
    state.fill(edited, opened.path, config)
    if hook_words(edited) is not None:
        made |= planned(edited)
        compat = made["finish"]["forward_compatibility"] or {}
        made["compatibility"] = compatibility(decision.request, known, compat.get("folder") or "")
    made["finish"] = made["finish"] | {"warnings": [*warnings, *made["finish"].get("warnings", [])]}
    return made


def hook_words(container: state.Container) -> list[str] | None:
    """The arguments of our hook in a configuration; None where it has none."""
    for words in container.create_hooks:
        if words and words[0].rpartition("/")[2] == finish.HOOK_NAME:
            return words[1:]
    return None


def device_names(known: dict[str, Any], wanted: request.Request) -> list[str]:
    """The file's names of the devices that are asked for: `all`, an index, or `GPU:MIG`. Raises NvhookError."""
    if wanted.ids is None:
        return ["all"]
    names = []
    for one in wanted.ids:
        try:
            device = devices.find(known, one)
        except devices.UuidsUnknown as error:
            what = f"cannot tell which GPU is {one[:80]!a}: neither the kernel nor NVML tells all UUIDs"
            raise NvhookError(what, "run nvidia-smi on the host, or ask for the GPU by its index") from error
        index = str(device.gpu["index"])
        names.append(index if device.mig is None else f"{index}:{device.mig['index']}")
    return list(dict.fromkeys(names))


def device_edits(spec: dict[str, Any], name: str) -> dict[str, Any]:
    """A device's edits. Raises NvhookError where the file has no such device."""
    for device in spec["devices"]:
        if device["name"] == name:
            edits: dict[str, Any] = device["containerEdits"]
            return edits
    what = f"unresolvable CDI devices: {generate.KIND}={name}"
    raise NvhookError(what, "see `cdi list` for what there is, and what failed")


def on_this_machine(block: dict[str, Any], host_root: str) -> dict[str, Any]:
    """The edits with their host paths on this machine, where another folder stands for the host."""
    top = host_root.rstrip("/")
    nodes = [node | {"hostPath": f"{top}{node.get('hostPath', node['path'])}"} for node in block.get("deviceNodes", [])]
    mounts = [mount | {"hostPath": f"{top}{mount['hostPath']}"} for mount in block.get("mounts", [])]
    return block | {"deviceNodes": nodes, "mounts": mounts}


def compatibility(wanted: request.Request, known: dict[str, Any], folder: str) -> dict[str, Any] | None:
    """How the image's CDI fits the driver's."""
    fit = requirements.compatibility(wanted.image_cuda, known["driver"], bool(folder))
    return None if fit is None else fit.to_json()


def planned(container: state.Container) -> dict[str, Any]:
    """What the hook of a configuration would do: `requirements`, `finish`, `steps`, `parts`, `hooks`."""
    words = hook_words(container)
    assert words is not None, "no hook of ours"
    parts = create_container.read_parts(words)
    minors = [
        device["minor"]
        for device in container.devices
        if str(device.get("path")).removeprefix("/dev/nvidia").isdecimal() and type(device.get("minor")) is int
    ]
    warnings = [f"left out what this version does not know: {part}" for part in parts.unknown]
    verdicts = create_container.require(container, parts, minors, warnings)
    base, host = open_rootfs(container.root_path), root.open_root("/")
    try:
        made = create_container.make_plan(container, parts, minors, base, host)
    finally:
        os.close(base)
        os.close(host)
    made.warnings[:0] = warnings
    return {
        "requirements": [verdict.to_json() for verdict in verdicts],
        "finish": made.finish(),
        "steps": [step.describe() for step in create_container.make_steps(made, container, parts)],
        "parts": [{"part": part, "done": done, "reason": why} for part, done, why in judged(parts, made, verdicts)],
        "hooks": [[finish.HOOK_NAME, *words]],
    }


def judged(parts: Parts, made: Plan, verdicts: list[requirements.Verdict]) -> Iterator[tuple[str, bool, str]]:
    """Each part of finish.PARTS, in their order: whether there is anything to do, and what, or why not."""
    absent = "the hook's arguments do not ask for it"
    yield "links", bool(made.links), f"{len(made.links)} links" if made.links else absent
    wanted = parts.compat and parts.driver and parts.cache
    why = made.compat_reason or ("the image brings no libraries for it" if wanted else absent)
    yield "forward-compatibility", bool(made.compat_folder), why
    if made.musl_path:
        yield "loader-cache", True, f"{made.musl_path} instead, for the image's loader is musl's"
    else:
        entries = f"{len(made.cache_entries)} entries"
        yield "loader-cache", bool(made.cache_entries), entries if made.cache_entries else absent
    if made.proc_mask is None:
        yield "proc-mask", False, "config.json masks nothing below /proc" if parts.mask else absent
    else:
        yield "proc-mask", True, f"shows {', '.join(made.proc_mask) or 'no GPU'}"
    listed = ", ".join([f"/dev/nvidia{minor}" for minor in made.profile])
    why = f"EGL lists {listed}" if listed else "the container has no GPU" if parts.profile else absent
    yield "application-profile", bool(listed), why
    unmet = len([verdict for verdict in verdicts if not verdict.satisfied])
    why = f"{len(verdicts)} checked, {unmet} not met" if verdicts else "the container requires nothing"
    yield "requirements", bool(verdicts), why if parts.requirements and parts.driver else absent

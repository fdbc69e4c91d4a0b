# SPDX-License-Identifier: Apache-2.0
"""`nvhook plan`: what `prestart`, or the runtime shim, would do for a bundle, as a JSON value, and nothing done.

`hook.cdiplanner` has the same for CDI files.
"""

from __future__ import annotations

import posix
from typing import Any

from cdi.host import settings
from hook import bundle, injection, lowlevel, request, shim, state
from ldcache import root
from ldcache.errors import NvhookError

RUNTIME = "nvhook-runtime"


def plan_runtime(place: str, host_root: str) -> dict[str, Any]:
    """What `nvhook-runtime` would do: as `plan`, and `mode`, `runtime`, `reasons`, `hooks` (the arguments of those that
    it would add). Raises NvhookError where it would."""
    opened = bundle.Bundle(place)
    container = opened.container
    none: dict[str, Any] = {"mode": None, "runtime": None, "reasons": [], "hooks": []}
    if request.DONE in container.annotations:
        return nothing(request.decide(container, settings.DEFAULTS)) | none | {"reasons": ["it is done already"]}
    if not request.possible(container, host_root) and not request.names_cdi(container.annotations):
        return nothing(request.decide(container, settings.DEFAULTS)) | none
    host = root.open_host(host_root)
    try:
        made = shim.Shim(opened, host, host_root, RUNTIME)
        named = lowlevel.kept(host, RUNTIME)
        runtime = named or lowlevel.find(made.settings[lowlevel.KEY])
        made.make(runtime)
    finally:
        posix.close(host)
    decision = made.decision or request.decide(container, made.settings)
    fit = made.judged.compatibility(made.plan) if made.judged and made.plan else None
    stages = made.config.get("hooks") or {}
    added = [hook for stage, listed in stages.items() for hook in listed if hook not in _hooks(opened.config, stage)]
    return nothing(decision) | {
        "request": None if made.judged is None else made.judged.wanted.to_json(),
        **chosen(made.judged),
        "requirements": [] if made.judged is None else [verdict.to_json() for verdict in made.judged.requirements],
        "compatibility": None if fit is None else fit.to_json(),
        "edits": merged(made.edits),
        "annotations": made.annotations,
        "finish": {"warnings": made.warnings}
        if made.plan is None
        else made.plan.finish() | {"warnings": made.warnings},
        "steps": made.steps(),
        "mode": made.mode,
        "runtime": runtime,
        "reasons": made.reasons,
        "hooks": [hook.get("args") for hook in added],
    }


def merged(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """The edits of several blocks as one, each entry once; of what is no list the last."""
    made: dict[str, Any] = {}
    for block in blocks:
        for name, entries in block.items():
            if isinstance(entries, list):
                into = made.setdefault(name, [])
                into += [entry for entry in entries if entry not in into]
            else:
                made[name] = entries
    return {name: entries for name, entries in made.items() if entries}


def chosen(judged: injection.Judged | None) -> dict[str, Any]:
    """The devices that the ids came to."""
    if judged is None:
        return {"gpus": [], "mig": []}
    gpus = [{name: gpu[name] for name in ("index", "uuid", "bus_id")} for gpu in judged.selection.gpus]
    return {"gpus": gpus, "mig": injection.mig_names(judged.selection)}


def _hooks(config: dict[str, Any], stage: str) -> list[Any]:
    return (config.get("hooks") or {}).get(stage) or []


def plan(place: str, host_root: str) -> dict[str, Any]:
    """`request` (None where no GPU is asked for), `decision`, `requirements`, `compatibility`, `edits` (a CDI
    containerEdits object), `finish`, `steps`; where one is, `gpus` and `mig`, the devices chosen.

    Raises NvhookError where the hook would.
    """
    container = state.bundle_container(place)
    if not request.possible(container, host_root):
        return nothing(request.decide(container, settings.DEFAULTS))
    host = root.open_host(host_root)
    try:
        decision, judged = injection.ask(container, host, host_root)
    finally:
        posix.close(host)
    if judged is None:
        return nothing(decision)
    base = open_rootfs(container.root_path)
    try:
        made = injection.make_plan(container, judged.selection, base, judged.settings)
    finally:
        posix.close(base)
    fit = judged.compatibility(made)
    made.warnings[:0] = decision.warnings + judged.warnings
    if fit is not None and fit.warning():
        made.warnings.append(fit.warning())
    return {
        "request": judged.wanted.to_json(),
        **chosen(judged),
        "decision": decision.to_json(),
        "requirements": [verdict.to_json() for verdict in judged.requirements],
        "compatibility": None if fit is None else fit.to_json(),
        "edits": made.edits(),
        "finish": made.finish(),
        "steps": [step.describe() for step in injection.make_steps(made, container, judged.settings)],
    }


def nothing(decision: request.Decision) -> dict[str, Any]:
    """For a container without a GPU: why."""
    finish = {"warnings": decision.warnings} if decision.warnings else {}
    return {
        "request": None,
        "decision": decision.to_json(),
        "requirements": [],
        "compatibility": None,
        "edits": {},
        "finish": finish,
        "steps": [],
    }


def open_rootfs(path: str) -> int:
    """The bundle's root, which `plan` only reads."""
    try:
        return root.open_root(path)
    except OSError as error:
        what = f"cannot open the container's root {path}: {error.strerror}"
        raise NvhookError(what, "unpack or mount the image where root.path of config.json says") from error

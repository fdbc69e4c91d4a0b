# SPDX-License-Identifier: Apache-2.0
"""`nvhook plan`: what `prestart` would do for a bundle, as a JSON value, and nothing done."""

from __future__ import annotations

import posix
from typing import Any

from cdi.host import settings
from hook import injection, request, state
from ldcache import root
from ldcache.errors import NvhookError


def plan(bundle: str, host_root: str) -> dict[str, Any]:
    """`request` (None where no GPU is asked for), `decision`, `requirements`, `compatibility`, `edits` (a CDI
    containerEdits object), `finish`, `steps`.

    Raises NvhookError where the hook would.
    """
    container = state.bundle_container(bundle)
    if not request.possible(container, host_root):
        return _nothing(request.decide(container, settings.DEFAULTS))
    host = injection.open_host(host_root)
    try:
        decision, judged = injection.ask(container, host, host_root)
    finally:
        posix.close(host)
    if judged is None:
        return _nothing(decision)
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
        "decision": decision.to_json(),
        "requirements": [verdict.to_json() for verdict in judged.requirements],
        "compatibility": None if fit is None else fit.to_json(),
        "edits": made.edits(),
        "finish": made.finish(),
        "steps": [step.describe() for step in injection.make_steps(made, container, judged.settings)],
    }


def _nothing(decision: request.Decision) -> dict[str, Any]:
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

# SPDX-License-Identifier: Apache-2.0
"""`nvhook plan`: what `prestart` would do for a bundle, as a JSON value, and nothing done."""

from __future__ import annotations

import posix
from typing import Any

from hook import injection, request, state, steps
from ldcache import root
from ldcache.errors import NvhookError


def plan(bundle: str, host_root: str) -> dict[str, Any]:
    """`request` (None where no GPU is asked for), `edits` (a CDI containerEdits object), `finish`, `steps`.

    Raises NvhookError where the hook would.
    """
    container = state.bundle_container(bundle)
    wanted = request.read(container.env)
    if wanted is None:
        return {"request": None, "edits": {}, "finish": {}, "steps": []}
    host = injection.open_host(host_root)
    base = open_rootfs(container.root_path)
    try:
        made = injection.make_plan(container, injection.choose(host, host_root, wanted), base)
    finally:
        posix.close(base)
        posix.close(host)
    todo = [step.describe() for step in steps.steps(made, container)]
    return {"request": wanted.to_json(), "edits": made.edits(), "finish": made.finish(), "steps": todo}


def open_rootfs(path: str) -> int:
    """The bundle's root, which `plan` only reads."""
    try:
        return root.open_root(path)
    except OSError as error:
        what = f"cannot open the container's root {path}: {error.strerror}"
        raise NvhookError(what, "unpack or mount the image where root.path of config.json says") from error

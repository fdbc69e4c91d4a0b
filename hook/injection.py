# SPDX-License-Identifier: Apache-2.0
"""Putting a request into a live container: inventory, Selection, Plan, and the Plan's steps.

Hot, but only where a GPU is asked for: `prestart` imports it once it knows.
"""

from __future__ import annotations

import posix

from cdi.host import store
from hook import layout, loader, namespace, selection, steps
from ldcache import root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hook.plan import Plan
    from hook.request import Request
    from hook.selection import Selection
    from hook.state import Container


def inject(container: Container, wanted: Request, host_root: str) -> list[str]:
    """Put the request into the container; warnings come back. Raises NvhookError, with nothing left behind."""
    host = open_host(host_root)
    chosen = choose(host, host_root, wanted)
    place = namespace.Namespace()
    place.open(container)
    outside = place.outside(container)
    plan = make_plan(container, chosen, outside)
    place.warnings += plan.warnings
    todo = steps.steps(plan, container)
    posix.close(outside)
    posix.umask(0)
    todo = steps.prepare(todo, host, place)
    place.enter(container.root_path)
    steps.run(todo, place)
    return place.warnings


def open_host(host_root: str) -> int:
    """The host's root, or the folder that stands for it."""
    try:
        return root.open_root(host_root)
    except OSError as error:
        raise NvhookError(
            f"cannot open the host root {host_root}: {error.strerror}", "give an existing folder"
        ) from error


def choose(host: int, host_root: str, wanted: Request) -> Selection:
    """The Selection, from an inventory that is fresh; NVML is asked where only it knows a UUID."""
    try:
        return selection.select(store.inventory(host, host_root), wanted)
    except selection.UuidsUnknown:
        pass
    try:
        return selection.select(store.renew(host, host_root, nvml=True), wanted)
    except selection.UuidsUnknown as error:
        what = f"cannot tell which GPU is {', '.join(wanted.ids or ())}: neither the kernel nor NVML tells all UUIDs"
        raise NvhookError(what, "run nvidia-smi on the host, or ask for the GPU by its index") from error


def make_plan(container: Container, chosen: Selection, base: int) -> Plan:
    """The Plan for a container whose root `base` is open on."""
    target = layout.probe(base, container.env)
    plan = layout.layout(chosen, target)
    facts = loader.probe(base)
    if facts.glibc and any(library["soname"] == "libcuda.so.1" for library in chosen.libraries):
        loader.forward(plan, base, chosen.driver_version)
    folders = [target.library_folder]
    if any(library["class"] == 32 for library in chosen.libraries):
        folders.append(target.library_folder_32)
    loader.complete(plan, base, facts, folders, [mount["containerPath"] for mount in plan.mounts])
    # Where nothing below /proc is masked (`--privileged`, `procMount: Unmasked`), a mount over a part of it would
    # make the kernel refuse proc mounts in nested user namespaces.
    if not any(path.startswith("/proc/") for path in container.masked_paths):
        plan.proc_mask = None
    return plan

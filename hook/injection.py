# SPDX-License-Identifier: Apache-2.0
"""Putting a request into a live container: inventory, Selection, Plan, and the Plan's steps.

Hot, but only where a GPU is asked for: `prestart` imports it once it knows.
"""

from __future__ import annotations

import posix

from cdi.host import settings, store
from hook import layout, loader, request, requirements, selection, state
from ldcache import root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hook.log import Log
    from hook.namespace import Namespace
    from hook.plan import Plan
    from hook.record import Record
    from hook.request import Decision, Request
    from hook.selection import Selection
    from hook.state import Container
    from hook.step import Step


def inject(container: Container, host_root: str, debug: bool = False) -> list[str]:
    """Put what the container asks for into it; warnings come back. Raises NvhookError, with nothing left behind."""
    host = root.open_host(host_root)

    def work(times: Record | None) -> list[str]:
        return logged(container, host, host_root, debug, times)

    said: list[str] = state.counted(host_root, "prestart", "inventory", container, work)
    return said


def logged(container: Container, host: int, host_root: str, debug: bool, times: Record | None) -> list[str]:
    """The same, with a log where one is wanted."""
    known = store.inventory(host, host_root)
    configured = settings.of(known)
    if not debug and not configured["log.file"]:
        return put(container, host, host_root, known, times)
    from hook import log

    journal, warnings = log.begin("prestart", container.id, host, configured, debug)
    try:
        said = put(container, host, host_root, known, times, journal)
    except NvhookError as error:
        journal.error(error)
        raise
    journal.warn(said)
    return warnings + said


def put(
    container: Container,
    host: int,
    host_root: str,
    known: dict[str, Any],
    times: Record | None,
    journal: Log | None = None,
) -> list[str]:
    """The same, with an inventory of the host; the log is told of it."""
    # Of no use to the runtime shim, which puts it into config.json.
    from hook import namespace

    if times is not None:
        times.at("request")
    decision, judged = decide(container, host, host_root, known)
    if journal is not None:
        journal.decision(decision)
    if judged is None:
        return decision.warnings
    if times is not None:
        times.use(judged.selection.gpus, mig_names(judged.selection))
    return apply(container, host, judged, namespace.Namespace(), decision.warnings, times, journal)


def apply(
    container: Container,
    host: int,
    judged: Judged,
    place: Namespace,
    warnings: list[str],
    times: Record | None = None,
    journal: Log | None = None,
) -> list[str]:
    """Put what was judged into a namespace; all warnings come back. Raises NvhookError, with nothing left behind."""
    from hook import steps

    if times is not None:
        times.at("plan")
    place.open(container)
    outside = place.outside(container)
    plan = make_plan(container, judged.selection, outside, judged.settings)
    place.warnings += warnings + judged.warnings + plan.warnings
    fit = judged.compatibility(plan)
    if fit is not None and fit.warning():
        place.warnings.append(fit.warning())
    if journal is not None:
        journal.judged(judged, plan, fit)
    todo = make_steps(plan, container, judged.settings)
    posix.close(outside)
    posix.umask(0)
    todo = steps.prepare(todo, host, place, times, journal)
    if times is not None:
        times.at("namespace")
    place.enter(container.root_path)
    steps.run(todo, place, times, journal)
    if journal is not None:
        journal.end(f"{judged.text()}: {len(todo)} steps done")
    return place.warnings


def mig_names(chosen: Selection) -> list[str]:
    """The MIG devices of a Selection, by UUID where that is known."""
    return [entry["uuid"] or f"MIG {entry['gpu']}/{entry['index']}" for entry in chosen.mig]


class Judged:
    """A request against a host: the Selection, a verdict on each requirement, and what is to be said of both. `last`:
    there is nobody left to ask."""

    __slots__ = ("inventory", "requirements", "selection", "settings", "wanted", "warnings")

    def __init__(
        self, inventory: dict[str, Any], wanted: Request, configured: dict[str, Any], last: bool = False
    ) -> None:
        self.inventory = inventory
        self.settings = configured
        self.wanted = wanted
        self.selection = selection.select(inventory, wanted)
        self.warnings = list(self.selection.warnings)
        enforced = configured["compat.requirements"] != "warn"
        untold = "NVML does not tell the GPUs'" if last and not enforced else ""
        self.requirements = requirements.check(
            wanted.requirements, inventory, self.selection.gpus, self.warnings, enforced, untold
        )

    def text(self) -> str:
        """What the container gets, in words."""
        gpus = ", ".join([str(gpu["index"]) for gpu in self.selection.gpus])
        return f"GPUs {gpus or 'none'} with {','.join(self.wanted.capabilities)}"

    def compatibility(self, plan: Plan) -> requirements.Compatibility | None:
        """How the image's CUDA fits the driver's, once it is known whether the image's own libcuda is used."""
        driver = self.inventory["driver"]
        return requirements.compatibility(self.wanted.image_cuda, driver, bool(plan.compat_folder))


def ask(container: Container, host: int, host_root: str) -> tuple[Decision, Judged | None]:
    """What the container asks for under this host's configuration, and what that comes to; None for no GPU."""
    return decide(container, host, host_root, store.inventory(host, host_root))


def decide(container: Container, host: int, host_root: str, known: dict[str, Any]) -> tuple[Decision, Judged | None]:
    """The same, by an inventory that is at hand."""
    decision = request.decide(container, settings.of(known))
    decision.configuration = settings.source(known)
    if decision.request is None:
        return decision, None
    return decision, judge(host, host_root, decision.request, known)


def judge(
    host: int, host_root: str, wanted: Request, known: dict[str, Any], configured: dict[str, Any] | None = None
) -> Judged:
    """The request against an inventory, or, where that does not know something that counts, against one for which
    NVML was asked; under these settings, or the configuration's. Raises NvhookError."""
    configured = configured or settings.of(known)
    asked_facts = False
    try:
        return Judged(known, wanted, configured)
    except (selection.UuidsUnknown, selection.InMigMode):
        known = store.renew(host, host_root, nvml=True)
    except requirements.FactUnknown:
        known = store.renew(host, host_root, facts=True)
        asked_facts = True
    try:
        try:
            return Judged(known, wanted, configured, asked_facts)
        except requirements.FactUnknown:
            if asked_facts:
                raise
            return Judged(store.renew(host, host_root, facts=True), wanted, configured, last=True)
    except selection.UuidsUnknown as error:
        what = f"cannot tell which GPU is {', '.join(wanted.ids or ())}: neither the kernel nor NVML tells all UUIDs"
        raise NvhookError(what, "run nvidia-smi on the host, or ask for the GPU by its index") from error
    except requirements.FactUnknown as error:
        what = f"cannot tell whether the image's requirements are met: NVML does not tell the GPUs' {error}"
        raise NvhookError(
            what, "run nvidia-smi on the host, or set NVIDIA_DISABLE_REQUIRE=1 in the container"
        ) from error


def make_plan(container: Container, chosen: Selection, base: int, configured: dict[str, Any]) -> Plan:
    """The Plan for a container whose root `base` is open on, under these settings."""
    target = layout.probe(base, container.env)
    plan = layout.layout(chosen, target)
    facts = loader.probe(base)
    has_cuda = any(library["soname"] == "libcuda.so.1" for library in chosen.libraries)
    if facts.glibc and has_cuda and configured["compat.forward-compatibility"]:
        loader.forward(plan, base, chosen.driver_version)
    folders = [target.library_folder]
    if any(library["class"] == 32 for library in chosen.libraries):
        folders.append(target.library_folder_32)
    loader.complete(plan, base, facts, folders, [mount["containerPath"] for mount in plan.mounts])
    plan.proc_access = chosen.access
    if not container.masks_proc():
        plan.proc_mask = None
    return plan


def make_steps(plan: Plan, container: Container, configured: dict[str, Any]) -> list[Step]:
    """The Plan's steps, less those that the configuration leaves to others."""
    from hook import steps

    if configured["prestart.no-devbind"]:
        plan.node_links = []
    made = steps.steps(plan, container)
    left = {"prestart.no-cgroups": steps.Rules, "prestart.no-devbind": steps.Node}
    return [step for step in made if not any(configured[key] and isinstance(step, left[key]) for key in left)]

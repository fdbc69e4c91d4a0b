# SPDX-License-Identifier: Apache-2.0
"""A container's request put into its configuration and its root, before the low-level runtime sees either.

Hot, but only where a GPU is asked for. CDI devices that the container names go through the host's CDI files; all else
is planned from the inventory as for the prestart hook: nodes, device rules and mounts into config.json, links and the
loader's files into the root. A hook is added only where something can't be done from outside, or where the mask over
/proc/driver/nvidia protects; `reasons` say which and why.
"""

from __future__ import annotations

import errno
import posix

from cdi import inject, jsontext
from cdi.host import settings, store
from hook import cdifiles, injection, lowlevel, outside, protection, request, state, steps
from ldcache import kernel, root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hook.bundle import Bundle
    from hook.injection import Judged
    from hook.log import Log
    from hook.plan import Plan
    from hook.record import Record
    from hook.step import Step
    from hook.volumes import Volumes

    Object = dict[str, Any]

# docker's --gpus, podman's hook files and NVIDIA's runtime register a prestart hook by these names.
HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit", "nvhook-prestart")
FINISH = "nvhook-create-container"
MASK = "--proc-mask"
HOOK_ENV = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
VOID = f"{request.DEVICES}=void"


class Shim:
    """One bundle's edit. `configured` is what the configuration file sets, `mode` the one in force, `crun` whether the
    runtime to come is crun, as far as its name tells."""

    __slots__ = (
        "_bundle",
        "_error",
        "_host",
        "_host_root",
        "_inventory",
        "_launcher",
        "_place",
        "_steps",
        "_times",
        "_volumes",
        "annotations",
        "config",
        "configured",
        "crun",
        "decision",
        "edits",
        "journal",
        "judged",
        "mode",
        "plan",
        "reasons",
        "settings",
        "warnings",
    )

    def __init__(
        self,
        opened: Bundle,
        host: int,
        host_root: str,
        name: str,
        identity: str | None = None,
        times: Record | None = None,
    ) -> None:
        """For `nvhook plan` neither the container's `identity` nor a record: it logs and counts nothing. Raises
        NvhookError where the configuration can't be read."""
        self._bundle = opened
        self._host = host
        self._host_root = host_root
        self._error: NvhookError | None = None
        self._inventory: Object | None = None
        self._launcher = ""
        self._place: outside.Outside | None = None
        self._steps: list[Step] = []
        self._volumes: Volumes | None = None
        self.annotations: dict[str, str] = {}
        self.config = opened.config
        self.configured: Object = {}
        self.decision: request.Decision | None = None
        # As containerEdits of CDI, with names of the host root.
        self.edits: list[Object] = []
        self.judged: Judged | None = None
        self.plan: Plan | None = None
        self.reasons: list[str] = []
        self.warnings: list[str] = []
        path = self._read_settings()
        suffix = name.partition(".")[2]
        configured = self.configured.get("runtime.mode", settings.DEFAULTS["runtime.mode"])
        mode = suffix if suffix in ("cdi", "legacy") else configured
        self.settings = settings.of_runtime(self.configured, path, mode)
        self.mode: str = "auto" if mode == "csv" else mode
        self.journal: Log | None = None
        if identity is not None and self.settings["log.file"]:
            from hook import log

            self.journal, self.warnings = log.begin("runtime", identity, host, self.settings, False)
        self._times = times
        self.crun = False

    def _read_settings(self) -> str | None:
        """The file that they are from, as far as an inventory tells."""
        try:
            known = self._inventory = store.inventory(self._host, self._host_root)
        except NvhookError as error:
            # No driver, perhaps; CDI files may be all that the container needs.
            from hook import child

            self._error = error
            self.configured = child.configuration(self._host, self._host_root)
            return None
        config = known.get("config")
        self.configured = config["values"] if config else {}
        return settings.source(known)

    def make(self, runtime: str) -> bool:
        """Make the new configuration, changing nothing. Whether there is anything to do. Raises NvhookError."""
        self.crun = runtime.rpartition("/")[2].startswith("crun")
        if self.mode == "legacy":
            return self._add_prestart_hook()
        self._at("request")
        container = self._bundle.container
        files = cdifiles.Files(self.settings, self._host_root, self.mode == "cdi")
        decision = self.decision = request.decide(container, self.settings, files)
        decision.configuration = None if self._inventory is None else settings.source(self._inventory)
        self.warnings += decision.warnings
        if self.journal is not None:
            self.journal.decision(decision)
        names = [name for name in decision.cdi if not files.devices.done(name, self.config)]
        if decision.request is None and not names:
            return False
        if names:
            found = files.devices.edits(names)
            self.edits += found
            self.config = inject.inject(self.config, found)
            self.reasons.append(f"through CDI files: {', '.join(names)}")
        asked: Object = {"cdi": decision.cdi} if decision.cdi else {}
        if decision.request is not None:
            asked = decision.request.to_json() | asked
            self._from_inventory(decision.request)
        if self._times is not None:
            self._use(names, self._times)
        self._take_over()
        self.edits.append({"env": [VOID]})
        self.config = inject.inject(self.config, [self.edits[-1]])
        self.annotations = {request.DONE: jsontext.dumps(asked)}
        self.config["annotations"] = (self.config.get("annotations") or {}) | self.annotations
        return True

    def apply(self) -> None:
        """Write what `make` made: first into the root, then the configuration. Raises NvhookError, all being as it
        was."""
        if self._launcher:
            try:
                posix.stat(self._launcher)
            except OSError as error:
                what = f"no launcher for a hook: {self._launcher}: {error.strerror}"
                raise NvhookError(what, "run `nvhook install` again") from error
        place = self._place
        if place is not None:
            steps.run(self._steps, place, self._times, self.journal)
            self.warnings += place.warnings
            if self.plan is not None:
                sources = {mount["containerPath"]: mount for mount in self.plan.mounts}
                covers = [(path, library) for path, library in place.covers.items() if library in sources]
                self._add_mounts([sources[library] | {"containerPath": path} for path, library in covers])
        self._at("configuration")
        self._bundle.config = self.config
        try:
            self._bundle.write()
        except NvhookError:
            if place is not None:
                place.undo()
            raise

    def steps(self) -> list[str]:
        """What will be done in the root, a line each."""
        return [step.describe() for step in self._steps]

    def tell(self) -> None:
        """Close the log of a start that went well, as far as this process sees it."""
        if self.journal is not None:
            self.journal.warn(self.warnings)
            for reason in self.reasons:
                self.journal.line("debug", reason)
            if self.judged is not None:
                self.journal.end(f"{self.judged.text()}: config.json written, {len(self._steps)} steps done")

    def _at(self, doing: str) -> None:
        if self._times is not None:
            self._times.at(doing)

    def _use(self, names: list[str], times: Record) -> None:
        """What the container gets, for the counters."""
        if self.judged is None:
            times.use([], names)
        else:
            times.use(self.judged.selection.gpus, injection.mig_names(self.judged.selection) + names)

    # From the inventory

    def _from_inventory(self, wanted: request.Request) -> None:
        if self._inventory is None:
            assert self._error is not None, "neither an inventory nor an error"
            self._at("inventory")
            raise self._error
        container = self._bundle.container
        check_mount_namespace(self.config)
        judged = self.judged = injection.judge(self._host, self._host_root, wanted, self._inventory, self.settings)
        self._at("plan")
        place = outside.Outside(container.root_path, self.config)
        plan = self.plan = injection.make_plan(container, judged.selection, place.base, judged.settings)
        self.warnings += judged.warnings + plan.warnings
        fit = judged.compatibility(plan)
        if fit is not None and fit.warning():
            self.warnings.append(fit.warning())
        if self.journal is not None:
            self.journal.judged(judged, plan, fit)
        mounts = self._fitting(place, plan)
        gids = self._add_nodes(plan)
        self._add_mounts(mounts)
        self.edits.append({"deviceNodes": plan.nodes, "mounts": mounts, "additionalGids": gids})
        place.missing = {mount["containerPath"] for mount in plan.mounts} - {
            mount.get("destination") for mount in self.config["mounts"]
        }
        self._finish(place, plan, judged)

    def _add_nodes(self, plan: Plan) -> list[int]:
        """The Plan's nodes, less those that the runtime would make in a volume; the groups that come with them."""
        plan.nodes = [node for node in plan.nodes if self._node_fits(node)]
        nodes = [self._from_host(node | {"hostPath": node.get("hostPath", node["path"])}) for node in plan.nodes]
        # There is no /dev to make links in before the start, so what they lead to has their names.
        targets = {node["path"]: node for node in nodes}
        links = [(link, steps.final(link["path"], {link["path"]: link["target"]})) for link in plan.node_links]
        plan.optional |= {link["path"] for link, _ in links}
        named = [targets[target] | {"path": link["path"]} for link, target in links if target in targets]
        named = [node for node in named if self._node_fits(node)]
        kept = {node["path"] for node in named}
        plan.node_links = [link for link in plan.node_links if link["path"] in kept]
        gids = [] if self.settings["features.no-additional-gids-for-device-nodes"] else groups(plan.nodes)
        self.config = inject.inject(self.config, [{"deviceNodes": nodes + named, "additionalGids": gids}])
        return gids

    def _node_fits(self, node: Object) -> bool:
        assert self._volumes is not None, "no mounts were judged"
        reason = outside.check_node(self._volumes, node, self._host)
        return self._may(node["path"], reason, outside.remedy(reason) or "see docs/errors: creating files")

    def _from_host(self, entry: Object) -> Object:
        """A node or mount with its path on this machine, where another folder stands for the host."""
        return entry | {"hostPath": f"{self._host_root.rstrip('/')}{entry['hostPath']}"}

    def _fitting(self, place: outside.Outside, plan: Plan) -> list[Object]:
        """The mounts that the runtime can make, and what it will have mounted before them."""
        given = {mount.get("destination") for mount in self.config.get("mounts") or []}
        mounts = plan.mounts
        while True:
            taken = {mount["containerPath"] for mount in mounts}
            volumes = self._volumes = outside.volumes(place, plan, self.config, taken, self._bundle.container.bundle)
            mounts = [mount for mount in mounts if self._fits(mount, volumes)]
            # Where one is left out, the container's own mount stays, and all is to be looked at again.
            if not given & (taken - {mount["containerPath"] for mount in mounts}):
                return mounts

    def _fits(self, mount: Object, volumes: Volumes) -> bool:
        """Whether the runtime can mount it."""
        remedy = "take that path out of the image"
        try:
            # An inventory's paths are free of links, and the runtime would follow one.
            source = root.stat(self._host, mount["hostPath"], follow=False)
            if root.file_type(source.st_mode) == root.S_IFLNK:
                raise kernel.error("it has become a link", errno.ELOOP)
        except OSError as error:
            reason = f"{mount['hostPath']} on the host is not what it was a moment ago: {error.strerror}"
            remedy = "the driver was changed a moment ago; start the container again"
        else:
            is_folder = root.file_type(source.st_mode) == root.S_IFDIR
            reason = outside.check_target(volumes, mount["containerPath"], is_folder)
            remedy = outside.remedy(reason) or remedy
        return self._may(mount["containerPath"], reason, remedy)

    def _may(self, path: str, reason: str, remedy: str) -> bool:
        """Whether it is done: there is no reason against it. What the GPU works without is left out with a warning."""
        if not reason:
            return True
        if path not in (self.plan.optional if self.plan else ()):
            raise NvhookError(reason, remedy)
        self.warnings.append(f"left out: {reason}")
        return False

    def _add_mounts(self, mounts: list[Object]) -> None:
        """Behind the container's own, one for each place: an earlier mount above a place would hide it."""
        places = {mount["containerPath"] for mount in mounts}
        made = [mount for mount in self.config.get("mounts") or [] if mount.get("destination") not in places]
        for mount in map(self._from_host, mounts):
            made.append(
                {
                    "destination": mount["containerPath"],
                    "type": "bind",
                    "source": mount["hostPath"],
                    "options": mount["options"],
                }
            )
        self.config = {**self.config, "mounts": made}

    def _finish(self, place: outside.Outside, plan: Plan, judged: Judged) -> None:
        """Links and the loader's files from here, or by the hook, which also makes the mask."""
        arguments: list[str] = []
        volumes = self._volumes
        assert volumes is not None, "no mounts were judged"
        self._check_profile(place, plan, volumes)
        hiding = outside.hidden(place, outside.places(plan), volumes) or volumes.unclear or "".join(volumes.met[:1])
        if hiding or place.is_read_only():
            why = f"config.json mounts something on {hiding}" if hiding else "the root is read-only on the host too"
            self.reasons.append(f"a hook makes links and the loader cache: {why}")
            arguments += finish_arguments(plan, judged.selection.driver_version)
        else:
            self.reasons.append("links and the loader cache are written into the root before the start")
            self._place, self._steps = place, outside.finish(plan, self._bundle.container)
        arguments += self._mask(plan, judged.inventory)
        if arguments:
            self._add_hook("createContainer", FINISH, arguments)

    def _mask(self, plan: Plan, inventory: Object) -> list[str]:
        """The hook's part that masks /proc/driver/nvidia but for the container's GPUs, those of CDI files among them.
        Where a file's hook masks already, that one shows ours too: of two masks only what both show is seen."""
        if plan.proc_mask is not None:
            given = protection.given(self.config, inventory)
            plan.proc_mask += [bus_id for bus_id in given if bus_id not in plan.proc_mask]
        wanted = self.settings["shim.proc-mask"]
        mask, why = protection.needed(self.config, inventory, plan.proc_mask, self.crun, wanted)
        shown = plan.proc_mask or []
        words: list[str] = []
        for gpu in inventory["gpus"]:
            if gpu["bus_id"] in shown:
                words += ["--gpu", f"{gpu['minor']}={gpu['bus_id']}"]
        if not mask:
            plan.proc_mask = None
        listed = hooks_of(self.config, "createContainer")
        masking = [hook for hook in listed if is_masking(hook)]
        if masking:
            mask, why = False, "the hook of a CDI file masks it"
            self._set_hooks("createContainer", [with_gpus(hook, words) if hook in masking else hook for hook in listed])
        self.reasons.append(f"{'a hook masks' if mask else 'no mask over'} /proc/driver/nvidia: {why}")
        return [*words, MASK] if mask else []

    def _check_profile(self, place: outside.Outside, plan: Plan, volumes: Volumes) -> None:
        """Do without EGL's profile where it would be hidden: a list with too many GPUs is no reason for a hook."""
        if not plan.profile:
            return
        from hook import profile

        hiding = outside.hidden(place, [root.split(profile.PATH)[0]], volumes)
        if hiding:
            self.warnings.append(f"left out: {profile.PATH}: config.json mounts something on {hiding}")
            plan.profile = []

    # Hooks

    def _add_hook(self, stage: str, name: str, arguments: list[str]) -> None:
        path = self._launcher = lowlevel.launcher()
        where = [] if self._host_root == "/" else ["--host-root", self._host_root]
        added = {"path": path, "args": [name, *where, *arguments], "env": HOOK_ENV}
        self.edits.append({"hooks": [{"hookName": stage, **added}]})
        self._set_hooks(stage, [*hooks_of(self.config, stage), added])

    def _set_hooks(self, stage: str, hooks: list[Any]) -> None:
        self.config = {**self.config, "hooks": {**(self.config.get("hooks") or {}), stage: hooks}}

    def _add_prestart_hook(self) -> bool:
        """Mode legacy: nothing but the hook, unless one is there."""
        self.reasons.append("the prestart hook does it: mode legacy")
        if any(is_gpu_hook(hook) for hook in hooks_of(self.config, "prestart")):
            return False
        self._add_hook("prestart", "nvhook-prestart", [])
        return True

    def _take_over(self) -> None:
        """Take the prestart hooks out that would do the same again."""
        for stage in ("prestart", "createRuntime"):
            listed = hooks_of(self.config, stage)
            left = [hook for hook in listed if not is_gpu_hook(hook)]
            if len(left) < len(listed):
                self._set_hooks(stage, left)
                self.reasons.append(f"taken over from the {stage} hook of config.json")


def check_mount_namespace(config: Object) -> None:
    """Refuse a container without a mount namespace of its own: the runtime would mount nothing, or on the host."""
    namespaces = (config.get("linux") or {}).get("namespaces") or []
    own = [namespace for namespace in namespaces if namespace.get("type") == "mount"]
    if not own or own[0].get("path"):
        what = "the container has no mount namespace of its own; its mounts would be the host's"
        raise NvhookError(what, "give it one: linux.namespaces in config.json")


def hooks_of(config: Object, stage: str) -> list[Any]:
    """The hooks of a stage. Raises NvhookError where they are no list, or `hooks` no object."""
    hooks = config.get("hooks") or {}
    listed = hooks.get(stage) or [] if isinstance(hooks, dict) else None
    if not isinstance(listed, list):
        raise NvhookError(f"config.json: `hooks` or its `{stage}` is of the wrong type", state.REPORT)
    return listed


def is_gpu_hook(hook: Any) -> bool:
    """Whether a hook's entry puts GPUs into containers: by its path, or by the name that our launcher goes by."""
    if not isinstance(hook, dict):
        return False
    arguments = hook.get("args")
    names = [hook.get("path"), *(arguments[:1] if isinstance(arguments, list) else ())]
    return any(isinstance(name, str) and name.rpartition("/")[2] in HOOKS for name in names)


def is_masking(hook: Any) -> bool:
    """Whether it is a CDI file's hook of ours that masks /proc/driver/nvidia."""
    arguments = hook.get("args") if isinstance(hook, dict) else None
    if not isinstance(arguments, list) or not all(isinstance(word, str) for word in arguments):
        return False
    return MASK in arguments and arguments[0].rpartition("/")[2] == FINISH


def with_gpus(hook: Object, words: list[str]) -> Object:
    """The hook, knowing these GPUs too; it shows those whose nodes the container has."""
    known = hook["args"]
    pairs = [words[at : at + 2] for at in range(0, len(words), 2)]
    # A file tells more of a GPU than its bus id.
    missing = [pair for pair in pairs if not any(word.partition(",")[0] == pair[1] for word in known)]
    return {**hook, "args": [*known, *(word for pair in missing for word in pair)]}


def groups(nodes: list[Object]) -> list[int]:
    """The groups of nodes that not everybody may open, as in a CDI file: a user who is not root needs them."""
    return sorted({node["gid"] for node in nodes if node["gid"] and node["fileMode"] & 0o006 != 0o006})


def finish_arguments(plan: Plan, driver: str) -> list[str]:
    """The part of the hook of CDI files that does a Plan's links, loader cache and application profile."""
    arguments = ["--driver", driver]
    for link in plan.links:
        arguments += ["--link", f"{link['target']}::{link['path']}"]
    for folder in dict.fromkeys(root.split(entry["path"])[0] for entry in plan.cache_entries) or plan.musl_folders:
        arguments += ["--folder", folder]
    if plan.profile:
        arguments.append("--application-profile")
    return arguments

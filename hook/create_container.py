# SPDX-License-Identifier: Apache-2.0
"""`nvhook create-container`: the one createContainer hook that our CDI files name.

Hot. The engine has merged the file's mounts and nodes into config.json, and the runtime has made them; what
is left is what containerEdits cannot say: links, loader-cache entries, the proc mask, EGL's application profile, what
the image requires. What the hook has to know of the host stands in its arguments, so that it opens no inventory. It
already is in the container's namespaces, its root directory still the host's. The container's root is config.json's
`root.path` in the state's `bundle` (or crun's `root`), never the working directory, which is the image itself.
"""

from __future__ import annotations

import posix

from hook import loader, namespace, state, steps
from hook.plan import Plan
from hook.start import one_line, say
from ldcache import cache, imagescan, kernel, root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hook import requirements
    from hook.log import Log
    from hook.record import Record
    from hook.state import Container
    from hook.step import Step
    from ldcache import elf

USAGE = "usage: nvhook create-container [PART]... < STATE"
LIBRARIES_MAX = 1024
# hook.selection has the same; it is too long to be read for this.
LIBRARY_OPTIONS = ("ro", "nosuid", "nodev")
NAMES_MAX = 1 << 14


class Parts:
    """What a file asks its hook to do. Without a driver's version there is neither forward compatibility nor a
    requirement.

    `compat_cuda` is the host's CUDA version where that stands for a driver's, `compat_folder` where the image has newer
    libraries, "" meaning the usual place. `gpus` has bus id, compute capability and brand by minor number, "" for what
    the file does not tell. `requirements` is `enforce`, `warn` or "". With `sonames` a link is made for each library's
    soname, and without `cache` nothing else is done about the folders. `steps` are done last; `debug` is the log on
    stderr.
    """

    __slots__ = (
        "cache",
        "compat",
        "compat_cuda",
        "compat_folder",
        "cuda",
        "debug",
        "driver",
        "folders",
        "gpus",
        "host_root",
        "links",
        "mask",
        "node_links",
        "profile",
        "requirements",
        "sonames",
        "steps",
        "unknown",
    )

    def __init__(self) -> None:
        self.cache = True
        self.compat = True
        self.compat_cuda = ""
        self.compat_folder = ""
        self.cuda = ""
        self.debug = False
        self.driver = ""
        self.folders: list[str] = []
        self.gpus: dict[int, tuple[str, str, str]] = {}
        self.host_root = "/"
        self.links: list[tuple[str, str]] = []
        self.mask = False
        self.node_links: list[tuple[str, str]] = []
        self.profile = False
        self.requirements = ""
        self.sonames = False
        self.steps: list[Step] = []
        self.unknown: list[str] = []


def main(argv: list[str]) -> int:
    """The hook. The container's state comes on stdin; a part that this version does not know is warned of."""
    parts = read_parts(argv)
    for part in parts.unknown:
        warn(f"left out what this version does not know: {part}")
    container = state.read_created()
    state.counted(
        parts.host_root, "create-container", "namespace", container, lambda times: run(container, parts, times)
    )
    return 0


def read_parts(argv: list[str]) -> Parts:
    """The arguments. Those of newer and older files may be others, so none of them is an error."""
    parts = Parts()
    for option, value in pairs(argv):
        target, separator, path = value.partition("::")
        if option == "--link" and separator and path.startswith("/"):
            parts.links.append((path, target))
        elif option == "--node-link" and target.startswith("../") and path.startswith("/dev/"):
            parts.node_links.append((path, target))
        elif option == "--folder" and value.startswith("/"):
            parts.folders.append(value.rstrip("/") or "/")
        elif option == "--driver" and value:
            parts.driver = value
        elif option == "--compat-cuda" and value:
            parts.compat_cuda = value
        elif option == "--compat-folder" and value.startswith("/"):
            parts.compat_folder = value
        elif option == "--cuda" and value:
            parts.cuda = value
        elif option == "--gpu" and read_gpu(parts, value):
            continue
        elif option == "--requirements" and value in ("enforce", "warn"):
            parts.requirements = value
        elif option == "--proc-mask" and not value:
            parts.mask = True
        elif option == "--application-profile" and not value:
            parts.profile = True
        elif option == "--no-forward-compatibility" and not value:
            parts.compat = False
        elif option == "--debug" and not value:
            parts.debug = True
        elif option == "--host-root" and value.startswith("/"):
            parts.host_root = value
        else:
            parts.unknown.append(f"{option} {value}".rstrip())
    return parts


def read_gpu(parts: Parts, value: str) -> bool:
    """`MINOR=BUS_ID,ARCH,BRAND`, the last two of which may be missing. Whether it is one."""
    minor, equals, facts = value.partition("=")
    bus_id, arch, brand = (facts.split(",", 2) + ["", ""])[:3]
    if not (equals and bus_id and "/" not in bus_id and minor.isascii() and minor.isdigit() and len(minor) < 6):
        return False
    parts.gpus[int(minor)] = (bus_id, arch, brand)
    return True


def pairs(argv: list[str]) -> list[tuple[str, str]]:
    """Options and values of `--option value --option=value`."""
    made = []
    words = argv[::-1]
    while words:
        option, equals, value = words.pop().partition("=")
        if not equals and words and not words[-1].startswith("--"):
            value = words.pop()
        made.append((option, value))
    return made


def warn(text: str) -> None:
    """One line on stderr."""
    say(f"nvhook: warning: {one_line(text)}\n")


class Made(steps.Mount):
    """A mount of config.json that the runtime has made. Where its file is needed by a second name, it is cloned anew,
    from the host's path: the root directory still is the host's."""

    __slots__ = ()

    def again(self) -> int:
        """A detached mount of the host's file."""
        host = root.open_root("/")
        try:
            # Runtimes follow a link that config.json names.
            path = root.real_path(host, self.host_path)
            return namespace.clone(host, path, self.options)
        finally:
            posix.close(host)


def sources(container: Container) -> dict[str, steps.Mount]:
    """The files of the host that config.json mounts, by container path."""
    found: dict[str, steps.Mount] = {}
    for mount in container.mounts[:LIBRARIES_MAX]:
        host, path = str(mount.get("source", "")), str(mount.get("destination", ""))
        if host.startswith("/") and path.startswith("/"):
            found[path] = Made({"hostPath": host, "containerPath": path, "options": LIBRARY_OPTIONS})
    return found


def debug_log(container: Container) -> Log:
    """For `--debug`. The configuration, which may name a file, is a part of the inventory, and that isn't read here."""
    from hook import log

    journal = log.Log("create-container", container.id)
    journal.add(log.STDERR, "debug")
    return journal


def run(container: Container, parts: Parts, times: Record | None = None) -> None:
    """Do the parts in the container whose namespaces we are in. Raises NvhookError, with nothing left behind."""
    if "mount" not in container.namespaces:
        what = "the container has no mount namespace of its own; its mounts would be the host's"
        raise NvhookError(what, "give it one: linux.namespaces in config.json")
    kernel.set_no_new_privs()
    place = namespace.Namespace()
    place.label = container.mount_label
    place.open_base(container.root_path)
    posix.umask(0)
    if not container.known:
        place.warnings.append(f"config.json is not to be read here; what is mounted below {container.root_path} counts")
    finish(container, place, parts, times)
    for warning in place.warnings:
        warn(warning)


def finish(container: Container, place: namespace.Namespace, parts: Parts, times: Record | None) -> None:
    """Judge what the image requires; then make links, cache, mask and profile. A failure takes back what was made."""
    needs_gpus = parts.mask or parts.profile or parts.requirements or times is not None
    minors = gpu_minors(place.base) if needs_gpus else []
    if times is not None:
        times.gpus = [str(minor) for minor in minors]
        times.at("plan")
    require(container, parts, minors, place.warnings)
    plan = make_plan(container, parts, minors, place.base)
    if plan.proc_mask is not None and not root.exists(place.base, steps.DRIVER_FOLDER):
        plan.proc_mask = None
    place.warnings += plan.warnings
    todo = make_steps(plan, container, parts)
    journal = debug_log(container) if parts.debug else None
    if plan.proc_mask is not None:
        host = root.open_host(parts.host_root)
        try:
            todo = steps.prepare(todo, host, place, times, journal)
        finally:
            posix.close(host)
    steps.run(todo, place, times, journal)


def make_plan(container: Container, parts: Parts, minors: list[int], base: int, host: int = -1) -> Plan:
    """What the parts come to in a container with the GPUs of these minor numbers and the root `base`. Where its mounts
    are not made yet, `host` is open on the root that their sources are below."""
    plan = Plan()
    nodes = {str(device.get("path")) for device in container.devices}
    for path, target in parts.links:
        plan.link(path, target)
    for path, target in parts.node_links:
        # A file names those of all its GPUs.
        node = steps.final(path, {path: target})
        if node in nodes or root.exists(base, node):
            plan.node_links.append({"path": path, "target": target})
    for folder in parts.folders:
        libraries(container, plan, folder, parts.sonames, base, host)
    if parts.cache:
        search(container, plan, parts, base)
    else:
        plan.cache_entries = []
    # As in a prestart hook, where something below /proc is masked.
    if parts.mask and container.masks_proc():
        plan.proc_mask = [parts.gpus[minor][0] for minor in minors if minor in parts.gpus]
    plan.profile = minors if parts.profile else []
    return plan


def make_steps(plan: Plan, container: Container, parts: Parts) -> list[Step]:
    """The Plan's steps, and those that were asked for besides."""
    return steps.steps(plan, container, sources(container) if plan.links else None) + parts.steps


def search(container: Container, plan: Plan, parts: Parts, base: int) -> None:
    """What the image's loader must be told."""
    wanted = parts.compat and (parts.driver or parts.compat_cuda)
    if not parts.folders and not wanted:
        return
    facts = loader.probe(base)
    if facts.glibc and wanted:
        loader.forward(plan, base, parts.driver, parts.compat_cuda, parts.compat_folder)
    if not parts.folders and not plan.compat_folder:
        return
    paths = [str(mount.get("destination", "")) for mount in container.mounts]
    loader.complete(plan, base, facts, parts.folders, paths)


def libraries(container: Container, plan: Plan, folder: str, sonames: bool, base: int, host: int) -> None:
    """Cache entries for the libraries that config.json mounts in a folder, and for the links to them."""
    targets = {link["path"]: link["target"] for link in plan.links}
    for mount in container.mounts[:LIBRARIES_MAX]:
        path = str(mount.get("destination", ""))
        name = path.rpartition("/")[2]
        if path[: -len(name) - 1] != folder.rstrip("/") or ".so" not in name:
            continue
        facts = imagescan.read_facts(base, path) if host < 0 else imagescan.read_facts(host, str(mount.get("source")))
        if facts is None or facts.soname is None or not known_machine(facts):
            continue
        soname = facts.soname.decode("utf-8", "surrogateescape")
        if sonames and soname != name and "/" not in soname:
            plan.link(f"{folder}/{soname}", name)
        plan.cache_entry(soname, f"{folder}/{soname}", facts.elf_class, facts.machine)
        bare = soname.partition(".so")[0] + ".so"
        leads_to = targets.get(f"{folder}/{bare}")
        if leads_to == soname or (leads_to is None and sonames and link_text(base, f"{folder}/{bare}") == soname):
            plan.cache_entry(bare, f"{folder}/{bare}", facts.elf_class, facts.machine)


def link_text(base: int, path: str) -> str:
    """What a link of the container says; "" where there is none."""
    try:
        return root.readlink(base, path)
    except OSError:
        return ""


def known_machine(facts: elf.ElfFacts) -> bool:
    """Whether the loader cache has flags for this library; a volume may hold another machine's."""
    try:
        cache.native_flags(facts.elf_class, facts.machine, facts.e_flags)
    except ValueError:
        return False
    return True


def gpu_minors(base: int) -> list[int]:
    """Minor numbers of the GPU nodes in the container's /dev; runtimes make them before createContainer hooks run."""
    found = set()
    try:
        names = root.names(base, "/dev", NAMES_MAX)
    except OSError:
        return []
    for name in names:
        digits = name[len("nvidia") :]
        if name.startswith("nvidia") and digits.isascii() and digits.isdigit():
            try:
                status = root.stat(base, f"/dev/{name}", follow=False)
            except OSError:
                continue
            if root.file_type(status.st_mode) == root.S_IFCHR:
                found.add(posix.minor(status.st_rdev))
    return sorted(found)


def require(container: Container, parts: Parts, minors: list[int], warnings: list[str]) -> list[requirements.Verdict]:
    """Hold what the image requires against the file's facts. Raises NvhookError where it is not met."""
    if not (parts.requirements and parts.driver):
        return []
    if not any(name.startswith(("NVIDIA_REQUIRE_", "CUDA_VERSION")) for name in container.env):
        return []
    # Of no use to the other containers.
    from cdi.host import settings
    from hook import request, requirements

    decision = request.Decision(container.privileged, request.is_legacy(container.env))
    wanted = request.requirements(decision, container.env, settings.DEFAULTS)
    facts: dict[str, Any] = {"driver": {"version": parts.driver, "cuda": parts.cuda or None}}
    gpus = [
        {"index": minor, "arch": parts.gpus[minor][1] or None, "brand": parts.gpus[minor][2] or None}
        for minor in minors
        if minor in parts.gpus
    ]
    enforced = parts.requirements == "enforce"
    return requirements.check(wanted, facts, gpus, warnings, enforced, "the CDI file does not tell the GPUs'")

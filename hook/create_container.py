# SPDX-License-Identifier: Apache-2.0
"""`nvhook create-container`: the one createContainer hook that our CDI files name.

Hot. The engine has merged the file's mounts and nodes into config.json, and the runtime has made them; what
is left is what containerEdits cannot say: links and loader-cache entries. The hook already is in the
container's namespaces, its root directory still the host's. The container's root is config.json's `root.path`
in the state's `bundle` (or crun's `root`), never the working directory, which is the image itself.
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
    from hook.log import Log
    from hook.state import Container
    from ldcache import elf

USAGE = (
    "usage: nvhook create-container [--driver VERSION] [--link TARGET::LINK]... [--folder FOLDER]... [--debug] < STATE"
)
LIBRARIES_MAX = 1024
# hook.selection has the same; it is too long to be read for this.
LIBRARY_OPTIONS = ("ro", "nosuid", "nodev")


def main(argv: list[str]) -> int:
    """The hook. The container's state comes on stdin; a part that this version does not know is warned of."""
    links: list[tuple[str, str]] = []
    folders: list[str] = []
    driver = ""
    debug = False
    for option, value in pairs(argv):
        target, separator, path = value.partition("::")
        if option == "--link" and separator and path.startswith("/"):
            links.append((path, target))
        elif option == "--folder" and value.startswith("/"):
            folders.append(value.rstrip("/") or "/")
        elif option == "--driver" and value:
            driver = value
        elif option == "--debug" and not value:
            debug = True
        else:
            warn(f"left out what this version does not know: {option} {value}")
    container = state.read_container()
    if "mount" not in container.namespaces:
        what = "the container has no mount namespace of its own; its mounts would be the host's"
        raise NvhookError(what, "give it one: linux.namespaces in config.json")
    kernel.set_no_new_privs()
    place = namespace.Namespace()
    place.label = container.mount_label
    place.open_base(container.root_path)
    posix.umask(0)
    finish(container, place, links, folders, driver, debug_log(container) if debug else None)
    for warning in place.warnings:
        warn(warning)
    return 0


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


def finish(
    container: Container,
    place: namespace.Namespace,
    links: list[tuple[str, str]],
    folders: list[str],
    driver: str,
    journal: Log | None = None,
) -> None:
    """Make the links and merge the cache; a failure takes back what was made. Without a driver's version there is no
    forward compatibility."""
    plan = Plan()
    for path, target in links:
        plan.link(path, target)
    for folder in folders:
        libraries(container, place, plan, folder)
    if folders:
        facts = loader.probe(place.base)
        if facts.glibc and driver:
            loader.forward(plan, place.base, driver)
        paths = [str(mount.get("destination", "")) for mount in container.mounts]
        loader.complete(plan, place.base, facts, folders, paths)
    place.warnings += plan.warnings
    steps.run(steps.steps(plan, container, sources(container) if links else None), place, journal)


def libraries(container: Container, place: namespace.Namespace, plan: Plan, folder: str) -> None:
    """Cache entries for the libraries that config.json mounts in a folder, and for the links to them."""
    targets = {link["path"]: link["target"] for link in plan.links}
    for mount in container.mounts[:LIBRARIES_MAX]:
        path = str(mount.get("destination", ""))
        if not path.startswith(folder + "/") or ".so" not in path.rpartition("/")[2]:
            continue
        facts = imagescan.read_facts(place.base, path)
        if facts is None or facts.soname is None or not known_machine(facts):
            continue
        soname = facts.soname.decode("utf-8", "surrogateescape")
        plan.cache_entry(soname, f"{folder}/{soname}", facts.elf_class, facts.machine)
        bare = soname.partition(".so")[0] + ".so"
        if targets.get(f"{folder}/{bare}") == soname:
            plan.cache_entry(bare, f"{folder}/{bare}", facts.elf_class, facts.machine)


def known_machine(facts: elf.ElfFacts) -> bool:
    """Whether the loader cache has flags for this library; a volume may hold another machine's."""
    try:
        cache.native_flags(facts.elf_class, facts.machine, facts.e_flags)
    except ValueError:
        return False
    return True

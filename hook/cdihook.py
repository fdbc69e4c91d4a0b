# SPDX-License-Identifier: Apache-2.0
"""`nvidia-cdi-hook`: the verbs that CDI files of NVIDIA's toolkit and device plugin name, done by nvhook's own code.

Hot. Files of toolkit 1.14 to 1.20 start several such hooks one after the other; each does its part and knows nothing
of the others, but for forward compatibility: what `enable-cuda-compat` is told, `update-ldcache` reads in config.json,
since the cache is written there. A verb of another version is warned of and left out, as NVIDIA's does: a file must
not keep containers from starting because a hook has a new name.
"""

from __future__ import annotations

import posix

from hook import create_container, state
from hook.create_container import Parts, pairs, warn
from hook.start import say
from hook.step import Step
from ldcache import VERSION, root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hook.namespace import Namespace
    from hook.state import Container

DEBUG = ("--debug", "--d")
SWITCHES = (*DEBUG, "--quiet", "--q")
ASKED = ("help", "--help", "--h", "--version", "--v")
COMPAT = ("enable-cuda-compat", "cudacompat")
VERBS = {
    "create-symlinks": ("--link",),
    "create-soname-symlinks": ("--folder",),
    "update-ldcache": ("--folder", "--ldconfig-path"),
    **dict.fromkeys(COMPAT, ("--host-driver-version", "--host-cuda-version", "--cuda-compat-container-root")),
    "disable-device-node-modification": (),
    "update-application-profile": (),
    "chmod": ("--mode", "--path"),
}
USAGE = f"usage: nvidia-cdi-hook [--debug] VERB [OPTION VALUE]... < STATE; verbs: {', '.join(VERBS)}"
PROGRAMS = ("nvidia-cdi-hook", "nvidia-ctk")
LINK_REMEDY = "write --link TARGET::LINK, as the CDI file that `cdi generate` writes"


def main(argv: list[str]) -> int:
    """The hook. The container's state comes on stdin, or from the file that --container-spec names. What a person asks,
    and a call without a verb, is no failure either: a CDI file may hold it."""
    words = list(argv)
    debug = any(long(word).partition("=")[0] in DEBUG for word in words)
    while words and long(words[0]).partition("=")[0] in SWITCHES:
        del words[0]
    verb = words[0] if words else ""
    if verb == "noop":
        return 0
    if long(verb) in ASKED:
        print(f"nvhook {VERSION}" if "v" in verb else USAGE)
        return 0
    if not verb:
        say(f"{USAGE}\n")
        return 0
    if verb not in VERBS:
        warn(f"nvidia-cdi-hook: {verb!a} is no hook that this version knows; nothing is done")
        return 0
    values = options(verb, words[1:])
    run(verb, values, container_of(values.get("--container-spec", [])), debug)
    return 0


def long(word: str) -> str:
    """An option with two dashes; NVIDIA's command takes one as well."""
    return f"-{word}" if word.startswith("-") and not word.startswith("--") else word


def options(verb: str, words: list[str]) -> dict[str, list[str]]:
    """The values of a verb's options, those between commas one by one as NVIDIA's command takes them."""
    found: dict[str, list[str]] = {}
    words = [word for word in map(long, words) if word.partition("=")[0] not in SWITCHES]
    for option, value in pairs(words):
        if option in VERBS[verb] or option == "--container-spec":
            found.setdefault(option, []).extend(item for item in value.split(",") if item)
        else:
            warn(f"nvidia-cdi-hook {verb}: left out what this version does not know: {option} {value}".rstrip())
    return found


def container_of(files: list[str]) -> Container:
    """The container, by its state on stdin or in a file."""
    if not files or files[-1] == "-":
        return state.read_created()
    try:
        fd = posix.open(files[-1], posix.O_RDONLY | posix.O_CLOEXEC | posix.O_NONBLOCK | posix.O_NOCTTY)
    except OSError as error:
        what = f"cannot open {files[-1]}: {error.strerror}"
        raise NvhookError(what, "let --container-spec name a file with the container's state") from error
    return state.read_created(fd)


def run(verb: str, values: dict[str, list[str]], container: Container, debug: bool) -> None:
    """One verb. Raises NvhookError."""
    parts = Parts()
    parts.debug = debug
    if verb == "create-symlinks":
        parts.links = [link(word) for word in dict.fromkeys(values.get("--link", []))]
    elif verb in ("update-ldcache", "create-soname-symlinks"):
        parts.folders = [absolute(folder) for folder in dict.fromkeys(values.get("--folder", []))]
        parts.sonames = True
        parts.cache = verb == "update-ldcache"
        if parts.cache:
            compatibility(parts, peer_values(container))
    elif verb in COMPAT:
        if any(words[:1] == ["update-ldcache"] for words in peers(container)):
            return
        compatibility(parts, values)
    elif verb == "update-application-profile":
        parts.profile = True
    elif verb == "chmod":
        parts.steps.append(Mode(mode(values), [absolute(path) for path in values.get("--path", [])]))
    else:
        from hook import params

        parts.steps.append(params.Params())
    create_container.run(container, parts)


def link(word: str) -> tuple[str, str]:
    """Place and target of `TARGET::LINK`."""
    target, separator, place = word.partition("::")
    if not separator or not target or not place or "::" in place:
        raise NvhookError(f"nvidia-cdi-hook create-symlinks: {word[:200]!a} is no link", LINK_REMEDY)
    return absolute(place), target


def absolute(path: str) -> str:
    """A path of the container, which NVIDIA's command takes relative to its root as well."""
    return "/" + path.strip("/")


def mode(values: dict[str, list[str]]) -> int:
    """The mode that `chmod` sets."""
    text = (values.get("--mode") or [""])[-1]
    try:
        found = int(text, 8)
    except ValueError:
        found = -1
    if not 0 <= found <= 0o7777:
        raise NvhookError(f"nvidia-cdi-hook chmod: {text!a} is no mode", "write --mode in octal, as in 755")
    return found


def peers(container: Container) -> list[list[str]]:
    """The words behind the program's name of each hook of NVIDIA's that config.json starts."""
    found = []
    for words in container.create_hooks:
        if words and words[0].rpartition("/")[2] in PROGRAMS:
            found.append(words[2:] if words[1:2] == ["hook"] else words[1:])
    return found


def peer_values(container: Container) -> dict[str, list[str]]:
    """What `enable-cuda-compat` is told, nothing where there is no such hook."""
    told: dict[str, list[str]] = {}
    for words in peers(container):
        if words[:1] and words[0] in COMPAT:
            for option, value in pairs([*map(long, words[1:])]):
                told.setdefault(option, []).append(value)
            break
    return told


def compatibility(parts: Parts, values: dict[str, list[str]]) -> None:
    """What forward compatibility is judged by."""
    driver, cuda, folder = ((values.get(option) or [""])[-1] for option in VERBS[COMPAT[0]])
    parts.driver, parts.compat_cuda = driver, cuda
    parts.compat_folder = absolute(folder) if folder else ""


class Mode(Step):
    """Access modes of the container's own files. A file of another's, in a volume or a node of the host's, stays as it
    is, and so does what is not there: it is a repair for old versions of crun."""

    __slots__ = ("mode", "paths")

    def __init__(self, wanted: int, paths: list[str]) -> None:
        self.mode = wanted
        self.paths = paths

    def describe(self) -> str:
        return f"mode {self.mode:o} of {' '.join(self.paths)}"

    def execute(self, namespace: Namespace) -> None:
        for path in self.paths:
            try:
                fd = root.open_path(namespace.base, path)
            except OSError:
                continue
            try:
                self._set(namespace, fd)
            except (NvhookError, OSError) as error:
                reason = error.what if isinstance(error, NvhookError) else error.strerror
                namespace.warnings.append(f"the mode of {path} stays as it is: {reason}")
            finally:
                posix.close(fd)

    def _set(self, namespace: Namespace, fd: int) -> None:
        if posix.fstat(fd).st_mode & 0o7777 != self.mode:
            namespace.may_create(fd)
            posix.chmod(f"/proc/self/fd/{fd}", self.mode)

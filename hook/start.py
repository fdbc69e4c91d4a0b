# SPDX-License-Identifier: Apache-2.0
"""Where the launcher's entry script begins: one verb, one import.

Hot. The verb is argv[1]; an import costs more than all the rest of a start, so each is made only for its verb. An
installation has the code of all hot modules in one file beside the entry, written by hook.codefile.
"""

from __future__ import annotations

import gc
import marshal
import posix
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class Code:
    """A finder and loader (sys.meta_path) of modules whose code objects are at hand: name → (is a package, its file,
    marshalled code). Forty files less to look for and to open."""

    __slots__ = ("make_spec", "modules")

    def __init__(self, modules: dict[str, tuple[bool, str, bytes]]) -> None:
        self.modules = modules
        self.make_spec: Any = type(sys.__spec__)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """A spec as importlib wants it; None for what is looked for elsewhere."""
        found = self.modules.get(name)
        if found is None:
            return None
        package, file, _ = found
        spec: ModuleSpec = self.make_spec(name, self, origin=file, is_package=package)
        if package:
            spec.submodule_search_locations = [file.rpartition("/")[0]]
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """The ordinary kind."""

    def exec_module(self, module: ModuleType) -> None:
        """Run a module's code."""
        exec(marshal.loads(self.modules[module.__name__][2]), module.__dict__)


def use_code(folder: str) -> None:
    """Take the modules from the file in the entry's folder. One of another Python, or none, is no error: the modules'
    own files are there too."""
    try:
        fd = posix.open(f"{folder}/hot.{sys.implementation.cache_tag}", posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return
    content = posix.read(fd, posix.fstat(fd).st_size)
    posix.close(fd)
    magic: bytes = sys.modules["_frozen_importlib_external"].MAGIC_NUMBER
    if content.startswith(magic):
        sys.meta_path.insert(0, Code(marshal.loads(content[len(magic) :])))


def main() -> None:
    """Run the verb and leave by _exit, past the interpreter's clean-up (1 ms)."""
    # A process of milliseconds, whose inputs are bounded: the collector would only walk what is all in use (0.7 ms).
    gc.disable()
    use_code(sys.argv[0].rpartition("/")[0])
    from ldcache.errors import NvhookError

    try:
        status = dispatch(sys.argv[1:])
    except NvhookError as error:
        say(f"nvhook: error: {one_line(error.what)}\n  remedy: {one_line(error.remedy)}\n")
        status = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            pass
    posix._exit(status)


def open_streams() -> None:
    """Python has None for a stream whose descriptor was closed before it started."""
    if sys.stdout is None:
        sys.stdout = open("/dev/null", "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open("/dev/null", "w", encoding="utf-8")


def say(text: str) -> None:
    """Write on stderr. Where nobody can read it, a full disk or a closed pipe, the exit status has to do."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        pass


def one_line(text: str) -> str:
    """A message in which an image's names may stand: a newline in one would forge a line of ours in an engine's log, an
    escape sequence do as it likes on a terminal."""
    if text.isprintable():
        return text
    return "".join([letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text])


def dispatch(argv: list[str]) -> int:
    """The exit status of one verb: 0 done, 1 failed, 2 usage, 3 stale or unhealthy."""
    open_streams()
    verb = argv[0] if argv else ""
    if verb == "runtime":
        from hook import runtime

        return runtime.main(argv[1:])
    if verb == "prestart":
        from hook import prestart

        return prestart.main(argv[1:])
    if verb == "create-container":
        from hook import create_container

        return create_container.main(argv[1:])
    if verb == "nvidia-cdi-hook" or argv[:2] == ["nvidia-ctk", "hook"]:
        from hook import cdihook

        return cdihook.main(argv[1:] if verb == "nvidia-cdi-hook" else argv[2:])
    if verb in ("nvidia-container-runtime-hook", "nvidia-container-toolkit"):
        from hook import runtimehook

        return runtimehook.main(argv[1:])
    if verb in ("poststart", "poststop"):
        return 0
    say(f"nvhook: error: {verb!a} is no hook\n  remedy: use prestart or create-container\n")
    return 2

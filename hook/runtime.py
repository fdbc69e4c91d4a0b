# SPDX-License-Identifier: Apache-2.0
"""`nvhook-runtime`: a runtime that wraps runc or crun. It edits a container's configuration and becomes that runtime.

Hot. The launcher passes most verbs on by itself; `create` and `run` come here, and all else that it can't tell. A
container that asks for no GPU costs a look at its configuration. This process becomes the runtime, so it never sets
no_new_privs and leaves descriptors, signals, terminal and environment as they were.
"""

from __future__ import annotations

import posix

from hook import arguments, lowlevel, runtimelog
from ldcache import root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hook.arguments import Arguments


def main(argv: list[str]) -> int:
    """`NAME DESCRIPTOR:SIGNALS WORD…`, from the launcher. Comes back only with an error's exit status."""
    name, handed, *words = argv
    caller = lowlevel.receive(handed)
    given = arguments.Arguments()
    try:
        given = arguments.parse(words)
        host = root.open_host(given.host_root)
        path = edit(given, host, name) if given.edits() else None
        lowlevel.become(path or lowlevel.choose(host, given.host_root, name), given.words, caller)
    except NvhookError as error:
        runtimelog.write(given, "error", f"nvhook: error: {error.what}; remedy: {error.remedy}")
        raise
    return 1


def state_folder(given: Arguments, runtime: str) -> str:
    """Where the runtime will keep the container's state until it deletes it. The defaults are those of root's runc
    (1.0 to 1.4) and crun (1.8 to 1.24)."""
    folder = given.root or f"/run/{'crun' if runtime.rpartition('/')[2].startswith('crun') else 'runc'}"
    return f"{folder if folder.startswith('/') else f'{posix.getcwd()}/{folder}'}/{given.identity}"


def edit(given: Arguments, host: int, name: str) -> str | None:
    """Put the GPU that the container asks for into its configuration. The low-level runtime comes back where the
    configuration file had to be known, else None. Raises NvhookError."""
    from hook import bundle, request, state

    opened = bundle.Bundle(given.bundle or ".", given.config)
    container = opened.container
    if request.DONE in container.annotations:
        return None
    if not request.possible(container, given.host_root) and not request.names_cdi(container.annotations):
        return None
    # Most of all that is imported, and of no use to containers without a GPU.
    from hook import shim

    times = state.start_record(given.host_root, "runtime", "inventory", given.identity)
    made: shim.Shim | None = None
    try:
        made = shim.Shim(opened, host, given.host_root, name, given.identity, times)
        runtime = lowlevel.choose(host, given.host_root, name, made.configured)
        before = posix.umask(0)
        try:
            if made.make(runtime):
                made.apply()
        finally:
            posix.umask(before)
    except NvhookError as error:
        if times is not None:
            times.end(error)
        if made is not None and made.journal is not None:
            made.journal.error(error)
        raise
    made.tell()
    if times is not None:
        times.place = state_folder(given, runtime)
        times.end()
    for warning in made.warnings:
        runtimelog.warn(given, warning)
    for reason in made.reasons if given.debug else ():
        runtimelog.write(given, "debug", f"nvhook: {reason}")
    return runtime

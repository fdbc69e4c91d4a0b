# SPDX-License-Identifier: Apache-2.0
"""`nvhook prestart`: the OCI prestart hook, which puts the GPU into a container that exists but does not run.

Hot. In order: whether the container may ask for a GPU at all; the host's inventory, with the configuration; the
container's request; a Selection; the Plan, whole; everything that
must be taken from the host's namespaces; then the container's namespace and the Plan's steps. A failure
anywhere takes all of it back and exits 1.
"""

from __future__ import annotations

from hook import request, state
from hook.start import one_line, say
from ldcache import kernel

USAGE = "usage: nvhook prestart [--host-root DIR] [--debug] < STATE"


def main(argv: list[str]) -> int:
    """The hook. The container's state comes on stdin."""
    given = options(argv)
    if given is None:
        say(f"{USAGE}\n")
        return 2
    host_root, debug = given
    container = state.read_container()
    if not request.possible(container, host_root):
        return 0
    # Half of all that is imported, and of no use to the containers that ask for no GPU.
    from hook import injection

    kernel.set_no_new_privs()
    for warning in injection.inject(container, host_root, debug):
        say(f"nvhook: warning: {one_line(warning)}\n")
    return 0


def options(argv: list[str]) -> tuple[str, bool] | None:
    """The host root that the arguments name, `/` if none, and whether to tell all on stderr; None for a usage error."""
    host_root, debug = "/", False
    words = argv[::-1]
    while words:
        word = words.pop()
        if word == "--debug":
            debug = True
        elif word == "--host-root" and words:
            host_root = words.pop()
        elif word.startswith("--host-root="):
            host_root = word.partition("=")[2]
        else:
            return None
    return host_root, debug

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

USAGE = "usage: nvhook prestart [--host-root DIR] < STATE"


def main(argv: list[str]) -> int:
    """The hook. The container's state comes on stdin."""
    host_root = options(argv)
    if host_root is None:
        say(f"{USAGE}\n")
        return 2
    container = state.read_container()
    if not request.possible(container, host_root):
        return 0
    # Half of all that is imported, and of no use to the containers that ask for no GPU.
    from hook import injection

    kernel.set_no_new_privs()
    for warning in injection.inject(container, host_root):
        say(f"nvhook: warning: {one_line(warning)}\n")
    return 0


def options(argv: list[str]) -> str | None:
    """The host root that the arguments name, `/` if none; None for a usage error."""
    if not argv:
        return "/"
    if len(argv) == 2 and argv[0] == "--host-root":
        return argv[1]
    if len(argv) == 1 and argv[0].startswith("--host-root="):
        return argv[0].partition("=")[2]
    return None

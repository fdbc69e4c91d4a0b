# SPDX-License-Identifier: Apache-2.0
"""A prestart hook for one test: fails nvhook before, between and after all of its steps, one after the other.

Arguments: the installed library folder, the host root, the report to write. For each place a child process
does what `nvhook prestart` does, with a step in that place which fails; the parent compares what the container
looked like before and after. Exits 0, so that the container starts and the next comparison can be made too.
"""

from __future__ import annotations

import json
import os
import sys

sys.path.insert(0, sys.argv[1])

from hook import injection, namespace, state, steps  # noqa: E402
from hook.step import Step  # noqa: E402
from ldcache import root  # noqa: E402
from ldcache.errors import NvhookError  # noqa: E402


class Failing(Step):
    """The step that fails."""

    def describe(self) -> str:
        return "injected failure"

    def execute(self, namespace: namespace.Namespace) -> None:
        raise NvhookError("injected failure", "none")


def main() -> None:
    """The hook."""
    host_root, report = sys.argv[2:4]
    container = state.read_container()
    _, judged = injection.ask(container, root.open_host(host_root), host_root)
    assert judged is not None
    results = []
    place = 0
    while True:
        before = look(container)
        step, message = in_child(container, judged, host_root, place)
        if step is None:
            break
        after = look(container)
        differences = sorted(name for name in before | after if before.get(name) != after.get(name))
        results.append({"step": step, "message": message, "differences": differences})
        place += 1
    with open(report, "w", encoding="utf-8") as file:
        json.dump(results, file)


def in_child(
    container: state.Container, judged: injection.Judged, host_root: str, place: int
) -> tuple[str | None, str]:
    """The step that the failure came before, None past the end, and the error's text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        answer: tuple[str | None, str] = (None, "")
        try:
            answer = attempt(container, judged, host_root, place)
        finally:
            os.write(writing, json.dumps(answer).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        step, message = json.load(file)
    os.waitpid(child, 0)
    return step, message


def attempt(container: state.Container, judged: injection.Judged, host_root: str, place: int) -> tuple[str | None, str]:
    """As injection.inject, with one more step."""
    host = root.open_host(host_root)
    where = namespace.Namespace()
    where.open(container)
    outside = where.outside(container)
    plan = injection.make_plan(container, judged.selection, outside, judged.settings)
    todo = steps.steps(plan, container)
    if place > len(todo):
        return None, ""
    name = todo[place].describe() if place < len(todo) else "the end"
    todo.insert(place, Failing())
    os.umask(0)
    todo = steps.prepare(todo, host, where)
    where.enter(container.root_path)
    try:
        steps.run(todo, where)
    except NvhookError as error:
        return name, error.what
    return name, "did not fail"


def look(container: state.Container) -> dict[str, str]:
    """Everything that could be left behind: mounts, paths in the root, device rules."""
    seen = {}
    with open(f"/proc/{container.pid}/mountinfo", encoding="utf-8") as file:
        for line in file:
            # Ids and peer groups differ from mount to mount; path and source don't.
            words = line.split()
            seen[f"mount {words[4]} {words[3]}"] = words[5]
    top = f"/proc/{container.pid}/root{container.root_path}"
    for folder, folders, files in os.walk(top):
        if folder.startswith((f"{top}/proc", f"{top}/sys")):
            folders.clear()
            continue
        for name in folders + files:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            text = os.readlink(path) if os.path.islink(path) else ""
            size = 0 if os.path.isdir(path) else status.st_size
            seen[path] = f"{status.st_mode:o} {status.st_rdev} {size} {text}"
    seen["rules"] = rules(container.pid)
    return seen


def rules(pid: int) -> str:
    """v1: the list. v2: whether an NVIDIA device can be opened is not to be read, so the attached programs' ids."""
    with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
        paths = {words[1]: words[2] for line in file if (words := line.rstrip("\n").split(":", 2))}
    if os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
        return programs(f"/sys/fs/cgroup{paths['']}")
    with open(f"/sys/fs/cgroup/devices{paths['devices']}/devices.list", encoding="utf-8") as listing:
        return listing.read()


def programs(folder: str) -> str:
    """The ids of the device filters attached to a cgroup v2 folder."""
    import struct

    from ldcache import kernel

    fd = os.open(folder, os.O_RDONLY)
    memory, address = kernel.buffer(4 * 64)
    attributes = struct.pack("=IIIIQI", fd, 6, 0, 0, address, 64)
    _, answer = kernel.bpf(16, attributes.ljust(64, b"\0"))
    count = struct.unpack_from("=I", answer, 24)[0]
    ids = struct.unpack(f"={count}I", kernel.contents(memory, 4 * count))
    os.close(fd)
    return " ".join(map(str, ids))


if __name__ == "__main__":
    main()

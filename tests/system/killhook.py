# SPDX-License-Identifier: Apache-2.0
"""A prestart hook for one test: does what `nvhook prestart` does, and is killed before one of its steps.

Arguments: the installed library folder, the host root, the number of the step.
"""

from __future__ import annotations

import os
import signal
import sys

sys.path.insert(0, sys.argv[1])

from hook import injection, namespace, state, steps  # noqa: E402
from hook.step import Step  # noqa: E402
from ldcache import root  # noqa: E402


class Killed(Step):
    """The step that the hook does not survive."""

    def describe(self) -> str:
        return "SIGKILL"

    def execute(self, namespace: namespace.Namespace) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """The hook."""
    host_root, place = sys.argv[2], int(sys.argv[3])
    container = state.read_container()
    host = root.open_host(host_root)
    _, judged = injection.ask(container, host, host_root)
    assert judged is not None
    where = namespace.Namespace()
    where.open(container)
    outside = where.outside(container)
    plan = injection.make_plan(container, judged.selection, outside, judged.settings)
    todo = steps.steps(plan, container)
    if place <= len(todo):
        todo.insert(place, Killed())
    os.umask(0)
    for step in todo:
        step.prepare(host, where)
    where.enter(container.root_path)
    steps.run(todo, where)


if __name__ == "__main__":
    main()

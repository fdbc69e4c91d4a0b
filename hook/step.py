# SPDX-License-Identifier: Apache-2.0
"""A step of putting a Plan into a container: what all of them have in common.

Hot. A step describes itself, takes what it needs of the host, then acts in the container's namespace. It looks
before it acts: done already, it does nothing. Inverses are remembered by the Namespace.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hook.namespace import Namespace


class Step:
    """One thing to do. `prepare` runs before the namespace is entered, `execute` after. One that is `optional` may
    fail: it is taken back alone, and `makes` is then missing."""

    __slots__ = ()

    optional = False
    makes = ""

    def describe(self) -> str:
        """One line for `nvhook plan`."""
        raise NotImplementedError

    def prepare(self, host: int, namespace: Namespace) -> None:
        """Take what is needed of the host, which is out of reach later."""

    def execute(self, namespace: Namespace) -> None:
        """Do it. Raises NvhookError or OSError; what was done so far is remembered for undo."""
        raise NotImplementedError

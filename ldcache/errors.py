# SPDX-License-Identifier: Apache-2.0
"""The one error that a person is meant to read.

Hot: imported on every container start, so it stands on nothing.
"""

from __future__ import annotations


class NvhookError(Exception):
    """A failure in two lines: what happened, and what to do about it.

    `what` stands alone (runc shows only the hook's first line): what we did, on which path or device,
    and what the kernel or the driver said. `remedy` is one line too. `reason` is a word by which a failed start is
    counted, where what was being done is too coarse.
    """

    __slots__ = ("remedy", "what")

    reason = ""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

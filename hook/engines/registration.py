# SPDX-License-Identifier: Apache-2.0
"""What is to be registered with an engine, and which engines there are."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hook.engines.settings import Edit

RUNTIME = "nvhook-runtime"
HOOK = "nvhook-prestart"


@dataclass(frozen=True)
class Registration:
    """A runtime's name and absolute path; whether it is to be the default, whether CDI is to be on, and the hook's
    path where that is to run for every container. `config` is the engine's file where it is not the usual one.
    `removing`: it is to be taken out."""

    name: str
    runtime: str
    set_default: bool = False
    cdi: bool = False
    hook: str | None = None
    config: str | None = None
    removing: bool = False

    def is_ours(self, program: Any) -> bool:
        """Whether an entry's program is the runtime. One that is taken out may have been installed elsewhere."""
        named = self.removing and isinstance(program, str) and os.path.basename(program) == RUNTIME
        return named or program == self.runtime


@dataclass
class Plan:
    """What an engine needs: edits of its files in the order of writing, what to tell, how it reads them again.

    `reload` is enough where nothing about CDI changed. `lowlevel` is the runtime that the engine used so far, by its
    absolute path, where its files name one. `foreign` says what other files have under our names, which nvhook does
    not change; `shadowed` likewise, where ours overrules it.
    """

    edits: list[Edit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    shadowed: list[str] = field(default_factory=list)
    restart: str = ""
    reload: str = ""
    lowlevel: str | None = None


def other_path(wanted: Registration, *keys: str) -> Callable[[Any], str | None]:
    """A Setting's `conflict`: that the entry that is there has another program than ours under these keys."""

    def conflict(there: Any) -> str | None:
        found = there
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        if wanted.is_ours(found):
            return None
        return f"is the runtime {found}" if found else "is another runtime"

    return conflict

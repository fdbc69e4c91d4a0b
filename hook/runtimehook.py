# SPDX-License-Identifier: Apache-2.0
"""`nvidia-container-runtime-hook`, also called `nvidia-container-toolkit`: the prestart hook by the names that
`docker run --gpus` looks for and that bundles on disk have.

Hot. The command line is Go's flag package's: options come before the verb, by one dash or two.
"""

from __future__ import annotations

from cdi import VERSION
from cdi.host import settings
from hook import prestart
from hook.start import say
from ldcache.errors import NvhookError

USAGE = "usage: nvidia-container-runtime-hook [-config FILE] [-debug] [-version] prestart|poststart|poststop"


def main(argv: list[str]) -> int:
    """The hook. Behind `prestart` come nvhook's own arguments."""
    words = list(argv)
    debug: list[str] = []
    while words and words[0].startswith("-"):
        option, equals, value = words.pop(0).partition("=")
        name = option[1:].removeprefix("-")
        if name == "version":
            print(f"nvhook {VERSION}")
            return 0
        if name == "config" and (equals or words):
            refuse_other_file(value if equals else words.pop(0))
        elif name == "debug":
            debug = ["--debug"] if value != "false" else []
        else:
            return usage()
    if not words:
        return usage()
    if words[0] == "prestart":
        return prestart.main([*debug, *words[1:]])
    return 0 if words[0] in ("poststart", "poststop") else usage()


def refuse_other_file(path: str) -> None:
    """The configuration is a part of the inventory, which is the whole host's; a file of one hook's can't be.

    A start that went on without the file's restrictions might give what it forbids. Raises NvhookError.
    """
    if path not in (settings.OURS, settings.NVIDIAS):
        what = f"the hook is registered with -config {path}, which nvhook does not read"
        raise NvhookError(what, f"put the settings into {settings.OURS} or {settings.NVIDIAS}, and drop the option")


def usage() -> int:
    """The status of wrong use."""
    say(f"{USAGE}\n")
    return 2

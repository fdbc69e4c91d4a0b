# SPDX-License-Identifier: Apache-2.0
"""What a container asks for: GPUs and driver capabilities, from its environment.

Hot. The variables and their meaning are those that images for NVIDIA's hook carry.
"""

from __future__ import annotations

from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DEVICES = "NVIDIA_VISIBLE_DEVICES"
CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"

ALL_CAPABILITIES = ("compat32", "compute", "display", "graphics", "ngx", "utility", "video")
DEFAULT_CAPABILITIES = ("compute", "utility")


class Request:
    """GPUs and capabilities. `ids` is None for all GPUs; empty for the driver's files without a GPU.

    `required` are the capabilities that must work or the start fails. `all` does not ask for a display on a
    host that has none: images say `all` and mean what there is.
    """

    __slots__ = ("capabilities", "ids", "required")

    def __init__(
        self, ids: tuple[str, ...] | None, capabilities: tuple[str, ...], required: tuple[str, ...] | None = None
    ) -> None:
        self.ids = ids
        self.capabilities = capabilities
        self.required = capabilities if required is None else required

    def to_json(self) -> dict[str, Any]:
        """As `nvhook plan` prints it."""
        devices = "all" if self.ids is None else list(self.ids)
        return {"devices": devices, "capabilities": list(self.capabilities)}


def read(env: dict[str, str]) -> Request | None:
    """The request in an environment, or None where no GPU is asked for.

    None: the variable is unset, empty, or contains `void`. Else the first of `all` and `none` decides; else
    the items are ids, each once. Raises NvhookError for an unknown capability.
    """
    items = split(env.get(DEVICES, ""))
    if not items or "void" in items:
        return None
    capabilities = read_capabilities(env)
    named = split(env.get(CAPABILITIES, ""))
    if "all" in named:
        return Request(_ids(items), capabilities, tuple(x for x in capabilities if x != "display" or x in named))
    return Request(_ids(items), capabilities)


def _ids(items: list[str]) -> tuple[str, ...] | None:
    for item in items:
        if item == "all":
            return None
        if item == "none":
            return ()
    return tuple(dict.fromkeys(items))


def split(text: str) -> list[str]:
    """Items between commas, blanks around them dropped, empty ones too."""
    return [item for part in text.split(",") if (item := part.strip())]


def read_capabilities(env: dict[str, str]) -> tuple[str, ...]:
    """Sorted capability names; `compute,utility` where the image names none."""
    items = split(env.get(CAPABILITIES, ""))
    if not items:
        return DEFAULT_CAPABILITIES
    unknown = [item for item in items if item not in ALL_CAPABILITIES and item != "all"]
    if unknown:
        names = ascii(", ".join(unknown))[1:-1]
        what = f"unknown driver capabilities in {CAPABILITIES}: {names if len(names) <= 200 else names[:197] + '...'}"
        raise NvhookError(what, f"use `all` or some of {', '.join(ALL_CAPABILITIES)}")
    return ALL_CAPABILITIES if "all" in items else tuple(sorted(set(items)))

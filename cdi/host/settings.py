# SPDX-License-Identifier: Apache-2.0
"""The configuration as hot code has it: flat names with values, read and judged by `cdi.host.config` at a renewal.

Hot. Reading TOML takes longer than all the rest of a start, so the inventory carries the result: member `config`.
"""

from __future__ import annotations

import posix

from ldcache import root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

OURS = "/etc/nvhook/config.toml"
NVIDIAS = "/etc/nvidia-container-runtime/config.toml"
FILE_MAX = 1 << 20

CAPABILITIES = ("compat32", "compute", "display", "graphics", "ngx", "utility", "video")

DEFAULTS: dict[str, Any] = {
    "accept-nvidia-visible-devices-as-volume-mounts": False,
    "accept-nvidia-visible-devices-envvar-when-unprivileged": True,
    "compat.capabilities": "honour",
    "compat.forward-compatibility": True,
    "compat.requirements": "enforce",
    "compat.unknown-capability": "error",
    "disable-require": False,
    "driver.load-kmods": True,
    "driver.root": "/",
    "features.ignore-imex-channel-requests": False,
    "features.no-additional-gids-for-device-nodes": False,
    "log.file": "",
    "log.level": "warning",
    "prestart.no-cgroups": False,
    "prestart.no-devbind": False,
    "runtime.annotation-prefixes": ["cdi.k8s.io/"],
    "runtime.default-kind": "nvidia.com/gpu",
    "runtime.mode": "auto",
    "runtime.runtimes": ["runc", "crun"],
    "runtime.spec-dirs": ["/etc/cdi", "/var/run/cdi"],
    "shim.proc-mask": "auto",
    "supported-driver-capabilities": list(CAPABILITIES),
    "swarm-resource": [],
}


# NVIDIA's runtime doesn't look at these in its modes auto, cdi and jit-cdi (toolkit 1.18 to 1.20); in legacy and csv it
# does. Who has its file in force keeps what its containers are used to.
NOT_ENFORCED = {
    "compat.capabilities": "all",
    "compat.requirements": "warn",
    "compat.unknown-capability": "warn",
}


def of_runtime(configured: dict[str, Any], path: str | None, mode: str) -> dict[str, Any]:
    """The settings in force in the runtime shim: what the file `path` sets over the defaults of this mode. The prestart
    hook's are `of`'s in any case."""
    if path == NVIDIAS and mode in ("auto", "cdi"):
        return DEFAULTS | NOT_ENFORCED | configured
    return DEFAULTS | configured


def of(inventory: dict[str, Any]) -> dict[str, Any]:
    """The settings in force, those of the file over the defaults."""
    config = inventory.get("config")
    return DEFAULTS | config["values"] if config else DEFAULTS


def source(inventory: dict[str, Any]) -> str | None:
    """The file that they are from, None where there is none."""
    config = inventory.get("config")
    path: str | None = config["source"] if config else None
    return path


def names_swarm_resource(host_root: str, env: dict[str, str]) -> bool:
    """Whether the configuration may name one of these variables as a swarm resource.

    Asked where nothing else in a container asks for a GPU, before any inventory is opened: words on lines that
    mention the key, comments left out. So it may say yes for too many, never no for one.
    """
    try:
        top = root.open_root(host_root)
    except OSError:
        return False
    try:
        text = _text(top, OURS)
        if text is None:
            text = _text(top, NVIDIAS) or ""
    finally:
        posix.close(top)
    for line in text.splitlines():
        if "swarm-resource" in line and not line.lstrip().startswith("#"):
            for sign in "\"',=":
                line = line.replace(sign, " ")
            if any(word in env for word in line.split()):
                return True
    return False


def _text(top: int, path: str) -> str | None:
    try:
        return root.read_file(top, path, FILE_MAX).decode("utf-8", "replace")
    except OSError:
        return None

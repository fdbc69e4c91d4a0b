# SPDX-License-Identifier: Apache-2.0
"""Nodes and engines whose configuration is not ours to change."""

from __future__ import annotations

import os

from hook.engines.files import Host
from ldcache.errors import NvhookError

# What NVIDIA's GPU operator leaves on a node: its containers' marks, and the toolkit that it installs there.
OPERATOR = ("/run/nvidia/validations", "/usr/local/nvidia/toolkit")
DOCKERD = ("/usr/bin/dockerd", "/usr/sbin/dockerd", "/usr/local/bin/dockerd")
SNAP = "/var/snap/docker"
DESKTOP = "/opt/docker-desktop"


def refuse_operator(host: Host) -> None:
    """Raises NvhookError on a node that the GPU operator manages: it writes the same files, again and again."""
    for path in OPERATOR:
        if host.exists(path):
            what = f"this node is managed by NVIDIA's GPU operator: there is {path}"
            raise NvhookError(what, "leave it to the operator, or give --force if that is gone from the node")


def refuse_docker(host: Host, config: str | None) -> None:
    """Raises NvhookError for a docker that would not read the file, or could not start nvhook.

    `config` is a file that the caller has named, who then knows better.
    """
    if config is not None or any(host.exists(path) for path in DOCKERD):
        return
    if host.exists(SNAP):
        what = f"docker is a snap here ({SNAP}), which can start no runtime from outside of it"
        raise NvhookError(what, "install docker as a package of the distribution or of docker's, then run this again")
    if host.exists(DESKTOP):
        what = f"this is Docker Desktop ({DESKTOP}), whose containers run in a virtual machine without the GPU"
        raise NvhookError(what, "install docker's engine on the host itself, then run this again")


def refuse_rootless(host: Host, engine: str, config: str | None) -> None:
    """Raises NvhookError for a user without root who names no file: the system's are not theirs."""
    if os.geteuid() == 0 or config is not None:
        return
    if engine == "docker":
        home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
        remedy = f"for rootless docker give --config {home}/docker/daemon.json; for the system's, run this as root"
    elif engine == "podman":
        remedy = "rootless podman reads the system's files too: run this as root once, for all users"
    else:
        remedy = "run this as root"
    raise NvhookError(f"only root may change the files of the system's {engine}", remedy)

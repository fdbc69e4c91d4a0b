# SPDX-License-Identifier: Apache-2.0
"""The EGL application profile: which of the host's GPUs a container's EGL and Vulkan programs list.

Hot, but only where a container gets EGL. The driver's EGL asks the kernel module for GPUs, whatever nodes there are;
a key of its application profiles hides those whose nodes a container lacks. Name and content are what
libnvidia-container and nvidia-cdi-hook 1.20 write; the driver's README describes the key (appendix "Application
Profiles").
"""

from __future__ import annotations

from hook import files
from hook.namespace import creation_error
from hook.step import Step

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hook.namespace import Namespace

PATH = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"
KEY = "EGLVisibleDGPUDevices"
BITS = 64


class Profile(Step):
    """The file with the mask of the GPUs that the container has, a bit for each minor number."""

    __slots__ = ("minors",)

    optional = True

    def __init__(self, minors: list[int]) -> None:
        self.minors = minors

    def describe(self) -> str:
        return f"application profile {PATH}: {KEY} {self.mask():#x}"

    def mask(self) -> int:
        """A bit for each minor number."""
        mask = 0
        for minor in self.minors:
            if minor < BITS:
                mask |= 1 << minor
        return mask

    def execute(self, namespace: Namespace) -> None:
        if any(minor >= BITS for minor in self.minors):
            namespace.warnings.append(f"{PATH} has no bit for GPUs of minor number {BITS} and up: EGL won't list them")
        profile = f'{{"name": "_container_", "settings": ["{KEY}", {self.mask():#x}]}}'
        new = f'{{"profiles": [{profile}], "rules": [{{"pattern": [], "profile": "_container_"}}]}}\n'.encode()
        try:
            old = files.read(namespace, PATH)
            if old != new:
                files.replace(namespace, PATH, old or b"", new)
        except OSError as error:
            raise creation_error(error, PATH) from error

# SPDX-License-Identifier: Apache-2.0
"""What the driver of each branch puts on disk, as its public file lists have it: one row a branch.

`{v}` is the version. A library is its file's name, with `=SONAME` where that is another.
What is for the host alone (installer, settings window, power daemon) is not here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Groups = dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Branch:
    """One row: a release of the branch, and what it has beside COMMON, or not of it."""

    version: str
    libraries: Groups = field(default_factory=dict)
    without: tuple[str, ...] = ()
    firmware: tuple[str, ...] = ("gsp_ga10x.bin", "gsp_tu10x.bin")
    files: tuple[str, ...] = ()

    def sonames(self) -> dict[str, tuple[str, str]]:
        """Group and SONAME by file name."""
        found = {}
        for groups in (COMMON, self.libraries):
            for group, entries in groups.items():
                for entry in entries:
                    name, _, soname = entry.format(v=self.version).partition("=")
                    if not name.startswith(self.without):
                        found[name] = group, soname or name
        return found


COMMON: Groups = {
    "utility": ("libnvidia-ml.so.{v}=libnvidia-ml.so.1", "libnvidia-cfg.so.{v}=libnvidia-cfg.so.1"),
    "compute": (
        "libcuda.so.{v}=libcuda.so.1",
        "libnvidia-opencl.so.{v}=libnvidia-opencl.so.1",
        "libnvidia-ptxjitcompiler.so.{v}=libnvidia-ptxjitcompiler.so.1",
        "libnvidia-allocator.so.{v}=libnvidia-allocator.so.1",
    ),
    "video": (
        "libvdpau_nvidia.so.{v}=libvdpau_nvidia.so.1",
        "libnvidia-encode.so.{v}=libnvidia-encode.so.1",
        "libnvidia-opticalflow.so.{v}=libnvidia-opticalflow.so.1",
        "libnvcuvid.so.{v}=libnvcuvid.so.1",
    ),
    "graphics": (
        "libnvidia-eglcore.so.{v}",
        "libnvidia-glcore.so.{v}",
        "libnvidia-tls.so.{v}",
        "libnvidia-glsi.so.{v}",
        "libnvidia-fbc.so.{v}=libnvidia-fbc.so.1",
        "libnvidia-rtcore.so.{v}",
        "libnvoptix.so.{v}=libnvoptix.so.1",
        "libGLX_nvidia.so.{v}=libGLX_nvidia.so.0",
        "libEGL_nvidia.so.{v}=libEGL_nvidia.so.0",
        "libGLESv2_nvidia.so.{v}=libGLESv2_nvidia.so.2",
        "libGLESv1_CM_nvidia.so.{v}=libGLESv1_CM_nvidia.so.1",
        "libnvidia-glvkspirv.so.{v}",
    ),
    "ngx": ("libnvidia-ngx.so.{v}=libnvidia-ngx.so.1",),
}

PROGRAMS = {
    "nvidia-smi": "utility",
    "nvidia-debugdump": "utility",
    "nvidia-persistenced": "utility",
    "nvidia-cuda-mps-control": "compute",
    "nvidia-cuda-mps-server": "compute",
    "nvidia-xconfig": "graphics",
    "nvidia-ngx-updater": "ngx",
}

# By their place below /usr/share or /etc, which is where containers have them.
FILES = (
    "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
    "/usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json",
    "/usr/share/nvidia/nvoptix.bin",
    "/usr/share/nvidia/nvidia-application-profiles-{v}-rc",
    "/usr/share/nvidia/nvidia-application-profiles-{v}-key-documentation",
    "/usr/share/X11/xorg.conf.d/nvidia-drm-outputclass.conf",
    "/etc/vulkan/icd.d/nvidia_icd.json",
    "/etc/vulkan/implicit_layer.d/nvidia_layers.json",
    "/etc/OpenCL/vendors/nvidia.icd",
)
GBM = ("/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",)
VKSC = ("/etc/vulkansc/icd.d/nvidia_icd_vksc.json",)
XCB = tuple(f"/usr/share/egl/egl_external_platform.d/20_nvidia_{name}.json" for name in ("xcb", "xlib"))

NVVM = "libnvidia-nvvm.so.{v}=libnvidia-nvvm.so.4"
DEBUGGER = "libcudadebugger.so.{v}=libcudadebugger.so.1"
CRYPTO = ("libnvidia-pkcs11.so.{v}", "libnvidia-pkcs11-openssl3.so.{v}")
API = "libnvidia-api.so.1"
VKSC_CORE = "libnvidia-vksc-core.so.{v}=libnvidia-vksc-core.so.1"

BRANCHES = (
    Branch(
        "470.256.02",
        {
            "compute": ("libnvidia-compiler.so.{v}", "libnvidia-nvvm.so.4.0.0=libnvidia-nvvm.so.4"),
            "graphics": (
                "libnvidia-cbl.so.{v}",
                "libnvidia-ifr.so.{v}=libnvidia-ifr.so.1",
                "libnvidia-egl-wayland.so.1.1.7=libnvidia-egl-wayland.so.1",
                "libnvidia-gtk2.so.{v}",
                "libnvidia-gtk3.so.{v}",
            ),
        },
        firmware=("gsp.bin",),
    ),
    Branch(
        "535.183.01",
        {
            "compute": (NVVM, DEBUGGER, *CRYPTO),
            "graphics": (
                API,
                "libnvidia-egl-wayland.so.1.1.11=libnvidia-egl-wayland.so.1",
                "libnvidia-egl-gbm.so.1.1.0=libnvidia-egl-gbm.so.1",
                "libnvidia-wayland-client.so.{v}",
                "libnvidia-vulkan-producer.so.{v}",
                "libnvidia-gtk2.so.{v}",
                "libnvidia-gtk3.so.{v}",
            ),
        },
        files=GBM,
    ),
    Branch(
        "550.163.01",
        {
            "compute": (NVVM, DEBUGGER, *CRYPTO, "libnvidia-gpucomp.so.{v}"),
            "graphics": (
                API,
                VKSC_CORE,
                "libnvidia-egl-wayland.so.1.1.13=libnvidia-egl-wayland.so.1",
                "libnvidia-egl-gbm.so.1.1.1=libnvidia-egl-gbm.so.1",
                "libnvidia-wayland-client.so.{v}",
                "libnvidia-gtk2.so.{v}",
                "libnvidia-gtk3.so.{v}",
            ),
        },
        files=(*GBM, *VKSC),
    ),
    Branch(
        "570.172.08",
        {
            "utility": ("libnvidia-sandboxutils.so.{v}=libnvidia-sandboxutils.so.1",),
            "compute": (NVVM, DEBUGGER, *CRYPTO, "libnvidia-gpucomp.so.{v}"),
            "graphics": (
                API,
                VKSC_CORE,
                "libnvidia-egl-wayland.so.1.1.19=libnvidia-egl-wayland.so.1",
                "libnvidia-egl-gbm.so.1.1.2=libnvidia-egl-gbm.so.1",
                "libnvidia-egl-xcb.so.1.0.1=libnvidia-egl-xcb.so.1",
                "libnvidia-egl-xlib.so.1.0.1=libnvidia-egl-xlib.so.1",
                "libnvidia-wayland-client.so.{v}",
                "libnvidia-gtk3.so.{v}",
            ),
        },
        files=(*GBM, *VKSC, *XCB),
    ),
    Branch(
        "580.159.04",
        {
            "utility": ("libnvidia-sandboxutils.so.{v}=libnvidia-sandboxutils.so.1",),
            "compute": (NVVM, DEBUGGER, *CRYPTO, "libnvidia-gpucomp.so.{v}", "libnvidia-nvvm70.so.4"),
            "graphics": (
                API,
                VKSC_CORE,
                "libnvidia-egl-wayland.so.1.1.20=libnvidia-egl-wayland.so.1",
                "libnvidia-egl-wayland2.so.1.0.0=libnvidia-egl-wayland2.so.1",
                "libnvidia-egl-gbm.so.1.1.2=libnvidia-egl-gbm.so.1",
                "libnvidia-egl-xcb.so.1.0.3=libnvidia-egl-xcb.so.1",
                "libnvidia-egl-xlib.so.1.0.3=libnvidia-egl-xlib.so.1",
                "libnvidia-present.so.{v}",
                "libnvidia-wayland-client.so.{v}",
                "libnvidia-gtk3.so.{v}",
            ),
        },
        files=(*GBM, *VKSC, *XCB, "/usr/share/egl/egl_external_platform.d/09_nvidia_wayland2.json"),
    ),
)

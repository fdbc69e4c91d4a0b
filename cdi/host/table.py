# SPDX-License-Identifier: Apache-2.0
"""What is known of the driver's files beforehand: names, and the capability that each belongs to.

The union of what libnvidia-container mounts by capability and what NVIDIA's CDI generator mounts without.
Facts as of the driver branches 390 to 595. A file that is not here is taken all the same if its name ends in
the driver's version, so that a new branch works on its first day.
"""

from __future__ import annotations

from dataclasses import dataclass

# NVIDIA's groups of libraries. An unknown library most likely serves what an ordinary request asks for.
DEFAULT_GROUP = "compute"

DOTTED = r"\d+(?:\.\d+)+"
NUMBER = r"\d+"


@dataclass(frozen=True, slots=True)
class Library:
    """Libraries of one stem: `libcuda` stands for libcuda.so.<driver version>.

    `also`: further groups whose libraries load this one. `links`: names that something opens and neither the
    SONAME nor ldconfig makes. `since`: the driver branch that brought it, or the first long-lived one that has it; none
    where that is older than 470. `expected`: a driver of that branch without it is not whole. `own`: a pattern of its
    version where that is not the driver's; `beside`: such a library comes from the driver, and so lies beside the
    driver's others.
    """

    stem: str
    group: str
    also: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    since: int | None = None
    expected: bool = False
    own: str | None = None
    beside: bool = False


LIBRARIES = (
    Library("libnvidia-ml", "utility", expected=True),
    Library("libnvidia-cfg", "utility"),
    Library("libnvidia-nscq", "utility"),
    Library("libnvsdm", "utility"),
    Library("libnvidia-sandboxutils", "utility", since=565),
    # libcuda itself is opened as libcuda.so by many programs, and only a development package has that link.
    Library("libcuda", "compute", links=("libcuda.so",), expected=True),
    Library("libcudadebugger", "compute", since=515),
    Library("libnvidia-opencl", "compute"),
    # eglcore, glcore and rtcore are linked against it (NVIDIA's announcement of the 545 branch).
    Library("libnvidia-gpucomp", "compute", also=("graphics",), since=545),
    Library("libnvidia-ptxjitcompiler", "compute", expected=True),
    Library("libnvidia-fatbinaryloader", "compute"),
    # Mesa's GBM opens <folder>/gbm/nvidia-drm_gbm.so.
    Library("libnvidia-allocator", "compute", also=("graphics",), links=("gbm/nvidia-drm_gbm.so",)),
    Library("libnvidia-compiler", "compute"),
    Library("libnvidia-pkcs11", "compute", since=535),
    Library("libnvidia-pkcs11-openssl3", "compute", since=535),
    # The 470 branch has it as libnvidia-nvvm.so.4.0.0.
    Library("libnvidia-nvvm", "compute", since=470, expected=True, own=r"4\.0\.0", beside=True),
    Library("libnvidia-nvvm70", "compute", since=580, own=NUMBER, beside=True),
    Library("libnvidia-tileiras", "compute", since=590),
    Library("libvdpau_nvidia", "video"),
    Library("libnvidia-encode", "video"),
    Library("libnvidia-opticalflow", "video", links=("libnvidia-opticalflow.so",)),
    Library("libnvcuvid", "video"),
    Library("libnvidia-eglcore", "graphics"),
    Library("libnvidia-glcore", "graphics"),
    Library("libnvidia-tls", "graphics"),
    Library("libnvidia-glsi", "graphics"),
    Library("libnvidia-fbc", "graphics"),
    Library("libnvidia-ifr", "graphics"),
    Library("libnvidia-rtcore", "graphics"),
    Library("libnvoptix", "graphics"),
    # The name by which GLVND's libGLX falls back to the one driver for indirect rendering.
    Library("libGLX_nvidia", "graphics", links=("libGLX_indirect.so.0",)),
    Library("libEGL_nvidia", "graphics"),
    Library("libGLESv2_nvidia", "graphics"),
    Library("libGLESv1_CM_nvidia", "graphics"),
    Library("libnvidia-glvkspirv", "graphics"),
    Library("libnvidia-cbl", "graphics"),
    Library("libnvidia-vulkan-producer", "graphics", since=535),
    Library("libnvidia-present", "graphics", since=580),
    Library("libnvidia-wayland-client", "graphics", since=535),
    Library("libnvidia-vksc-core", "graphics", since=550),
    Library("libnvidia-gtk2", "graphics"),
    Library("libnvidia-gtk3", "graphics"),
    Library("libnvidia-egl-gbm", "graphics", since=495, own=DOTTED),
    Library("libnvidia-egl-wayland", "graphics", own=DOTTED),
    Library("libnvidia-egl-wayland2", "graphics", since=580, own=DOTTED),
    Library("libnvidia-egl-xcb", "graphics", since=570, own=DOTTED),
    Library("libnvidia-egl-xlib", "graphics", since=570, own=DOTTED),
    # NVAPI for Linux; its file is named like its SONAME.
    Library("libnvidia-api", "graphics", since=535, own=NUMBER, beside=True),
    Library("libnvidia-ngx", "ngx"),
)

BY_STEM = {library.stem: library for library in LIBRARIES}

# Debian's name for each machine, and where its libraries are looked for when no loader cache leads there.
MULTIARCH = {"x86_64": ("x86_64-linux-gnu", "i386-linux-gnu"), "aarch64": ("aarch64-linux-gnu", "arm-linux-gnueabihf")}

# e_machine of the driver's libraries and of their 32-bit twins.
ELF_MACHINES = {"x86_64": (62, 3), "aarch64": (183, 40)}


def library_folders(machine: str | None) -> list[str]:
    """The default library folders inside a driver root."""
    folders = []
    for triplet in MULTIARCH.get(machine or "", ()):
        for top in ("/usr/lib", "/lib"):
            # Debian's packages keep the driver in nvidia/current and lead there by alternatives.
            folders += [f"{top}/{triplet}", f"{top}/{triplet}/nvidia/current"]
    folders += ["/usr/lib64", "/lib64", "/usr/lib32", "/usr/lib", "/lib"]
    return folders + [f"/usr/local/nvidia/{name}" for name in ("lib64", "lib", "lib32")]


# Where systems whose /usr is an image or a store have the driver: NixOS, Talos, Bottlerocket, Container-Optimized OS.
# Looked into where it is nowhere else, for each place costs every start a look.
PLATFORM_FOLDERS = (
    "/run/opengl-driver/lib",
    "/run/opengl-driver-32/lib",
    "/usr/local/glibc/usr/lib",
    "/usr/lib/nvidia/tesla",
    "/home/kubernetes/bin/nvidia/lib64",
)

# Whole driver roots, each to be given as --driver-root: the GPU operator's driver container.
DRIVER_ROOTS = ("/run/nvidia/driver",)


@dataclass(frozen=True, slots=True)
class Program:
    """A program. `beside`: the stem of a library, or a path, without which it is not looked for."""

    name: str
    group: str
    beside: str = ""


GRIDD_CONF = "/etc/nvidia/gridd.conf"

PROGRAMS = (
    Program("nvidia-smi", "utility"),
    Program("nvidia-debugdump", "utility"),
    Program("nvidia-persistenced", "utility"),
    Program("nv-fabricmanager", "utility"),
    Program("nvidia-imex", "utility"),
    Program("nvidia-imex-ctl", "utility"),
    # The licence daemon of a vGPU guest.
    Program("nvidia-gridd", "utility", beside=GRIDD_CONF),
    Program("nvidia-cuda-mps-control", "compute"),
    Program("nvidia-cuda-mps-server", "compute"),
    Program("nvidia-xconfig", "graphics"),
    Program("nvidia-ngx-updater", "ngx", beside="libnvidia-ngx"),
)
PROGRAM_FOLDERS = ("/usr/bin", "/usr/sbin", "/bin", "/sbin", "/usr/local/bin")
# Flatcar's, NixOS's and Bottlerocket's, where nvidia-smi is in none of the others.
PLATFORM_PROGRAM_FOLDERS = ("/opt/bin", "/run/current-system/sw/bin", "/usr/libexec/nvidia/tesla/bin")


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file by which some loader finds the driver, or that the driver reads: `name` below a data folder, and where
    containers have it; `{version}` in both is the driver's. `beside`: the stem of a library without which it is of no
    use, and not looked for."""

    name: str
    container_path: str
    group: str = "graphics"
    beside: str = ""


def _data_files() -> tuple[DataFile, ...]:
    share = (
        "glvnd/egl_vendor.d/10_nvidia.json",
        "egl/egl_external_platform.d/15_nvidia_gbm.json",
        "egl/egl_external_platform.d/10_nvidia_wayland.json",
        "egl/egl_external_platform.d/09_nvidia_wayland2.json",
        "egl/egl_external_platform.d/20_nvidia_xcb.json",
        "egl/egl_external_platform.d/20_nvidia_xlib.json",
        "nvidia/nvoptix.bin",
        "X11/xorg.conf.d/10-nvidia.conf",
        "X11/xorg.conf.d/nvidia-drm-outputclass.conf",
    )
    # Vulkan's loader reads /etc before /usr/share, and an image's own files are in /usr/share.
    vulkan = (
        "vulkan/icd.d/nvidia_icd.json",
        "vulkan/icd.d/nvidia_icd.x86_64.json",
        "vulkan/icd.d/nvidia_icd.aarch64.json",
        "vulkan/icd.d/nvidia_layers.json",
        "vulkan/implicit_layer.d/nvidia_layers.json",
    )
    profiles = [f"nvidia/nvidia-application-profiles-{{version}}-{name}" for name in ("rc", "key-documentation")]
    files = [DataFile(name, f"/usr/share/{name}") for name in share]
    files += [DataFile(name, f"/etc/{name}") for name in vulkan]
    files += [DataFile(name, f"/usr/share/{name}", beside="libGLX_nvidia") for name in profiles]
    vksc = "vulkansc/icd.d/nvidia_icd_vksc.json"
    files.append(DataFile(vksc, f"/etc/{vksc}", beside="libnvidia-vksc-core"))
    files.append(DataFile("OpenCL/vendors/nvidia.icd", "/etc/OpenCL/vendors/nvidia.icd", "compute"))
    return tuple(files)


DATA_FILES = _data_files()
# /etc first, as the loaders do.
DATA_FOLDERS = ("/etc", "/usr/local/share", "/usr/share")

# X.Org's modules lie in one of these below a library folder or below X.Org's own.
XORG_FOLDERS = (
    "nvidia/xorg",
    "xorg/modules/drivers",
    "xorg/modules/extensions",
    "xorg/modules/updates/drivers",
    "xorg/modules/updates/extensions",
)
XORG_TOPS = ("/usr/lib", "/usr/lib64", "/usr/X11R6/lib", "/usr/X11R6/lib64")
XORG_DRIVER = "nvidia_drv.so"
XORG_SERVER = "libglxserver_nvidia.so"

# NGX for Windows programs under Wine and Proton, which look beside libGLX_nvidia.
WINE_FOLDER = "nvidia/wine"
WINE_FILES = ("nvngx.dll", "_nvngx.dll", "nvngx_dlssg.dll")

# The kernel's own search order (drivers/base/firmware_loader), after its parameter `path`.
FIRMWARE_FOLDERS = (
    "/lib/firmware/updates/{release}",
    "/lib/firmware/updates",
    "/lib/firmware/{release}",
    "/lib/firmware",
)

# Sockets by which a container talks to the host's daemons.
SOCKETS = (("nvidia-persistenced/socket", "utility"), ("nvidia-fabricmanager/socket", "utility"))
RUN_FOLDERS = ("/run", "/var/run")
MPS_FOLDER = "/tmp/nvidia-mps"

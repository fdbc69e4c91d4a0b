# SPDX-License-Identifier: Apache-2.0
"""The driver's user-space files: what a .run file or a distribution's packages put on disk.

Libraries are stubs by the ELF writer, except the two that tests load and call (libcuda, libnvidia-ml),
which gcc builds. The table follows the H200 host's sonames.txt; what a workstation has besides follows
NVIDIA's own lists of what it mounts. Of DT_NEEDED it keeps libc and the driver's own: with libX11 too,
nothing would load where there is no X.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.simhost import compiler, elfwriter, platforms
from tests.simhost.host import Host, Layout, Library
from tests.simhost.tree import Tree, merged_usr


@dataclass(frozen=True, slots=True)
class Part:
    """A library of the driver.

    SONAME: `stem`.so.`major`, or without a major its versioned file name. `own`: a version of its own
    instead of the driver's. `bare`: the development link stem.so is installed. `twin`: there is an i386
    build. `majors`: the driver branches that have it, roughly: in which release a library came or
    went is on no record here.
    """

    stem: str
    major: str = ""
    needed: tuple[str, ...] = ()
    bare: bool = False
    twin: bool = False
    graphics: bool = False
    own: str = ""
    folder: str = ""
    majors: range = range(1, 10000)

    def file(self, version: str) -> str:
        return f"{self.stem}.so.{self.own or version}"

    def soname(self, version: str) -> str:
        return f"{self.stem}.so.{self.major}" if self.major else self.file(version)


PARTS = (
    Part("libnvidia-ml", "1", bare=True, twin=True),
    Part("libnvidia-cfg", "1", bare=True),
    Part("libcuda", "1", bare=True, twin=True),
    Part("libcudadebugger", "1", majors=range(515, 10000)),
    Part("libnvidia-opencl", "1", twin=True),
    Part("libnvidia-gpucomp", twin=True, majors=range(545, 10000)),
    Part("libnvidia-ptxjitcompiler", "1", bare=True, twin=True),
    Part("libnvidia-fatbinaryloader", twin=True, majors=range(1, 450)),
    Part("libnvidia-compiler", twin=True, majors=range(1, 515)),
    Part("libnvidia-allocator", "1", bare=True, twin=True),
    Part("libnvidia-pkcs11", majors=range(525, 10000)),
    Part("libnvidia-pkcs11-openssl3", majors=range(530, 10000)),
    Part("libnvidia-nvvm", "4", twin=True, majors=range(470, 10000)),
    Part("libvdpau_nvidia", "1", twin=True, folder="vdpau"),
    Part("libnvidia-encode", "1", ("libnvcuvid",), bare=True, twin=True),
    Part("libnvidia-opticalflow", "1", ("libnvcuvid",), bare=True, twin=True),
    Part("libnvcuvid", "1", bare=True, twin=True),
    Part("libnvidia-eglcore", needed=("libnvidia-glsi", "libnvidia-gpucomp"), twin=True, graphics=True),
    Part("libnvidia-glcore", needed=("libnvidia-tls", "libnvidia-gpucomp"), twin=True, graphics=True),
    Part("libnvidia-tls", twin=True, graphics=True),
    Part("libnvidia-glsi", twin=True, graphics=True),
    Part("libnvidia-fbc", "1", bare=True, twin=True, graphics=True),
    Part("libnvidia-ifr", "1", twin=True, graphics=True, majors=range(1, 495)),
    Part("libnvidia-rtcore", graphics=True),
    Part("libnvoptix", "1", graphics=True),
    Part(
        "libGLX_nvidia",
        "0",
        ("libnvidia-glsi", "libnvidia-tls", "libnvidia-glcore"),
        twin=True,
        graphics=True,
    ),
    Part("libEGL_nvidia", "0", ("libnvidia-glsi",), twin=True, graphics=True),
    Part("libGLESv2_nvidia", "2", twin=True, graphics=True),
    Part("libGLESv1_CM_nvidia", "1", twin=True, graphics=True),
    Part("libnvidia-glvkspirv", twin=True, graphics=True),
    Part("libnvidia-ngx", "1", graphics=True),
    Part("libnvidia-egl-gbm", "1", own="1.1.2", graphics=True),
    Part("libnvidia-egl-wayland", "1", own="1.1.19", graphics=True),
    Part("libnvidia-vulkan-producer", graphics=True),
)

PROGRAMS = (
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-xconfig",
)

# Libraries of the host that are not the driver's, two of them with names that look so.
OTHERS = (
    ("libhost.so.1.2", "libhost.so.1"),
    ("libEGL.so.1.1.0", "libEGL.so.1"),
    ("libOpenCL.so.1.0.0", "libOpenCL.so.1"),
    ("libnvidia-container.so.1.17.4", "libnvidia-container.so.1"),
    ("libcudart.so.12.8.90", "libcudart.so.12"),
)

ICD = '{{"file_format_version": "{form}", "ICD": {{"library_path": "{library}"{more}}}}}\n'
LAYER = """{"file_format_version": "1.0.0", "layer": {"name": "VK_LAYER_NV_optimus", "type": "INSTANCE",
 "library_path": "libGLX_nvidia.so.0", "api_version": "1.4.312", "implementation_version": "1",
 "description": "simulated", "enable_environment": {"__NV_PRIME_RENDER_OFFLOAD": "1"},
 "disable_environment": {"DISABLE_LAYER_NV_OPTIMUS_1": ""}}}
"""
PLATFORMS = (("10_nvidia_wayland", "libnvidia-egl-wayland"), ("15_nvidia_gbm", "libnvidia-egl-gbm"))


def parts(host: Host) -> tuple[Part, ...]:
    """The libraries that this host's driver has."""
    branch = int(host.version.split(".")[0])
    return tuple(part for part in PARTS if branch in part.majors and (host.graphics or not part.graphics))


def install(tree: Tree, host: Host) -> tuple[Library, ...]:
    """Puts the driver's files below `tree`, the driver root, and runs ldconfig there."""
    places = platforms.PLACES[host.layout]
    base(tree, host.layout, host.i386)
    installed = _libraries(tree, host, places.libraries, 64)
    if host.i386:
        installed += _libraries(tree, host, places.libraries32, 32)
    if host.leftover:
        _leftover(tree, host, host.leftover)
    tree.copy(compiler.program("smi.c"), f"{places.programs}/nvidia-smi", 0o755)
    for name in PROGRAMS:
        tree.write(f"{places.programs}/{name}", f"#!/bin/sh\necho {name} {host.version}\n", 0o755)
    if host.graphics:
        graphics(tree, host, places)
    if host.firmware:
        for name in ("gsp_ga10x.bin", "gsp_tu10x.bin"):
            tree.write(f"{places.firmware}/nvidia/{host.version}/{name}", f"{name} {host.version}\n")
    if host.layout == "h200":
        _links_in_usr(tree, installed)
    platforms.finish(tree, host, installed)
    if host.cache:
        # Fedora's ldconfig knows the lib64 folders by itself; this machine's may be Debian's and has to be told.
        tree.ldconfig(*(("/lib64", "/usr/lib64") if host.layout == "lib64" else ()))
    return installed


def base(tree: Tree, layout: Layout, i386: bool) -> None:
    """What makes the tree a distribution: /usr, the loader's configuration, libraries not NVIDIA's."""
    places = platforms.PLACES["lib64" if layout == "lib64" else "debian"]
    merged_usr(tree)
    folders = {
        "debian": [
            "x86_64-linux-gnu",
            "/usr/local/lib/x86_64-linux-gnu\n/lib/x86_64-linux-gnu\n/usr/lib/x86_64-linux-gnu\n",
        ],
        "lib64": ["empty", ""],
        "h200": ["nvidia", "/usr/local/nvidia/lib64\n/lib/x86_64-linux-gnu\n"],
    }
    folders["alternatives"] = folders["debian"]
    folders["flatcar"] = ["nvidia", f"{platforms.PLACES['flatcar'].libraries}\n"]
    folders["bottlerocket"] = ["nvidia-tesla", f"{platforms.PLACES['bottlerocket'].libraries}\n"]
    name, content = folders.get(layout, ["empty", ""])
    tree.write("/etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n")
    tree.write(f"/etc/ld.so.conf.d/{name}.conf", content)
    if i386 and layout == "debian":
        tree.write("/etc/ld.so.conf.d/i386-linux-gnu.conf", "/lib/i386-linux-gnu\n/usr/lib/i386-linux-gnu\n")
    if i386 and layout == "h200":
        tree.write("/etc/ld.so.conf.d/nvidia32.conf", "/usr/local/nvidia/lib32\n")
    tree.write("/etc/os-release", f"ID={platforms.DISTRIBUTIONS.get(layout, layout)}\n")
    if layout in ("debian", "h200", "alternatives"):
        tree.write("/etc/debian_version", "12.12\n")
    for file, soname in OTHERS:
        tree.write(f"{places.libraries}/{file}", elfwriter.shared_object(soname, needed=("libc.so.6",)), 0o755)
    tree.folder("/tmp", 0o1777)
    tree.folder("/run")
    tree.link("/var/run", "../run")


def _libraries(tree: Tree, host: Host, folder: str, bits: int) -> tuple[Library, ...]:
    chosen = [part for part in parts(host) if bits == 64 or part.twin]
    sonames = {part.stem: part.soname(host.version) for part in chosen}
    installed = []
    for part in chosen:
        home = f"{folder}/{part.folder}".rstrip("/") if host.layout != "h200" else folder
        file, soname = part.file(host.version), sonames[part.stem]
        path = f"{home}/{file}"
        if bits == 64 and part.stem in ("libcuda", "libnvidia-ml"):
            source = "cuda.c" if part.stem == "libcuda" else "nvml.c"
            tree.copy(compiler.library(source, soname, host.version, host.cuda_version), path)
        else:
            needed = (*(sonames[stem] for stem in part.needed if stem in sonames), "libc.so.6")
            machine = elfwriter.EM_X86_64 if bits == 64 else elfwriter.EM_386
            tree.write(path, elfwriter.shared_object(soname, bits=bits, machine=machine, needed=needed))
        if soname != file:
            tree.link(f"{home}/{soname}", file)
        # The H200's driver has a bare name for every library, a package only for those that are linked against.
        if part.bare or host.layout == "h200":
            tree.link(f"{home}/{part.stem}.so", soname)
        installed.append(Library(path, soname, bits))
    return tuple(installed)


def _leftover(tree: Tree, host: Host, version: str) -> None:
    """Another driver's libraries beside these. Where it is newer, ldconfig gives it the SONAME's link."""
    for part in parts(host):
        if not part.own and not part.folder:
            stub = elfwriter.shared_object(part.soname(version), needed=("libc.so.6",))
            tree.write(f"{platforms.PLACES[host.layout].libraries}/{part.file(version)}", stub)


def graphics(tree: Tree, host: Host, places: platforms.Places) -> None:
    """The data files by which Vulkan, EGL, OpenCL and X find the driver, and its plug-ins."""
    share, libraries = places.share, places.libraries
    icd = ICD.format(form="1.0.1", library="libGLX_nvidia.so.0", more=', "api_version": "1.4.312"')
    vulkan = places.vulkan or f"{share}/vulkan"
    tree.write(f"{vulkan}/icd.d/nvidia_icd.json", icd)
    tree.write(f"{vulkan}/implicit_layer.d/nvidia_layers.json", LAYER)
    vendor = ICD.format(form="1.0.0", library="libEGL_nvidia.so.0", more="")
    tree.write(f"{share}/glvnd/egl_vendor.d/10_nvidia.json", vendor)
    if host.layout in ("h200", "gke"):
        return
    for name, library in PLATFORMS:
        text = ICD.format(form="1.0.0", library=f"{library}.so.1", more="")
        tree.write(f"{share}/egl/egl_external_platform.d/{name}.json", text)
    tree.write(f"{share}/nvidia/nvoptix.bin", b"nvoptix\0")
    tree.write(f"{share}/X11/xorg.conf.d/nvidia-drm-outputclass.conf", 'Section "OutputClass"\nEndSection\n')
    tree.write("/etc/OpenCL/vendors/nvidia.icd", "libnvidia-opencl.so.1\n")
    tree.link(f"{libraries}/gbm/nvidia-drm_gbm.so", "../libnvidia-allocator.so.1")
    modules = f"{libraries if host.layout == 'lib64' else '/usr/lib'}/xorg/modules"
    server = f"libglxserver_nvidia.so.{host.version}"
    tree.write(f"{modules}/drivers/nvidia_drv.so", elfwriter.shared_object("nvidia_drv.so"))
    tree.write(f"{modules}/extensions/{server}", elfwriter.shared_object("libglxserver_nvidia.so"))
    tree.link(f"{modules}/extensions/libglxserver_nvidia.so", server)


def _links_in_usr(tree: Tree, installed: tuple[Library, ...]) -> None:
    """As on the H200: links to the unversioned names of a driver that lies elsewhere, and its programs."""
    places = platforms.PLACES["h200"]
    for library in installed:
        file = library.path.rsplit("/", 1)[1]
        for name in {library.soname, file.split(".so.")[0] + ".so"} - {file}:
            if library.bits == 64:
                tree.link(f"/usr/lib/{name}", f"{places.libraries}/{name}")
    for name in ("nvidia-smi", *PROGRAMS):
        tree.link(f"/usr/bin/{name}", f"{places.programs}/{name}")

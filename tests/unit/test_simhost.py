# SPDX-License-Identifier: Apache-2.0
"""The fixtures are what they say: real ldconfig, ld.so, pynvml and sockets are asked about them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import roots
from tests.needs import needs_root
from tests.simhost import Fault, Gpu, Host, Nvml, SimulatedHost, build, build_h200, elfwriter, gpus, h200, kernel
from tests.simhost.host import Layout
from tests.simhost.tree import ldconfig

GPU_LOST, LIBRARY_MISMATCH, NOT_FOUND = 15, 18, 6

# nvidia-ml-py opens "libnvidia-ml.so.1": loaded before by its path, that SONAME is the simulated one.
PYNVML = """
import ctypes, json, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
import pynvml as n
def tried(call, *arguments):
    try:
        return call(*arguments)
    except n.NVMLError as error:
        return error.value
n.nvmlInit()
"""
SURVEY = """
out = []
for index in range(n.nvmlDeviceGetCount()):
    gpu = tried(n.nvmlDeviceGetHandleByIndex, index)
    if isinstance(gpu, int):
        out.append(gpu)
        continue
    pci = n.nvmlDeviceGetPciInfo(gpu)
    out.append([pci.busId, n.nvmlDeviceGetUUID(gpu), n.nvmlDeviceGetMinorNumber(gpu), n.nvmlDeviceGetName(gpu)])
print(json.dumps(out))
"""


def ask(host: SimulatedHost, script: str, timeout: float = 20) -> object:
    """Runs `script` after nvmlInit in a process of its own and returns the JSON that it prints."""
    command = [sys.executable, "-c", PYNVML + script, str(host.library("libnvidia-ml.so.1"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def cache_rows(root: Path) -> list[tuple[str, str, str]]:
    """(SONAME, flags, path) of each entry that the real ldconfig prints of a root's cache."""
    text = ldconfig("-p", "-C", str(root / "etc/ld.so.cache"))
    return re.findall(r"^\t(\S+) \((\S+)\) => (\S+)$", text, re.MULTILINE)


def need_nodes(host: SimulatedHost) -> None:
    if host.nodes_skipped:
        pytest.skip(host.nodes_skipped)


@pytest.mark.parametrize(
    ("layout", "folder"),
    [("debian", "/lib/x86_64-linux-gnu"), ("lib64", "/lib64"), ("h200", "/usr/local/nvidia/lib64")],
)
def test_real_ldconfig_lists_the_driver(tmp_path: Path, layout: Layout, folder: str) -> None:
    host = build(tmp_path / "host", Host(layout=layout))
    rows = cache_rows(host.root)
    assert ("libcuda.so.1", "libc6,x86-64", f"{folder}/libcuda.so.1") in rows
    assert ("libnvidia-tls.so.580.159.04", "libc6,x86-64", f"{folder}/libnvidia-tls.so.580.159.04") in rows
    assert os.readlink(host.path(f"{folder}/libcuda.so.1")) == "libcuda.so.580.159.04"
    assert ("/lib/libcuda.so.1" in {path for _, _, path in rows}) == (layout == "h200")
    listed = {soname for soname, _, _ in rows}
    assert {one.soname for one in host.libraries if "/vdpau/" not in one.path} <= listed


def test_i386_twins(tmp_path: Path) -> None:
    host = build(tmp_path, Host(i386=True))
    twin = host.library("libcuda.so.1", 32).read_bytes()
    assert (twin[4], twin[18]) == (1, elfwriter.EM_386)
    # Flags 3 as with real drivers: up to 2.36 ldconfig takes "libc6" from the DT_NEEDED of libc.so.6.
    assert ("libcuda.so.1", "libc6", "/lib/i386-linux-gnu/libcuda.so.1") in cache_rows(tmp_path)
    assert not any(one.soname.startswith("libnvoptix") for one in host.libraries if one.bits == 32)


def test_every_library_loads(tmp_path: Path) -> None:
    host = build(tmp_path)
    paths = [str(host.path(one.path)) for one in host.libraries]
    script = "import ctypes, sys\nfor path in sys.argv[1:]: ctypes.CDLL(path)"
    folder = str(host.path(host.library_folder))
    environment = {**os.environ, "LD_LIBRARY_PATH": folder}
    subprocess.run([sys.executable, "-c", script, *paths], env=environment, check=True)


def test_libcuda_tells_its_version(tmp_path: Path) -> None:
    host = build(tmp_path, Host(version="550.90.07", cuda="12.4"))
    script = """import ctypes, sys
cuda, version = ctypes.CDLL(sys.argv[1]), ctypes.c_int()
cuda.simulated_driver_version.restype = ctypes.c_char_p
cuda.cuDriverGetVersion(ctypes.byref(version))
print(cuda.simulated_driver_version().decode(), version.value, cuda.cuInit(0))"""
    command = [sys.executable, "-c", script, str(host.library("libcuda.so.1"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["550.90.07", "12040", "100"]


def test_branches_differ(tmp_path: Path) -> None:
    old = {one.soname for one in build(tmp_path / "old", Host(version="440.33.01", cuda="10.2")).libraries}
    assert "libnvidia-fatbinaryloader.so.440.33.01" in old
    assert "libnvidia-gpucomp.so.440.33.01" not in old
    bare = {one.soname for one in build(tmp_path / "bare", Host(graphics=False)).libraries}
    assert "libcuda.so.1" in bare and "libGLX_nvidia.so.0" not in bare


def test_a_newer_leftover_takes_the_link(tmp_path: Path) -> None:
    older = build(tmp_path / "older", Host(leftover="550.54.14"))
    newer = build(tmp_path / "newer", Host(leftover="590.10.01"))
    links = [os.readlink(host.path(f"{host.library_folder}/libcuda.so.1")) for host in (older, newer)]
    assert links == ["libcuda.so.580.159.04", "libcuda.so.590.10.01"]


def test_building_over_a_host_is_an_upgrade(tmp_path: Path) -> None:
    build(tmp_path, Host(version="550.90.07"))
    host = build(tmp_path, Host())
    assert host.path("/sys/module/nvidia/version").read_text() == "580.159.04\n"
    assert os.readlink(host.path(f"{host.library_folder}/libcuda.so.1")) == "libcuda.so.580.159.04"
    assert host.path(f"{host.library_folder}/libcuda.so.550.90.07").exists()


def test_a_driver_in_a_container(tmp_path: Path) -> None:
    host = build(tmp_path, Host(driver_root="/run/nvidia/driver", dev_root="/run/nvidia/driver"))
    assert host.library("libcuda.so.1").is_relative_to(tmp_path / "run/nvidia/driver/usr/lib")
    inside = {soname for soname, _, _ in cache_rows(tmp_path / "run/nvidia/driver")}
    outside = {soname for soname, _, _ in cache_rows(tmp_path)}
    assert "libcuda.so.1" in inside and "libcuda.so.1" not in outside and "libhost.so.1" in outside
    need_nodes(host)
    assert not (tmp_path / "dev").exists() and (tmp_path / "run/nvidia/driver/dev/nvidiactl").exists()


def test_texts_are_those_of_the_real_driver() -> None:
    real = (h200.DATA / "proc-driver.txt").read_text()
    assert kernel.version_text("580.159.04") in real
    assert kernel.information_text(h200.GPU, h200.VERSION, 41) in real
    table = kernel.mig_minors_text().splitlines()
    sample = (h200.DATA / "mig-minors.txt").read_text()
    assert len(table) == 4322 and "\n".join(table[:12]) in sample and "\n".join(table[-3:]) in sample


def test_what_the_driver_does_not_know_or_reach(tmp_path: Path) -> None:
    first, second, third = gpus(3)
    unknown = Gpu(first.bus_id, 2, first.uuid, known=False, numa_node=1)
    asleep = Gpu(second.bus_id, 0, second.uuid, powered=False)
    excluded = Gpu(third.bus_id, 1, third.uuid, excluded=True)
    host = build(tmp_path, Host(gpus=(excluded, asleep, unknown), params=(("ModifyDeviceFiles", 0),)))
    texts = [host.path(f"/proc/driver/nvidia/gpus/{gpu.bus_id}/information").read_text() for gpu in gpus(3)]
    assert "GPU UUID: \t GPU-????????-????-????-????-????????????\n" in texts[0]
    assert "Device Minor: \t 2\n" in texts[0]
    assert texts[1] == ""
    assert "GPU Excluded:\t Yes\n" in texts[2]
    assert "\nModifyDeviceFiles: 0\n" in host.path("/proc/driver/nvidia/params").read_text()
    assert host.path(f"/sys/bus/pci/devices/{unknown.bus_id}/numa_node").read_text() == "1\n"
    # NVML counts by bus id, leaves out the excluded one, and knows the UUID that the driver does not print.
    expected = [[f"00000000:{gpu.bus_id[5:]}", gpu.uuid, gpu.minor, gpu.name] for gpu in (unknown, asleep)]
    assert ask(host, SURVEY) == expected


def test_nodes(tmp_path: Path) -> None:
    modules = ("nvidia", "nvidia_uvm", "nvidia_drm")
    params = (("DeviceFileMode", 0o660), ("DeviceFileGID", 44))
    host = build(tmp_path, Host(gpus=gpus(2), modules=modules, missing=frozenset({"nvidia1"}), params=params))
    need_nodes(host)
    node = (tmp_path / "dev/nvidia0").stat()
    assert stat.S_ISCHR(node.st_mode) and stat.S_IMODE(node.st_mode) == 0o660 and node.st_gid == 44
    assert node.st_rdev == os.makedev(195, 0)
    assert (tmp_path / "dev/nvidia-uvm").stat().st_rdev == os.makedev(508, 0)
    assert (tmp_path / "dev/dri/renderD129").stat().st_rdev == os.makedev(226, 129)
    assert not (tmp_path / "dev/nvidia1").exists() and not (tmp_path / "dev/nvidia-modeset").exists()
    assert "508 nvidia-uvm\n" in (tmp_path / "proc/devices").read_text()


@pytest.mark.parametrize("count", [0, 1, 16])
def test_nvml_answers(tmp_path: Path, count: int) -> None:
    host = build(tmp_path, Host(gpus=gpus(count)))
    survey = ask(host, SURVEY)
    assert isinstance(survey, list) and len(survey) == count
    calls = host.nvml_calls()
    assert [call.name for call in calls[:2]] == ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2"]
    assert len({call.pid for call in calls}) == 1
    host.clear_nvml_calls()
    assert host.nvml_calls() == ()


def test_nvml_facts_of_the_h200(tmp_path: Path) -> None:
    host = build(tmp_path, h200.HOST)
    script = """
gpu = n.nvmlDeviceGetHandleByUUID("GPU-11111111-2222-3333-4444-555555555555")
same = n.nvmlDeviceGetHandleByPciBusId("0000:00:06.0")
print(json.dumps([
    n.nvmlSystemGetDriverVersion(), n.nvmlSystemGetCudaDriverVersion_v2(), n.nvmlSystemGetNVMLVersion(),
    n.nvmlDeviceGetBrand(gpu), n.nvmlDeviceGetCudaComputeCapability(gpu), n.nvmlDeviceGetMigMode(gpu),
    n.nvmlDeviceGetMaxMigDeviceCount(gpu), n.nvmlDeviceGetArchitecture(gpu), n.nvmlDeviceGetPersistenceMode(gpu),
    n.nvmlDeviceGetPciInfo(same).busId, n.nvmlDeviceGetIndex(same), tried(n.nvmlDeviceGetHandleByUUID, "GPU-0"),
]))
n.nvmlShutdown()
assert tried(n.nvmlDeviceGetCount) == n.NVML_ERROR_UNINITIALIZED
"""
    expected = ["580.159.04", 13000, "13.580.159.04", 14, [9, 0], [0, 0], 0, 9, 1, "00000000:00:06.0", 0, NOT_FOUND]
    assert ask(host, script) == expected


def test_nvml_delays(tmp_path: Path) -> None:
    faults = (Fault("nvmlInit", delay_ms=300), Fault("nvmlDeviceGetHandle", gpu=1, delay_ms=200))
    host = build(tmp_path, Host(gpus=gpus(2), nvml=Nvml(faults)))
    begin = time.monotonic()
    ask(host, SURVEY)
    assert time.monotonic() - begin >= 0.5


def test_nvml_faults_change_without_a_trace(tmp_path: Path) -> None:
    host = build(tmp_path, Host(gpus=gpus(2)))
    folder, library = host.path(host.library_folder), host.library("libnvidia-ml.so.1")
    before = [(os.stat(one).st_mtime_ns, os.stat(one).st_ctime_ns) for one in (folder, library)]
    host.set_nvml(Nvml((Fault("nvmlDeviceGetHandle", gpu=0, result=GPU_LOST),)))
    survey = ask(host, SURVEY)
    assert isinstance(survey, list) and survey[0] == GPU_LOST and survey[1][2] == 1
    host.set_nvml(Nvml((Fault("nvmlInit", result=LIBRARY_MISMATCH),)))
    with pytest.raises(RuntimeError, match="version mismatch"):
        ask(host, SURVEY)
    host.set_nvml(Nvml(version="550.90.07", record=False))
    host.clear_nvml_calls()
    assert ask(host, "print(json.dumps(n.nvmlSystemGetDriverVersion()))") == "550.90.07"
    assert host.nvml_calls() == ()
    assert before == [(os.stat(one).st_mtime_ns, os.stat(one).st_ctime_ns) for one in (folder, library)]


def test_nvml_hangs_and_crashes(tmp_path: Path) -> None:
    host = build(tmp_path, Host(gpus=gpus(2), nvml=Nvml((Fault("nvmlDeviceGetUUID", gpu=1, action="hang"),))))
    command = [sys.executable, "-c", PYNVML + SURVEY, str(host.library("libnvidia-ml.so.1"))]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as hanging:
        deadline = time.monotonic() + 20
        while not any(call[1:] == ("nvmlDeviceGetUUID", 1) for call in host.nvml_calls()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        hanging.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            hanging.wait(0.3)
        hanging.kill()
        assert hanging.wait() == -signal.SIGKILL
    host.set_nvml(Nvml((Fault("nvmlInit", action="crash"),)))
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == -signal.SIGSEGV


def test_sockets(tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 30)
    with_sockets = Host(persistenced="answering", fabricmanager="dead", mps=True)
    host = build(deep, with_sockets)
    assert [knock(host, name) for name in ("persistenced", "fabricmanager")] == [True, False]
    host.close()
    assert not knock(host, "persistenced")
    assert stat.S_ISFIFO(host.path("/tmp/nvidia-mps/control").stat().st_mode)


def knock(host: SimulatedHost, name: str) -> bool:
    """Whether somebody answers; through the folder's descriptor, since sun_path has no room for the whole name."""
    folder = os.open(host.path(f"/run/nvidia-{name}"), os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            return client.connect_ex(f"/proc/self/fd/{folder}/socket") == 0
    finally:
        os.close(folder)


def test_the_h200_has_every_file_of_the_real_one(tmp_path: Path) -> None:
    host = build_h200(tmp_path)
    for row in h200.rows("driver-files.txt"):
        described, target = row.split(" -> ")
        kind, mode, *_, path = described.split()
        found = host.path(path).lstat()
        assert {"d": stat.S_ISDIR, "f": stat.S_ISREG, "l": stat.S_ISLNK}[kind](found.st_mode), path
        assert kind == "l" or stat.S_IMODE(found.st_mode) == int(mode, 8), path
        assert kind != "l" or os.readlink(host.path(path)) == target, path
    for path in h200.rows("other-files.txt"):
        assert os.path.lexists(host.path(path)), path
    for spec in ("peer-cdi-default.yaml", "peer-cdi-search-path.yaml"):
        for path in re.findall(r"hostPath: (\S+)", (h200.DATA / spec).read_text()):
            assert host.path(path).is_file(), path
    assert len(host.libraries) == len(list(h200.rows("sonames.txt")))
    assert host.library("libcuda.so.1").stat().st_mtime == 1


def test_the_h200_has_its_real_cache_and_kernel(tmp_path: Path) -> None:
    host = build_h200(tmp_path)
    rows = cache_rows(tmp_path)
    assert ("libcuda.so.1", "libc6,x86-64", "/usr/local/nvidia/lib64/libcuda.so.1") in rows
    assert all(os.path.lexists(host.path(path)) for _, _, path in rows)
    real = (h200.DATA / "proc-driver.txt").read_text()
    for name in ("version", "params", "gpus/0000:00:06.0/information"):
        text = host.path(f"/proc/driver/nvidia/{name}").read_text()
        assert text and text in real
    modes = dict(row.split()[1:4:2][::-1] for row in h200.rows("proc-driver-tree.txt") if row.startswith("f "))
    for path, mode in modes.items():
        assert stat.S_IMODE(host.path(path).stat().st_mode) == int(mode, 8), path
    assert host.path("/sys/bus/pci/devices/0000:00:06.0/class").read_text() == "0x030200\n"
    assert ask(host, SURVEY) == [["00000000:00:06.0", h200.GPU.uuid, 0, "NVIDIA H200"]]
    need_nodes(host)
    nodes = {name: host.path(f"/dev/{name}").stat() for name in ("nvidia0", "nvidia-uvm", "nvidia-caps/nvidia-cap1")}
    assert [os.major(node.st_rdev) for node in nodes.values()] == [195, 238, 241]
    assert [stat.S_IMODE(node.st_mode) for node in nodes.values()] == [0o666, 0o666, 0o400]


def in_root(root: Path, *command: str) -> str:
    done = subprocess.run(["chroot", str(root), *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    return done.stdout


@needs_root
@pytest.mark.parametrize("flavour", ["debian", "lib64"])
def test_a_container_root_resolves_its_own(tmp_path: Path, flavour: roots.Flavour) -> None:
    root = roots.make_root(tmp_path / "root", flavour)
    assert (root / "etc/debian_version").exists() == (flavour == "debian")
    assert sum(one.lstat().st_size for one in root.rglob("*") if one.is_file()) < 12_000_000
    image, libc = in_root(root, "resolve", "-s", roots.IMAGE_LIBRARY, "libc.so.6").splitlines()
    name, path, identity = image.split()
    assert path == f"{roots.IMAGE_FOLDER}/{name}"
    assert identity == in_root(root, "stat", "-L", "-c", "%d:%i", path).strip()
    folder = roots.library_folder(flavour).removeprefix("/usr")
    assert libc.split()[1] == f"{folder}/libc.so.6"
    (root / "etc/ld.so.cache").unlink()
    if flavour == "debian":
        # Only the cache knows the image's library.
        assert "libimage.so.1 - " in in_root(root, "sh", "-c", "resolve libimage.so.1 || true")
    in_root(root, "ldconfig")
    in_root(root, "resolve", "libimage.so.1")


def test_a_root_names_the_missing_package(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.roots", str(tmp_path / "root")]
    environment = {"PATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode != 0 and "busybox-static" in done.stderr


@needs_root
def test_nvidia_smi_in_a_root_sees_the_gpus_whose_nodes_open(tmp_path: Path) -> None:
    """In a container NVML has no folder of its own: proc files and device rules decide, as with the real one."""
    host = build(tmp_path / "host", Host(gpus=gpus(2)))
    need_nodes(host)
    root = roots.make_root(tmp_path / "root")
    libraries = root / "usr/lib/x86_64-linux-gnu"
    for source, target in (
        (host.library("libnvidia-ml.so.1"), libraries / "libnvidia-ml.so.1"),
        (host.path("/usr/bin/nvidia-smi"), root / "usr/bin/nvidia-smi"),
    ):
        subprocess.run(["cp", "-a", str(source), str(target)], check=True)
    assert "Driver Not Loaded" in in_root(root, "sh", "-c", "nvidia-smi -L || true")
    subprocess.run(["cp", "-a", str(host.path("/proc/driver")), str(root / "proc")], check=True)
    for name in ("nvidiactl", "nvidia1"):
        subprocess.run(["cp", "-a", str(host.path(f"/dev/{name}")), str(root / "dev")], check=True)
    gpu = gpus(2)[1]
    assert in_root(root, "nvidia-smi", "-L") == f"GPU 0: {gpu.name} (UUID: {gpu.uuid})\n"

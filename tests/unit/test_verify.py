# SPDX-License-Identifier: Apache-2.0
"""hook/cuda.c as module and as program, against a libcuda without a GPU; hook/verify.py around it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hook import verify
from ldcache.errors import NvhookError

ELEMENTS = 1000003
HELLO = "Hello from GPU thread 0!\n"
UUID = "GPU-00112233-4455-6677-8899-aabbccddee{:02d}"
PROGRAM = Path(verify.__file__).parent / "bin/cuda-check"
STEPS = ["identify", "context", "jit", "alloc", "copy_in", "kernel", "copy_out", "check", "hello", "release"]
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-std=c11"]


def compile_library(output: Path, *flags: str) -> Path:
    source = Path(__file__).with_name("fakecuda.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", *flags, source, "-o", output], check=True)
    return output


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("fakecuda") / "libcuda.so.1")


@pytest.fixture(params=["module", "program"])
def check(request: pytest.FixtureRequest, library: Path) -> Any:
    """Runs the check in one of its two forms, and gives what `--json` prints."""

    def module(*devices: str, path: Path = library) -> Any:
        try:
            return verify.verify(list(devices) or None, str(path)).to_json()
        except NvhookError as error:
            return {"failures": [error.what], "devices": []}

    def program(*devices: str, path: Path = library) -> Any:
        arguments = [word for device in devices for word in ("--device", device)]
        done = run_program("--json", "--library", str(path), *arguments)
        report = json.loads(done.stdout)
        failed = report["failures"] or any(device["failures"] for device in report["devices"])
        assert done.returncode == (1 if failed else 0)
        assert done.stderr == ""
        return report

    return module if request.param == "module" else program


def run_program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def failures(report: Any) -> list[tuple[Any, ...]]:
    return [
        (item["step"], item["device"], item["call"], item["code"], item["name"], item["text"])
        for device in report["devices"]
        for item in device["failures"]
    ]


def test_good_device(check: Any) -> None:
    report = check()
    assert report["cuda"] == "12.4"
    assert list(report["ms"]) == ["load", "init"]
    assert report["failures"] == []
    [device] = report["devices"]
    assert (device["index"], device["name"]) == (0, 'Fake "GPU" 0')
    assert (device["uuid"], device["bus_id"]) == (UUID.format(0), "0000:17:00.0")
    assert (device["capability"], device["elements"]) == ("9.0", ELEMENTS)
    assert (device["hello"], device["log"]) == (HELLO, "")
    assert list(device["ms"]) == STEPS
    assert all(0 <= ms < 60000 for ms in device["ms"].values())


def test_every_device_each_with_its_own_context(check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAKECUDA_DEVICES", "3")
    monkeypatch.setenv("FAKECUDA_LOG", str(tmp_path / "log"))
    report = check()
    assert [device["uuid"] for device in report["devices"]] == [UUID.format(index) for index in range(3)]
    calls = Counter(line.rsplit(" ", 1)[0] for line in (tmp_path / "log").read_text().splitlines())
    # An index must mean nvidia-smi's GPU, and a compiler's cache would hide that the compiler is missing.
    assert calls["cuInit(0) CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_CACHE_DISABLE=1"] == 1
    assert calls["cuDevicePrimaryCtxRetain"] == calls["cuDevicePrimaryCtxRelease_v2"] == 3
    assert calls["cuMemAlloc_v2"] == calls["cuMemFree_v2"] == 9
    assert calls["cuModuleLoadDataEx"] == calls["cuModuleUnload"] == 3
    # Managed memory past what the GPU has can hang it.
    assert not any("Managed" in call for call in calls)


FAILING = [
    ("cuDeviceGet", "identify"),
    ("cuDeviceGetName", "identify"),
    ("cuDeviceGetUuid", "identify"),
    ("cuDeviceGetPCIBusId", "identify"),
    ("cuDeviceGetAttribute", "identify"),
    ("cuDevicePrimaryCtxRetain", "context"),
    ("cuCtxSetCurrent", "context"),
    ("cuModuleLoadDataEx", "jit"),
    ("cuModuleGetFunction", "jit"),
    ("cuMemAlloc", "alloc"),
    ("cuMemcpyHtoD", "copy_in"),
    ("cuLaunchKernel", "kernel"),
    ("cuCtxSynchronize", "kernel"),
    ("cuMemcpyDtoH", "copy_out"),
]


@pytest.mark.parametrize(("call", "step"), FAILING)
def test_failing_call_on_one_device(
    check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str, step: str
) -> None:
    monkeypatch.setenv("FAKECUDA_DEVICES", "3")
    monkeypatch.setenv("FAKECUDA_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAKECUDA_FAIL", f"{call}@1=2")
    report = check()
    assert failures(report) == [(step, 1, call, 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")]
    good, bad, last = report["devices"]
    assert (good["hello"], bad["hello"], last["hello"]) == (HELLO, "", HELLO)
    steps = STEPS[: STEPS.index(step) + 1]
    assert list(bad["ms"]) == (steps if step == "identify" else [*steps, "release"])
    calls = Counter(line.rsplit(" ", 1)[0] for line in (tmp_path / "log").read_text().splitlines())
    failed = call == "cuDevicePrimaryCtxRetain"
    assert calls["cuDevicePrimaryCtxRetain"] - failed == calls["cuDevicePrimaryCtxRelease_v2"]
    assert calls["cuMemAlloc_v2"] - (call == "cuMemAlloc") == calls["cuMemFree_v2"]


@pytest.mark.parametrize("call", ["cuMemFree", "cuModuleUnload", "cuDevicePrimaryCtxRelease"])
def test_failing_release(check: Any, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setenv("FAKECUDA_FAIL", f"{call}=700")
    report = check()
    assert {(item[0], item[2], item[4]) for item in failures(report)} == {
        ("release", call, "CUDA_ERROR_ILLEGAL_ADDRESS")
    }
    assert report["devices"][0]["hello"] == HELLO


def test_unknown_code(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_FAIL", "cuMemAlloc=4711")
    [failure] = failures(check())
    assert failure == ("alloc", 0, "cuMemAlloc", 4711, "error", "the driver has no text for this code")


def test_wrong_element(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_WRONG", "77")
    report = check()
    text = f"1 of {ELEMENTS} elements are wrong; the first, 77, is 212.75 and should be 211.75"
    assert failures(report) == [("check", 0, "nvhook_line", 0, "", text)]
    [device] = report["devices"]
    assert device["elements"] == ELEMENTS - 1
    assert device["hello"] == HELLO


@pytest.mark.parametrize("index", [0, ELEMENTS - 1])
def test_wrong_element_at_an_end(check: Any, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    monkeypatch.setenv("FAKECUDA_WRONG", str(index))
    [failure] = failures(check())
    assert f"the first, {index}, is" in failure[5]


def test_tail_not_run(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_NO_TAIL", "1")
    [failure] = failures(check())
    assert re.fullmatch(rf"67 of {ELEMENTS} elements are wrong; the first, 999936, is -?nan .*", failure[5])


def test_write_past_the_end(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_OVERRUN", "1")
    [failure] = failures(check())
    assert failure[:3] == ("check", 0, "nvhook_line")
    assert failure[5] == "byte 0 past the last element was overwritten"


@pytest.mark.parametrize("text", ["", "Hello from GPU thread 1!\n", "x" * 9999])
def test_wrong_greeting(check: Any, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FAKECUDA_HELLO", text)
    [failure] = failures(check())
    assert failure == ("hello", 0, "vprintf", 0, "", f"the device printed '{text[:200]}'")


def test_compiler_log(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_FAIL", "cuModuleLoadDataEx=218")
    report = check()
    assert failures(report) == [("jit", 0, "cuModuleLoadDataEx", 218, "CUDA_ERROR_INVALID_PTX", 'the PTX is "bad"')]
    assert report["devices"][0]["log"] == 'line 3; "fatal": bad\ttarget'


def test_driver_of_cuda_10(check: Any, tmp_path: Path) -> None:
    report = check(path=compile_library(tmp_path / "old.so", "-DOLD"))
    assert [device["uuid"] for device in report["devices"]] == [UUID.format(0)]
    assert failures(report) == []


def test_chosen_device(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_DEVICES", "3")
    assert [device["index"] for device in check("1")["devices"]] == [1]


# What fails before there is a device


DRIVER_FAILURES = [
    ("cuInit=803", "step init: cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803): versions differ", "reload the module"),
    ("cuDriverGetVersion=2", "step init: cuDriverGetVersion: CUDA_ERROR_OUT_OF_MEMORY (2)", "free device memory"),
    ("cuDeviceGetCount=4711", "step init: cuDeviceGetCount: error (4711)", "dmesg"),
]


@pytest.mark.parametrize(("setting", "what", "remedy"), DRIVER_FAILURES)
def test_driver_failure(library: Path, monkeypatch: pytest.MonkeyPatch, setting: str, what: str, remedy: str) -> None:
    monkeypatch.setenv("FAKECUDA_FAIL", setting)
    with pytest.raises(NvhookError) as caught:
        verify.verify(library=str(library))
    assert what in caught.value.what
    assert remedy in caught.value.remedy
    done = run_program("--library", str(library))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"cuda-check: error: {what}")


def test_no_device(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_DEVICES", "0")
    with pytest.raises(NvhookError, match=r"cuInit: CUDA_ERROR_NO_DEVICE \(100\): no device") as caught:
        verify.verify(library=str(library))
    assert "/dev/nvidia*" in caught.value.remedy


def test_no_library(tmp_path: Path) -> None:
    path = str(tmp_path / "libcuda.so.1")
    with pytest.raises(NvhookError, match=f"step load: dlopen: {path}: cannot open") as caught:
        verify.verify(library=path)
    assert caught.value.remedy == verify.NO_LIBRARY
    report = json.loads(run_program("--json", "--library", path).stdout)
    assert (report["cuda"], report["devices"]) == (None, [])
    assert [(item["call"], item["device"]) for item in report["failures"]] == [("dlopen", None)]


def test_library_without_a_function(tmp_path: Path) -> None:
    path = compile_library(tmp_path / "incomplete.so", "-DINCOMPLETE")
    with pytest.raises(NvhookError, match="step load: cuLaunchKernel: this library has no such function"):
        verify.verify(library=str(path))


def test_unknown_devices(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_DEVICES", "2")
    for name in ("2", "-1", "GPU-0", ""):
        with pytest.raises(NvhookError, match=f"CUDA shows no device '{name}'") as caught:
            verify.verify([name], str(library))
        assert caught.value.remedy == f"it shows 0 ({UUID.format(0)}), 1 ({UUID.format(1)})"
    done = run_program("--device", "2", "--library", str(library))
    assert "device 2, step identify: cuDeviceGet: CUDA_ERROR_INVALID_DEVICE (101)" in done.stderr


def test_device_by_uuid_once(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_DEVICES", "3")
    report = verify.verify([UUID.format(2), "0", "2"], str(library))
    assert [result.index for result in report.results] == [2, 0]
    assert report.good


# What people see


def test_program_for_people(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_program("--library", str(library))
    assert (done.returncode, done.stderr) == (0, "")
    first, _, device, _, vector, hello = done.stdout.splitlines(keepends=True)
    assert first == f"{library}: CUDA 12.4, devices: 1\n"
    assert device.endswith(f"{UUID.format(0)}, 0000:17:00.0, compute capability 9.0\n")
    assert vector == f"  vector kernel: {ELEMENTS} elements right\n"
    assert hello == HELLO


@pytest.mark.parametrize("words", [["--device"], ["--device", "x"], ["--device", ""], ["--help"], ["x"]])
def test_program_usage(words: list[str]) -> None:
    done = run_program(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: cuda-check ")


COMMAND = """
import argparse, sys
from hook import verify
parser = argparse.ArgumentParser()
verify.add_arguments(parser)
print("before")
status = verify.run(parser.parse_args())
print("after")
sys.exit(status)
"""


def run_command(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`nvhook verify` as a process of its own, its two outputs one pipe."""
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        cwd=tree,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_command(tree: Path, library: Path) -> None:
    done = run_command(tree, "--library", str(library))
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout
    assert re.fullmatch(r"driver \S+, CUDA 12.4, \S+/libcuda.so.1, devices: 1", lines[1])
    assert lines[0] == "before"
    assert lines[-3:] == [f"  vector kernel: {ELEMENTS} elements right", HELLO.strip(), "after"]


def test_command_with_failures(tree: Path, library: Path) -> None:
    done = run_command(tree, "--library", str(library), FAKECUDA_DEVICES="2", FAKECUDA_FAIL="cuModuleLoadDataEx@0=221")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    at = lines.index(
        "nvhook: error: device 0, step jit: cuModuleLoadDataEx: CUDA_ERROR_JIT_COMPILER_NOT_FOUND (221): "
        "no PTX compiler"
    )
    assert lines[at - 2].startswith("device 0: ")
    assert lines[at + 1].startswith("  remedy: libnvidia-ptxjitcompiler.so.1 of this driver's version is missing")
    assert HELLO.strip() in lines[at:]


def test_command_json(tree: Path, library: Path) -> None:
    done = run_command(
        tree, "--json", "--device", f"1,{UUID.format(0)}", "--library", str(library), FAKECUDA_DEVICES="2"
    )
    report = json.loads(done.stdout.removeprefix("before\n").removesuffix("after\n"))
    assert [device["index"] for device in report["devices"]] == [1, 0]


def test_closed_stdout(library: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", f"exec {PROGRAM} --library {library} >&-"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "step hello: dup(stdout): Bad file descriptor" in done.stderr


def test_interrupt_during_a_call(tree: Path, tmp_path: Path) -> None:
    """^C ends it even inside a C call that never returns."""
    source = tmp_path / "hang.c"
    source.write_text("#include <unistd.h>\nint cuInit(unsigned f) { (void)f; for (;;) pause(); }\n")
    fake = Path(__file__).with_name("fakecuda.c")
    hanging = tmp_path / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-DcuInit=cuInitOfFake"]
    subprocess.run(["cc", *flags, "-c", fake, "-o", tmp_path / "fake.o"], check=True)
    subprocess.run(["cc", "-shared", "-fPIC", source, tmp_path / "fake.o", "-o", hanging], check=True)
    log = tmp_path / "log"
    child = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "--library", str(hanging)],
        cwd=tree,
        env={**os.environ, "FAKECUDA_LOG": str(log)},
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until(log.exists)
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        assert child.wait(10) == -signal.SIGINT
    finally:
        child.kill()
        child.wait()


def wait_until(true: Any) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "nothing happened in 20 s"
        time.sleep(0.01)


DRIVER_TEXTS = {
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder)\n"
    "GCC version:  gcc version 12.2.0\n": "580.159.04",
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256.02  Thu May  2 14:37:44 UTC 2024\n": "470.256.02",
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.98  Thu May  2 14:37:44 UTC 2024\n": "535.98",
    "": None,
    "something else 580.1\n": None,
}


@pytest.mark.parametrize(("text", "version"), DRIVER_TEXTS.items())
def test_driver_version(tmp_path: Path, text: str, version: str | None) -> None:
    (tmp_path / "version").write_text(text)
    assert verify.driver_version(tmp_path / "version") == version


def test_driver_version_without_driver(tmp_path: Path) -> None:
    assert verify.driver_version(tmp_path / "version") is None


# The program's and the PTX's needs


def test_source_is_plain_c11(tree: Path, tmp_path: Path) -> None:
    for form in ("-DNV_STANDALONE", "-DNV_NOTHING"):
        subprocess.run(["cc", *STRICT, "-O2", form, "-c", tree / "hook/cuda.c", "-o", tmp_path / "x.o"], check=True)


def test_program_needs_no_newer_glibc() -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the symbol versions are those of x86-64")
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump (binutils)")
    listed = subprocess.run(["objdump", "-T", PROGRAM], capture_output=True, text=True, check=True).stdout
    versions = set(re.findall(r"\((GLIBC\w*[\d.]*)\)", listed))
    assert versions == {"GLIBC_2.2.5"}
    headers = subprocess.run(["objdump", "-p", PROGRAM], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"NEEDED\s+(\S+)", headers)) == {"libc.so.6", "libdl.so.2"}


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
def test_ptx_assembles(library: Path, tmp_path: Path, target: str) -> None:
    if shutil.which("ptxas") is None:
        pytest.skip("needs ptxas (CUDA toolkit)")
    text = tmp_path / "kernels.ptx"
    run_program("--library", str(library), FAKECUDA_PTX=str(text))
    command = ["ptxas", f"-arch={target}", "-Werror", str(text), "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if f"'{target}' is not defined for option" in done.stderr:
        pytest.skip(f"this ptxas doesn't know {target}")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_ptx_asks_for_little(library: Path, tmp_path: Path) -> None:
    text = tmp_path / "kernels.ptx"
    run_program("--library", str(library), FAKECUDA_PTX=str(text))
    assert text.read_text().splitlines()[:3] == [".version 6.0", ".target sm_50", ".address_size 64"]


# The container, as far as it needs no root


def test_root_starts_the_program(tmp_path: Path) -> None:
    verify.build_root(tmp_path / "root", PROGRAM)
    root = tmp_path / "root"
    names = {path.name for path in root.rglob("*") if path.is_file()}
    assert {"cuda-check", "libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"} <= names
    loader = next(path for path in root.rglob("ld-*.so*") if path.is_file())
    folder = next(path.parent for path in root.rglob("libc.so.6"))
    options = ["--inhibit-cache", "--library-path", str(folder), "--list"]
    command = [str(loader), *options, str(root / "cuda-check")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"libc.so.6 => {folder}/libc.so.6" in done.stdout
    assert (root / "lib64").readlink() == Path("usr/lib64")


def test_libraries_of_a_program_without_loader() -> None:
    """The launcher is static: it runs instead of listing anything."""
    with pytest.raises(NvhookError, match="launch does not start here: nvhook: error: "):
        verify.find_libraries(PROGRAM.with_name("launch"))


def test_config() -> None:
    config = verify.make_config("nvhook-verify-x", ["--json"], ["1", UUID.format(0)], ["/usr/bin/hook", "a"])
    assert config["process"]["args"] == ["/cuda-check", "--json"]
    assert f"NVIDIA_VISIBLE_DEVICES=1,{UUID.format(0)}" in config["process"]["env"]
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in config["process"]["env"]
    assert config["hooks"] == {"prestart": [{"path": "/usr/bin/hook", "args": ["/usr/bin/hook", "a"]}]}
    assert config["linux"]["resources"]["devices"] == [{"allow": False, "access": "rwm"}]
    everything = verify.make_config("nvhook-verify-x", [], None, ["/usr/bin/hook"])
    assert "NVIDIA_VISIBLE_DEVICES=all" in everything["process"]["env"]


def test_runtime_by_name_and_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NvhookError, match="neither runc nor crun is on PATH"):
        verify.find_runtime(None)
    with pytest.raises(NvhookError, match="kata is not on PATH") as caught:
        verify.find_runtime("kata")
    assert "--runtime" in caught.value.remedy
    for name in ("crun", "other"):
        (tmp_path / name).touch(mode=0o755)
    assert verify.find_runtime(None) == str(tmp_path / "crun")
    assert verify.find_runtime(str(tmp_path / "other")) == str(tmp_path / "other")


def test_in_container_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        pytest.skip("needs an ordinary user")
    with pytest.raises(NvhookError, match="only root can start a container"):
        verify.in_container()


def test_options() -> None:
    parser = argparse.ArgumentParser()
    verify.add_arguments(parser)
    args = parser.parse_args(["--device", "0", "--device", "1", "--in-container", "--runtime", "crun"])
    assert (args.device, args.in_container, args.runtime) == (["0", "1"], True, "crun")
    assert (args.library, args.json) == (None, False)

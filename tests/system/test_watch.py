# SPDX-License-Identifier: Apache-2.0
"""`cdi watch`: a daemon on a simulated host, woken by real kernel events and real changes in folders."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cdi import cli, events, reader, refresh, registry, watch
from cdi.host.store import Options
from ldcache.errors import NvhookError
from tests import simhost
from tests.cdihost import LAUNCHER, TREE, Host


@pytest.fixture
def host(tmp_path: Path) -> Host:
    made = Host(tmp_path)
    made.high.unlink()
    return made


@pytest.fixture
def start(host: Host) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts daemons, and ends them."""
    started = []

    def begin(*words: str, **others: Any) -> subprocess.Popen[str]:
        started.append(host.watch(*words, **others))
        return started[-1]

    yield begin
    for process in started:
        process.terminate()
        assert process.wait(timeout=20) in (0, -signal.SIGKILL)


def until(true: Callable[[], bool], host: Host, seconds: float = 30) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, host.log()
        time.sleep(0.02)


def names(host: Host) -> list[str]:
    """The devices in the file; none where there is no file."""
    if not host.high.exists():
        return []
    return [device["name"] for device in json.loads(host.high.read_text())["devices"]]


def remove_driver(host: Host) -> None:
    """As after `rmmod nvidia`."""
    shutil.rmtree(host.simulated.path("/proc/driver/nvidia"))


def build(host: Host, **others: Any) -> None:
    """Load the driver again, or another one."""
    simhost.build(host.folder, simhost.Host(**{"gpus": simhost.gpus(2), "graphics": False, **others}))


def test_a_file_comes_with_the_driver_and_goes_with_it(host: Host, start: Callable[..., Any]) -> None:
    remove_driver(host)
    process = start()
    until(lambda: "no driver is loaded" in host.log(), host)
    assert process.poll() is None
    build(host)
    until(lambda: len(names(host)) == 5, host)
    assert host.high.stat().st_mode & 0o777 == 0o644
    # A GPU more, and no event for it but the clock's.
    build(host, gpus=simhost.gpus(3))
    until(lambda: len(names(host)) == 7, host)
    remove_driver(host)
    until(lambda: "no driver is loaded: /var/run/cdi/nvidia.yaml is removed" in host.log(), host)
    assert not host.high.exists()
    assert host.log().count("is removed") == 1
    build(host)
    until(lambda: len(names(host)) == 5, host)


def test_a_file_that_somebody_takes_away_or_replaces(host: Host, start: Callable[..., Any]) -> None:
    start("--interval", "600")
    until(lambda: len(names(host)) == 5, host)
    host.high.unlink()
    until(lambda: len(names(host)) == 5, host)
    spec = host.spec()
    spec["containerEdits"]["hooks"][0] |= {"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook"]}
    host.write(spec)
    until(lambda: "nvhook" in json.dumps(host.spec()), host)
    assert "it was made by NVIDIA's toolkit" in host.log()


def test_a_library_that_changes(host: Host, start: Callable[..., Any]) -> None:
    """Heard by inotify: the clock is set to ten minutes."""
    start("--interval", "600")
    until(lambda: len(names(host)) == 5, host)
    library = host.simulated.library("libnvidia-opencl.so.1")
    shutil.copy(library, library.with_name("copy"))
    library.unlink()
    until(lambda: str(library.name) not in host.high.read_text(), host)
    # It is said after the file is there.
    until(lambda: "has no more" in host.log(), host)
    assert f"{library.name}" in host.log()


def test_a_library_that_everything_needs_is_waited_for(host: Host, start: Callable[..., Any]) -> None:
    """A driver that is being replaced has none for a moment; no file without it takes the old one's place."""
    start("--interval", "600")
    until(lambda: len(names(host)) == 5, host)
    before = host.high.read_bytes()
    library = host.simulated.library("libnvidia-ml.so.1")
    kept = library.rename(library.with_name("kept"))
    until(lambda: "error nvhook[watch] -: no libnvidia-ml.so.1 of the loaded driver" in host.log(), host)
    assert host.high.read_bytes() == before
    # Another one is missing too when this one is there again, so that the file has to be another.
    host.simulated.library("libnvidia-opencl.so.1").unlink()
    kept.rename(library)
    until(lambda: "libnvidia-opencl" not in host.high.read_text(), host)
    assert library.name in host.high.read_text()


def a_pci_device() -> str | None:
    return next(iter(glob.glob("/sys/bus/pci/devices/*/uevent")), None)


@pytest.mark.skipif(a_pci_device() is None, reason="needs a PCI device, to let the kernel send an event of it")
def test_a_kernel_event_wakes_it(host: Host, start: Callable[..., Any]) -> None:
    start("--interval", "600")
    until(lambda: len(names(host)) == 5, host)
    bus = host.simulated.path("/proc/driver/nvidia/gpus") / "0000:18:00.0"
    # A GPU without a node is nothing that a folder tells of. On a busy machine the look for the build takes longer.
    for pause in (1.5, 5, 15):
        build(host, gpus=simhost.gpus(2), caps_major=506)
        until(lambda: len(names(host)) == 5, host)
        time.sleep(pause)
        shutil.rmtree(bus)
        time.sleep(0.5)
        if len(names(host)) == 5:
            break
    assert len(names(host)) == 5
    Path(str(a_pci_device())).write_text("change")
    until(lambda: len(names(host)) == 3, host)
    until(lambda: "has no more device 1" in host.log(), host)


@pytest.mark.skipif(a_pci_device() is None, reason="needs a PCI device, to let the kernel send an event of it")
def test_only_the_kernel_is_believed() -> None:
    heard = events.Uevents()
    try:
        forged = b"change@/x\0ACTION=change\0DEVPATH=/x\0SUBSYSTEM=pci\0"
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, events.NETLINK_KOBJECT_UEVENT) as other:
            other.bind((0, 0))
            other.sendto(forged, (0, events.KERNEL_GROUP))
        Path(str(a_pci_device())).write_text("change")
        end = time.monotonic() + 10
        found: list[bytes | None] = []
        # The forged one was sent first. Other devices of the machine may have events too.
        while not any(path is not None and b"/pci" in path for path in found) and time.monotonic() < end:
            found += [one.get(b"DEVPATH") for one in heard.read()]
        assert any(path is not None and b"/pci" in path for path in found)
        assert b"/x" not in found
    finally:
        heard.close()


READER = """
import sys, time
from cdi import registry
end = time.monotonic() + float(sys.argv[2])
count = 0
while time.monotonic() < end:
    found = registry.scan([sys.argv[1]], registry.load_plain)
    assert not found.failed and len(found.devices) in (5, 7), (found.failed, len(found.devices))
    count += 1
print(count)
"""


def test_fifty_readers_never_meet_half_a_file(host: Host) -> None:
    host.generate(host.high)
    words = [sys.executable, "-c", READER, str(host.high.parent), "4"]
    readers = [
        subprocess.Popen(words, cwd=TREE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(50)
    ]
    replaced = 0
    while any(process.poll() is None for process in readers):
        build(host, gpus=simhost.gpus(2 + replaced % 2))
        words = ["watch", "--once", "--host-root", str(host.folder), "--hook-path", LAUNCHER, "--nvml", "never"]
        assert cli.main(words) == 0
        replaced += 1
    for process in readers:
        printed, said = process.communicate()
        assert process.returncode == 0, said
        assert int(printed) > 0
    assert replaced > 1


def test_a_full_disk_keeps_the_old_file(host: Host, start: Callable[..., Any]) -> None:
    folder = host.high.parent
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=True)
    try:
        start()
        until(lambda: len(names(host)) == 5, host)
        old = host.high.read_bytes()
        with pytest.raises(OSError, match="No space left"), (folder / "fill").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        build(host, gpus=simhost.gpus(3))
        until(lambda: "No space left on device" in host.log(), host)
        assert host.high.read_bytes() == old
        assert {path.name for path in folder.iterdir()} == {"nvidia.yaml", "fill"}
        (folder / "fill").unlink()
        until(lambda: len(names(host)) == 7, host)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_read_only_folder_keeps_it_trying(host: Host, start: Callable[..., Any]) -> None:
    folder = host.high.parent
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], check=True)
    try:
        process = start()
        until(lambda: "Read-only file system" in host.log(), host)
        time.sleep(2)
        assert process.poll() is None
        assert host.log().count("Read-only file system") == 1
        subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
        until(lambda: len(names(host)) == 5, host)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("count", [8, pytest.param(30, marks=pytest.mark.long)])
def test_killed_at_any_time(host: Host, start: Callable[..., Any], count: int) -> None:
    """The file is a whole one, the next daemon goes on, and nothing is left behind."""
    host.generate(host.high)
    pick = random.Random(count)
    for number in range(count):
        build(host, gpus=simhost.gpus(2 + number % 2))
        process = start()
        time.sleep(pick.uniform(0.05, 1.5))
        process.kill()
        process.wait()
        assert len(names(host)) in (5, 7)
    build(host, gpus=simhost.gpus(4))
    start()
    until(lambda: len(names(host)) == 9, host)
    until(lambda: [path.name for path in host.high.parent.iterdir()] == ["nvidia.yaml"], host)


def test_a_name_that_only_nvml_tells_is_not_lost(host: Host, start: Callable[..., Any]) -> None:
    """The UUIDs are known no more, and all nodes are still there: the fuller file stays, and it is said once."""
    host.generate(host.high)
    old = host.high.read_bytes()
    unknown = tuple(simhost.Gpu(one.bus_id, one.minor, one.uuid, known=False) for one in simhost.gpus(2))
    build(host, gpus=unknown)
    for path in host.simulated.path("/run/nvhook").iterdir():
        path.unlink()
    process = start()
    until(lambda: "the new one would lack GPU-" in host.log(), host)
    time.sleep(1)
    assert process.poll() is None
    assert host.high.read_bytes() == old
    assert host.log().count("would lack") == 1
    build(host)
    until(lambda: reader.load(str(host.high)).problems() == [], host)


def test_one_at_a_time_and_systemd_is_told(host: Host, start: Callable[..., Any], tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        path = Path("/tmp") / f"nvhook-{os.getpid()}"
        manager.bind(str(path))
        manager.settimeout(30)
        try:
            process = start(env={**os.environ, "NOTIFY_SOCKET": str(path)})
            assert manager.recv(4096).decode().startswith("STATUS=")
            assert manager.recv(4096) == b"READY=1"
            assert len(names(host)) == 5
            second = host.watch("--once")
            assert second.wait(timeout=20) == 1
            assert "another cdi watch holds" in host.log()
            process.terminate()
            assert process.wait(timeout=20) == 0
            said = [manager.recv(4096)]
            while said[-1] != b"STOPPING=1":
                said.append(manager.recv(4096))
        finally:
            path.unlink()


def test_nothing_of_the_driver_stays_open(host: Host, start: Callable[..., Any]) -> None:
    process = start()
    until(lambda: len(names(host)) == 5, host)
    time.sleep(0.5)

    def opened() -> list[str]:
        found = []
        for path in glob.glob(f"/proc/{process.pid}/fd/*"):
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(path))
        return [path for path in found if "nvidia" in path.removeprefix(str(host.folder))]

    # Each tick has some open for a moment.
    until(lambda: opened() == [], host)
    assert "libnvidia" not in Path(f"/proc/{process.pid}/maps").read_text()


def test_the_clock() -> None:
    clock = watch.Clock(10.0, 1.0)
    clock.tick = 10.0
    assert clock.wait(0.0) == 10.0
    clock.ask(0.0)
    clock.ask(0.5)
    assert clock.wait(0.5) == 1.0
    for tenth in range(5, 100):
        clock.ask(tenth / 10)
    # However long it goes on.
    assert clock.due == 10.0
    clock.tick = 1000.0
    pauses = []
    for _ in range(8):
        clock.done(100.0, right=False)
        pauses.append(clock.wait(100.0))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    clock.done(100.0, right=True)
    assert clock.wait(100.0) == 900.0
    assert clock.retry == 1.0


def test_wrong_use(tmp_path: Path) -> None:
    for words in (["--quiet", "-1"], ["--output", "x.txt"], ["--interval", "x"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["watch", *words])
        assert ended.value.code == 2
    with pytest.raises(NvhookError, match="cannot open"):
        events.lock(tmp_path / "none", "lock")
    assert registry.FOLDERS[-1] == "/var/run/cdi"


def test_the_log_has_the_form_of_all_logs(host: Host, start: Callable[..., Any]) -> None:
    start("--debug", "--interval", "600")
    until(lambda: len(names(host)) == 5, host)
    until(lambda: "is written" in host.log(), host)
    form = re.compile(r"\d{4}-\d\d-\d\dT\S+Z (debug|info|warning) nvhook\[watch\] -: .+")
    lines = host.log().splitlines()
    assert all(form.fullmatch(line) for line in lines), lines
    assert any(" debug nvhook[watch] -: a look: " in line for line in lines)


def test_in_the_journal_a_line_has_its_level_and_no_time(host: Host, start: Callable[..., Any]) -> None:
    start("--interval", "600", env=os.environ | {"JOURNAL_STREAM": "8:1"})
    until(lambda: "is written" in host.log(), host)
    lines = host.log().splitlines()
    assert all(re.match(r"<[346]>nvhook\[watch\] -: ", line) for line in lines), lines


def test_what_can_not_be_swept_stops_no_sweep(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f".nvidia.yaml.{number}.tmp").mkdir()
    (tmp_path / ".nvidia.yaml.20.tmp").touch()
    refresh.clean(tmp_path / "nvidia.yaml")
    assert not (tmp_path / ".nvidia.yaml.20.tmp").exists()
    assert len(os.listdir(tmp_path)) == 20


def test_what_was_said_is_not_remembered_for_good(tmp_path: Path) -> None:
    """A line that is the case is said once; but lines may differ each time, and the daemon runs for months."""
    said: list[str] = []
    made = refresh.Refresh(tmp_path / "x.yaml", [], Options(str(tmp_path)), lambda level, line: said.append(line))
    edits = {"hooks": [{"hookName": "createContainer", "path": "/usr/bin/nvhook-create-container"}]}
    devices = [{"name": "0", "containerEdits": edits}]
    text = json.dumps({"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": devices})
    for number in (0, *range(2 * refresh.TOLD_MAX), 0):
        made.output = tmp_path / f"{number}.yaml"
        made.output.write_text(text)
        # Without a driver, each of its looks takes such a file away.
        assert made.run() is False
    made.close()
    assert len(said) == len(set(said)) + 1
    assert said[0] == said[-1]


def test_roots_folder_of_mps_is_noticed_and_tmp_not_watched(host: Host, start: Callable[..., Any]) -> None:
    """Everybody's files in /tmp would wake the daemon without end."""
    tmp = host.simulated.path("/tmp")
    tmp.mkdir(exist_ok=True)
    start("--debug")
    until(lambda: len(names(host)) == 5, host)
    made = refresh.Refresh(host.high, [], Options(str(host.folder)), lambda level, line: None)
    assert made.folders() and str(tmp) not in made.folders()
    made.close()
    (tmp / "nvidia-mps").mkdir()
    until(lambda: "/tmp/nvidia-mps" in host.high.read_text(), host)
    assert "a look: /tmp/nvidia-mps" in host.log()

# SPDX-License-Identifier: Apache-2.0
"""cdi.host.nvml: what NVML tells, and what is left when it does not, against a simulated libnvidia-ml."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cdi.host import fingerprint, inventory, nvml, store
from cdi.host.store import Options
from ldcache import root
from tests.simhost import Call, Fault, Gpu, Host, Nvml, SimulatedHost, build, elfwriter, gpus

TREE = Path(__file__).resolve().parents[2]
KNOWN = gpus(4)
UNKNOWN = tuple(Gpu(one.bus_id, one.minor, one.uuid, known=False) for one in KNOWN)
BUS_IDS = [one.bus_id for one in KNOWN]
UUIDS = [one.uuid for one in KNOWN]

# Long enough for an interpreter to start on a busy machine, short enough to wait for in a test.
TIMEOUT = 2.0


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return build(tmp_path / "host", Host(gpus=UNKNOWN, graphics=False))


@pytest.fixture
def folder(host: SimulatedHost) -> Iterator[int]:
    """Where the inventory is kept, and what NVML hung on."""
    fd = root.open_root(str(host.root))
    opened = store.make_folder(fd, str(host.root))
    yield opened
    os.close(opened)
    os.close(fd)


def look(host: SimulatedHost, folder: int | None = None, mode: str = "auto") -> dict[str, Any]:
    return inventory.gather(Options(str(host.root), nvml=mode, nvml_timeout=TIMEOUT), folder)


def said(found: dict[str, Any]) -> list[str]:
    """What the inventory says of NVML."""
    return [text for text in found["warnings"] if "NVML" in text]


def uuids(found: dict[str, Any]) -> list[str | None]:
    return [gpu["uuid"] for gpu in found["gpus"]]


def indexes(found: dict[str, Any]) -> dict[int, str | None]:
    """UUIDs of the GPUs that are offered, by index."""
    return {gpu["index"]: gpu["uuid"] for gpu in found["gpus"]}


def asked(calls: tuple[Call, ...]) -> set[int]:
    """NVML's indexes of the GPUs that any call was about."""
    return {call.gpu for call in calls if call.gpu >= 0}


def test_it_tells_what_the_kernel_does_not(host: SimulatedHost) -> None:
    found = look(host)
    assert (uuids(found), found["driver"]["cuda"], said(found)) == (UUIDS, "13.0", [])


def test_only_unknown_gpus_are_asked_about(tmp_path: Path) -> None:
    """Asking wakes a GPU: 2 s each without persistence mode."""
    host = build(tmp_path, Host(gpus=(KNOWN[0], UNKNOWN[1], KNOWN[2]), graphics=False))
    assert uuids(look(host)) == UUIDS[:3]
    assert asked(host.nvml_calls()) == {1}


def test_it_is_not_started_where_all_is_known(tmp_path: Path) -> None:
    host = build(tmp_path, Host(gpus=KNOWN, graphics=False))
    assert uuids(look(host)) == UUIDS
    assert host.nvml_calls() == ()
    found = look(host, mode="always")
    assert found["driver"]["cuda"] == "13.0" and asked(host.nvml_calls()) == {0, 1, 2, 3}


def test_never(host: SimulatedHost) -> None:
    assert uuids(look(host, mode="never")) == [None] * 4
    assert host.nvml_calls() == ()


def test_our_indexes_are_nvmls(tmp_path: Path) -> None:
    cards = (
        Gpu("0001:01:00.0", 0, "GPU-00000003-0000-0000-0000-000000000000"),
        Gpu("0000:c1:00.0", 3, "GPU-00000002-0000-0000-0000-000000000000", powered=False),
        Gpu("0000:81:00.0", 4, "GPU-00000001-0000-0000-0000-000000000000", excluded=True),
        Gpu("0000:0a:00.0", 2, "GPU-00000000-0000-0000-0000-000000000000"),
    )
    host = build(tmp_path, Host(gpus=cards, graphics=False))
    text = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)\n"
        "import pynvml; pynvml.nvmlInit()\n"
        "for uuid in sys.argv[2:]:\n"
        "    print(pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid)))"
    )
    found = {gpu["uuid"]: gpu["index"] for gpu in look(host)["gpus"]}
    command = [sys.executable, "-c", text, str(host.library("libnvidia-ml.so.1")), *found]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [int(line) for line in done.stdout.split()] == list(found.values())


def test_a_slow_gpu_has_its_own_deadline(host: SimulatedHost, folder: int) -> None:
    """Four GPUs together may take longer than one may."""
    host.set_nvml(Nvml(faults=(Fault("nvmlDeviceGetHandleByPciBusId", delay_ms=int(TIMEOUT * 400)),)))
    found = look(host, folder)
    assert (uuids(found), said(found)) == (UUIDS, [])


def test_one_bad_gpu_does_not_stop_the_others(host: SimulatedHost, folder: int) -> None:
    host.set_nvml(Nvml(faults=(Fault("nvmlDeviceGetHandleByPciBusId", gpu=1, result=15),)))
    found = look(host, folder)
    assert indexes(found) == {0: UUIDS[0], 2: UUIDS[2], 3: UUIDS[3]}
    assert found["faults"] == [{"bus_id": BUS_IDS[1], "reason": "NVML says: GPU is lost"}]
    # It answered, so there is nothing to leave alone.
    assert not host.path("/run/nvhook/nvml.json").exists()


@pytest.mark.parametrize(
    ("action", "reason"),
    [("hang", f"did not answer within {TIMEOUT:g} s"), ("crash", "died of signal 11")],
)
def test_a_gpu_that_takes_nvml_down_is_named_and_left_alone(
    host: SimulatedHost, folder: int, action: Any, reason: str
) -> None:
    host.set_nvml(Nvml(faults=(Fault("nvmlDeviceGetUUID", gpu=1, action=action),)))
    found = look(host, folder)
    assert indexes(found) == {0: UUIDS[0], 2: UUIDS[2], 3: UUIDS[3]}
    assert found["faults"] == [{"bus_id": BUS_IDS[1], "reason": f"NVML {reason} when asked about it"}]
    host.clear_nvml_calls()
    start = time.monotonic()
    again = look(host, folder)
    assert time.monotonic() - start < TIMEOUT
    assert asked(host.nvml_calls()) == {0, 2, 3} and indexes(again) == indexes(found)
    (fault,) = again["faults"]
    assert fault["bus_id"] == BUS_IDS[1]
    assert fault["reason"].startswith(f"NVML {reason} when asked about it, and is not asked again for ")
    # A person who insists is not told to wait; and a GPU that answers is forgiven.
    host.set_nvml(Nvml())
    assert uuids(look(host, folder, mode="always")) == UUIDS
    assert uuids(look(host, folder)) == UUIDS


def test_a_hanging_child_is_killed(host: SimulatedHost, folder: int) -> None:
    host.set_nvml(Nvml(faults=(Fault("nvmlDeviceGetUUID", gpu=0, action="hang"),)))
    look(host, folder)
    for pid in {call.pid for call in host.nvml_calls()}:
        assert not os.path.exists(f"/proc/{pid}")


def test_the_child_gains_no_privileges(host: SimulatedHost) -> None:
    host.set_nvml(Nvml(faults=(Fault("nvmlDeviceGetUUID", gpu=0, action="hang"),)))
    looking = threading.Thread(target=look, args=(host,))
    looking.start()
    try:
        while not asked(host.nvml_calls()):
            time.sleep(0.01)
        status = Path(f"/proc/{host.nvml_calls()[0].pid}/status").read_text()
    finally:
        looking.join()
    assert "NoNewPrivs:\t1\n" in status


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (
            Fault("nvmlInit", result=18),
            "NVML can't tell about the driver: RM has detected an NVML/RM version mismatch.",
        ),
        (Fault("nvmlInit", action="crash"), "NVML died of signal 11 when asked about the driver"),
        (Fault("nvmlInit", action="hang"), f"NVML did not answer within {TIMEOUT:g} s when asked about the driver"),
    ],
)
def test_nvml_that_does_not_start(host: SimulatedHost, folder: int, fault: Fault, reason: str) -> None:
    host.set_nvml(Nvml(faults=(fault,)))
    found = look(host, folder)
    assert uuids(found) == [None] * 4
    (text,) = said(found)
    assert text.partition(":")[0] == reason.partition(":")[0]
    if fault.action != "return":
        host.clear_nvml_calls()
        (text,) = said(look(host, folder))
        assert text.startswith("NVML is not asked about the driver for ")
        assert text.endswith(f": it {reason.removeprefix('NVML ').partition(' when')[0]}")
        assert host.nvml_calls() == ()


def test_without_a_library_it_is_not_asked(host: SimulatedHost) -> None:
    host.library("libnvidia-ml.so.1").unlink()
    found = look(host)
    assert said(found) == ["NVML is not asked: libnvidia-ml.so.580.159.04 is in no library folder"]


def test_a_library_that_does_not_load(host: SimulatedHost) -> None:
    """A stub has the right name, and none of the functions."""
    library = host.library("libnvidia-ml.so.1")
    library.write_bytes(elfwriter.shared_object("libnvidia-ml.so.1"))
    (text,) = said(look(host))
    assert text.startswith("NVML can't tell about the driver: ")


def test_the_library_asked_is_the_driver_roots(tmp_path: Path) -> None:
    """Not the one that the loader of this machine would find, nor another root's."""
    other = build(tmp_path / "other", Host(gpus=(), graphics=False))
    host = build(tmp_path / "host", Host(gpus=UNKNOWN, driver_root="/drv", dev_root="/drv", graphics=False))
    found = inventory.gather(Options(str(host.root), driver_root="/drv", nvml_timeout=TIMEOUT))
    assert uuids(found) == UUIDS
    assert host.nvml_calls() and not other.nvml_calls()


def test_what_the_driver_prints_is_not_taken_for_an_answer(host: SimulatedHost) -> None:
    """Only whole lines of ours count, and stdout is not the channel."""
    words = [sys.executable, "-I", "-S", "-B", "-c", nvml.CHILD]
    places = "\n".join(place for place in sys.path if place.startswith("/"))
    library = str(host.library("libnvidia-ml.so.1"))
    done = subprocess.run([*words, places, str(os.getpid()), library, BUS_IDS[0]], capture_output=True, check=True)
    lines = done.stdout.decode().splitlines()
    assert lines == [
        '{"cuda": 13000}',
        f'{{"asking": "{BUS_IDS[0]}"}}',
        f'{{"gpu": "{BUS_IDS[0]}", "uuid": "{UUIDS[0]}"}}',
        f'{{"gpu": "{BUS_IDS[0]}", "arch": "9.0", "brand": "Nvidia"}}',
        f'{{"gpu": "{BUS_IDS[0]}", "mig_mode": false, "mig": []}}',
        '{"done": true}',
    ]
    assert done.stderr == b""


def test_a_gpu_that_nvml_does_not_know(tmp_path: Path) -> None:
    card = Gpu("0000:10:00.0", 0, UUIDS[0], known=False)
    host = build(tmp_path, Host(gpus=(card,), graphics=False))
    information = host.path("/proc/driver/nvidia/gpus/0000:10:00.0")
    information.rename(information.with_name("0000:99:00.0"))
    found = look(host)
    assert uuids(found) == [None]
    assert said(found) == ["NVML can't tell about GPU 0000:99:00.0: Not Found"]


# --- the back-off


def test_the_pause_doubles_up_to_an_hour(folder: int) -> None:
    back_off = nvml.BackOff(folder, "boot")
    lefts = []
    for _ in range(9):
        back_off.blame("0000:10:00.0", "died of signal 11")
        lefts.append(round(nvml.BackOff(folder, "boot").left("0000:10:00.0")))
    assert lefts == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    assert nvml.BackOff(folder, "boot").left("0000:18:00.0") == 0
    back_off.forgive("0000:10:00.0")
    assert nvml.BackOff(folder, "boot").left("0000:10:00.0") == 0


def test_the_pause_ends(folder: int) -> None:
    back_off = nvml.BackOff(folder, "boot")
    back_off.blame("0000:10:00.0", "died of signal 11")
    back_off.failures["0000:10:00.0"][1] = fingerprint.now() - nvml.FIRST_BACK_OFF - 1
    assert back_off.left("0000:10:00.0") == 0


def test_another_boot_starts_anew(folder: int) -> None:
    nvml.BackOff(folder, "boot").blame("0000:10:00.0", "died of signal 11")
    assert nvml.BackOff(folder, "another").left("0000:10:00.0") == 0


# As releases wrote it that did not keep why.
OLDER = b'{"boot_id": "boot", "failures": {"x": [1, 5.0]}}'


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"boot_id": "boot", "failures": {"x": 1}}', OLDER, b"\xff"])
def test_a_broken_memory_is_none(folder: int, content: bytes) -> None:
    store.write_own(folder, nvml.BACK_OFF_FILE, content)
    assert nvml.BackOff(folder, "boot").failures == {}


def test_without_a_folder_nothing_is_remembered() -> None:
    back_off = nvml.BackOff(None, "boot")
    back_off.blame("0000:10:00.0", "died of signal 11")
    assert nvml.BackOff(None, "boot").failures == {}


@pytest.mark.parametrize(
    "line",
    [
        b"garbage",
        b"[1, 2]",
        b'{"uuid": 7}',
        b'{"cuda": "13"}',
        b'{"gpu": "a", "mig": [[0, 1, 0, "MIG-1"]]}',
        b'{"gpu": "a", "mig_mode": 1}',
        b'{"more": "x"}',
        b"\xff",
        b'{"asking": ' + b"[" * 100_000,
    ],
)
def test_a_line_that_is_none_of_ours(line: bytes) -> None:
    """NVML runs in the child, and may have written over its memory."""
    assert nvml.parse(line) is None


def test_the_longest_pause_comes_and_stays() -> None:
    back_off = nvml.BackOff(None, "boot")
    back_off.failures["gpu"] = [5000, fingerprint.now()]
    assert 0 < back_off.left("gpu") <= nvml.LAST_BACK_OFF


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_hanging_child_goes_with_its_parent(host: SimulatedHost, number: int) -> None:
    """And it keeps nothing open that its parent inherited, such as a script's lock."""
    host.set_nvml(Nvml(faults=(Fault("nvmlInit", action="hang"),)))
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "hook", "inventory", "--refresh", "--nvml", "always", "--nvml-timeout", "60"]
    parent = subprocess.Popen([*command, "--host-root", str(host.root)], pass_fds=[writing], stdout=subprocess.DEVNULL)
    os.close(writing)
    wait_for(lambda: bool(host.nvml_calls()))
    (pid,) = {call.pid for call in host.nvml_calls()}
    parent.send_signal(number)
    parent.wait(10)
    wait_for(lambda: not is_alive(pid))
    # End of file: nobody holds the other end.
    os.set_blocking(reading, False)
    assert os.read(reading, 1) == b""
    os.close(reading)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether there is such a process, other than one that nobody has reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        # Gone, or gone between the opening and the reading.
        return False


SAYING = """
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
static void say(const char *text) { for (int fd = 3; fd < 10; fd++) (void)!write(fd, text, strlen(text)); }
__attribute__((constructor)) static void loaded(void)
{
    int file = open(PID_FILE, O_WRONLY | O_CREAT, 0644);
    dprintf(file, "%%d", getpid());
    close(file);
    signal(SIGPIPE, SIG_IGN);
    %s
}
"""
ENDLESS = 'for (;;) say("{\\"error\\": \\"once more\\"}\\n");'
HUGE = "static char text[1 << 17]; memset(text, 'x', sizeof text - 1); for (;;) say(text);"
TRICKLE = 'for (;;) { say("x"); usleep(300000); }'
SILENT = "for (int fd = 3; fd < 10; fd++) close(fd); for (;;) pause();"


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        (ENDLESS, "said nonsense"),
        (HUGE, "said nonsense"),
        (TRICKLE, "did not answer within 1 s"),
        (SILENT, "stopped answering"),
        ('say("garbage\\n"); pause();', "said nonsense"),
    ],
    ids=["endless", "huge", "trickle", "silent", "garbage"],
)
def test_a_library_gone_wild(tmp_path: Path, body: str, failure: str) -> None:
    """Whatever its process does, the conversation ends, in time, and the process with it."""
    source, library, pid = tmp_path / "wild.c", tmp_path / "libnvidia-ml.so.1", tmp_path / "pid"
    source.write_text(SAYING % body)
    subprocess.run(["cc", "-w", "-shared", "-fPIC", f'-DPID_FILE="{pid}"', "-o", library, source], check=True)
    start = time.monotonic()
    answer = nvml.ask(str(library), [BUS_IDS[0]], 1.0, nvml.BackOff(None, "boot"))
    assert time.monotonic() - start < 5
    assert (answer.uuids, answer.warnings[-1]) == ({}, f"NVML {failure} when asked about the driver")
    # Five lines may come of a child that is asked about one GPU, and one says that it failed.
    assert len(answer.warnings) <= 7
    wait_for(lambda: not is_alive(int(pid.read_text())))

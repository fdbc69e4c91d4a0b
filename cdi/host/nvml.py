# SPDX-License-Identifier: Apache-2.0
"""Asking NVML, which may take seconds, crash, or hang in the kernel for good.

So it is asked in a child process, and only about GPUs whose UUID the kernel does not tell. The child prints
one JSON line before it turns to a GPU and one with what it learned, so that nothing learned is lost. Each of
its answers has a deadline. At the deadline it is killed and given up, never waited for: a process that hangs
in a driver call takes no signal. The GPU that it was asking about is left out, remembered and left alone for a
while; a new child asks about the rest.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cdi.host import fingerprint, gpus, store
from ldcache import kernel

# Its own sys.path comes as an argument: -S leaves it none, and pynvml is wherever our caller found it.
CHILD = "import sys; sys.path[:0] = sys.argv.pop(1).split('\\n'); from cdi.host.nvml import child; child(sys.argv[1:])"

BACK_OFF_FILE = "nvml.json"
BACK_OFF_MAX = 65536
LINE_MAX = 65536
FIRST_BACK_OFF = 60.0
LAST_BACK_OFF = 3600.0
# NVML as a whole, where it hung or died before it came to a GPU.
ITSELF = "nvml"

# nvmlBrandType_t as libnvidia-container writes it, which is how images ask for it.
BRANDS = {
    0: "Unknown",
    1: "Quadro",
    2: "Tesla",
    3: "NVS",
    4: "GRID",
    5: "GeForce",
    6: "TITAN",
    7: "VApps",
    8: "VPC",
    9: "VCS",
    10: "VWS",
    11: "CloudGaming",
    12: "QuadroRTX",
    13: "NvidiaRTX",
    14: "Nvidia",
    15: "GeForceRTX",
    16: "TitanRTX",
}

# nvmlReturn_t (nvml.h) of a GPU that can't be used: insufficient power, timeout, interrupts that don't arrive, lost,
# reset required.
SICK = (8, 10, 11, 15, 16)
# Of a handle every other result means that too, but for: no permission, not found.
NOT_SICK = (4, 6)

# After so many GPUs that it hung on, NVML is asked about no further one: a driver that hangs altogether would cost a
# deadline for each GPU, and a start waits for this.
HANGS_MAX = 2

# How long a killed child may take to be gone before it is left to init.
REAP = 0.2


@dataclass(slots=True)
class Answer:
    """UUIDs by bus id, the CUDA version (`13.0`) if NVML told it, and what went wrong.

    `faults` are, by bus id, why a GPU can't be used. `facts` are, by bus id, `arch`, the compute capability (`9.0`),
    and `brand`, in libnvidia-container's words; each only where NVML told it. `mig` are, by bus id,
    `[index, gi, ci, uuid, name]` of each MIG device, `mig_modes` whether the GPU is in MIG mode.
    """

    uuids: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    mig: dict[str, list[list[Any]]] = field(default_factory=dict)
    mig_modes: dict[str, bool] = field(default_factory=dict)
    cuda: str | None = None
    faults: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class BackOff:
    """Which GPUs NVML hung on or died of, kept beside the inventory: `[failures, seconds since boot]` each, and in
    `reasons` what it did the last time, in words.

    Without a folder to keep it in, nothing is remembered.
    """

    def __init__(self, folder: int | None, boot_id: str) -> None:
        self.folder = folder
        self.boot_id = boot_id
        self.failures: dict[str, list[float]] = {}
        self.reasons: dict[str, str] = {}
        self._load()

    def _load(self) -> None:
        content = None if self.folder is None else store.read_own(self.folder, BACK_OFF_FILE, BACK_OFF_MAX)
        try:
            kept = json.loads(content or b"{}")
            # Seconds since boot mean nothing after another boot.
            if kept.get("boot_id") != self.boot_id:
                return
            failures = {str(name): [int(count), float(at)] for name, (count, at) in kept["failures"].items()}
            self.reasons = {name: str(kept["reasons"][name]) for name in failures}
            self.failures = failures
        except (ValueError, KeyError, TypeError, AttributeError):
            # Of another version, or damaged: then it is asked.
            return

    def left(self, name: str) -> float:
        """Seconds to leave that GPU alone still; 0 if it may be asked about."""
        count, at = self.failures.get(name, [0, 0.0])
        if not count:
            return 0.0
        return max(0.0, at + min(FIRST_BACK_OFF * 2 ** min(count - 1, 16), LAST_BACK_OFF) - fingerprint.now())

    def blame(self, name: str, reason: str) -> None:
        """It hung or died: twice as long a pause as the last time."""
        self.reasons[name] = reason
        self.failures[name] = [self.failures.get(name, [0, 0.0])[0] + 1, round(fingerprint.now(), 3)]
        self._save()

    def forgive(self, name: str) -> None:
        """It answered."""
        self.reasons.pop(name, None)
        if self.failures.pop(name, None) is not None:
            self._save()

    def _save(self) -> None:
        if self.folder is None:
            return
        text = json.dumps({"boot_id": self.boot_id, "failures": self.failures, "reasons": self.reasons})
        try:
            store.write_own(self.folder, BACK_OFF_FILE, text.encode())
        except OSError:
            # Then the next renewal asks again, and waits again.
            pass


def ask(library: str, bus_ids: list[str], timeout: float, back_off: BackOff, force: bool = False) -> Answer:
    """Ask NVML about GPUs. `library` is libnvidia-ml's real file, as this process can open it.

    `timeout` is seconds for each answer. With `force`, GPUs in their back-off are asked about too. Raises
    nothing: what fails is a warning.
    """
    answer = Answer()
    pending = []
    for name in [ITSELF, *bus_ids]:
        left = 0.0 if force else back_off.left(name)
        if left and name == ITSELF:
            answer.warnings.append(f"NVML is not asked about the driver for {left:.0f} s: it {back_off.reasons[name]}")
            return answer
        if left:
            reason = back_off.reasons[name]
            answer.faults[name] = f"NVML {reason} when asked about it, and is not asked again for {left:.0f} s"
        elif name != ITSELF:
            pending.append(name)
    if bus_ids and not pending:
        return answer
    hangs = 0
    while True:
        conversation = Conversation(library, pending, timeout)
        for said in conversation.lines():
            _hear(said, answer, back_off)
        if conversation.failure is None:
            return answer
        blamed = conversation.asking or ITSELF
        back_off.blame(blamed, conversation.failure)
        if blamed not in pending:
            answer.warnings.append(f"NVML {conversation.failure} when asked about {_about(blamed)}")
            return answer
        answer.faults[blamed] = f"NVML {conversation.failure} when asked about it"
        pending = pending[pending.index(blamed) + 1 :]
        hangs += conversation.hung
        if pending and hangs >= HANGS_MAX:
            answer.warnings.append(f"NVML is not asked about {', '.join(pending)}: it hung on {hangs} GPUs before them")
            return answer
        if not pending:
            return answer


def _about(name: str) -> str:
    return "the driver" if name == ITSELF else f"GPU {name}"


def _hear(said: dict[str, Any], answer: Answer, back_off: BackOff) -> None:
    bus_id = said.get("gpu", ITSELF)
    if "uuid" in said:
        back_off.forgive(bus_id)
        if gpus.UUID.fullmatch(said["uuid"]):
            answer.uuids[bus_id] = said["uuid"]
        else:
            answer.warnings.append(f"NVML calls {_about(bus_id)} {said['uuid']!a}, which is no UUID")
    facts = {name: str(value) for name, value in said.items() if name in ("arch", "brand")}
    if facts:
        answer.facts[bus_id] = facts
    if "mig" in said:
        answer.mig[bus_id] = said["mig"]
    if "mig_mode" in said:
        answer.mig_modes[bus_id] = said["mig_mode"]
    if "cuda" in said:
        answer.cuda = f"{said['cuda'] // 1000}.{said['cuda'] % 1000 // 10}"
        back_off.forgive(ITSELF)
    if "sick" in said:
        answer.faults[bus_id] = f"NVML says: {said['sick']}"
    if "error" in said:
        answer.warnings.append(f"NVML can't tell about {_about(bus_id)}: {said['error']}")


class Conversation:
    """One child and what it says. `failure` is why it ended before it was done, `hung` whether for its deadline;
    `asking` the GPU it was at."""

    def __init__(self, library: str, bus_ids: list[str], timeout: float) -> None:
        self.asking: str | None = None
        self.failure: str | None = None
        self.hung = False
        self._done = False
        self._ended = False
        self._timeout = timeout
        places = "\n".join(folder for folder in sys.path if folder.startswith("/"))
        # Four lines for each GPU, the CUDA version, the end.
        self._lines_left = 4 * len(bus_ids) + 2
        self._words = [sys.executable, "-I", "-S", "-B", "-c", CHILD, places, str(os.getpid()), library, *bus_ids]

    def lines(self) -> Iterator[dict[str, Any]]:
        """The child's lines as they come, until it is done, dead or given up."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                pid = self._spawn(write_end)
            finally:
                os.close(write_end)
            try:
                yield from self._listen(read_end)
            finally:
                self._end(pid)
        finally:
            os.close(read_end)

    def _spawn(self, stdout: int) -> int:
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        copies = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, stdout, 1), (os.POSIX_SPAWN_DUP2, null, 2)]
        try:
            return os.posix_spawn(self._words[0], self._words, environment, file_actions=copies)
        finally:
            os.close(null)

    def _listen(self, fd: int) -> Iterator[dict[str, Any]]:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        rest = b""
        end = time.monotonic() + self._timeout
        while True:
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                self.failure = f"did not answer within {self._timeout:g} s"
                self.hung = True
                return
            chunk = os.read(fd, 65536)
            if not chunk:
                self._ended = True
                return
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                said = parse(line)
                self._lines_left -= 1
                if said is None or self._lines_left < 0:
                    break
                self.asking = said.get("asking", self.asking)
                self._done = self._done or "done" in said
                yield said
                end = time.monotonic() + self._timeout
            else:
                if len(rest) <= LINE_MAX:
                    continue
            # NVML runs in that process, and may have written over its memory.
            self.failure = "said nonsense"
            return

    def _end(self, pid: int) -> None:
        """Reap the child if it is gone or goes now; a GPU is to blame for one that died, not for one that is done."""
        if not self._ended:
            os.kill(pid, 9)
        status = _reap(pid)
        if status is None and self._ended:
            # It only closed its end of the pipe.
            os.kill(pid, 9)
            _reap(pid)
            self.failure = self.failure or (None if self._done else "stopped answering")
        if self._done or self.failure is not None:
            return
        code = 0 if status is None else os.waitstatus_to_exitcode(status)
        self.failure = f"died of signal {-code}" if code < 0 else f"ended too early (status {code})"


def parse(line: bytes) -> dict[str, Any] | None:
    """One line of a child's, None if it is none that ours writes."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    texts = ("asking", "gpu", "uuid", "arch", "brand", "error", "sick")
    kinds: dict[str, type] = {**dict.fromkeys(texts, str), "mig": list, "mig_mode": bool, "cuda": int, "done": bool}
    if not isinstance(said, dict) or not said.keys() <= kinds.keys():
        return None
    for device in said["mig"] if isinstance(said.get("mig"), list) else ():
        if not isinstance(device, list) or list(map(type, device)) != [int, int, int, str, str]:
            return None
    return said if all(isinstance(value, kinds[name]) for name, value in said.items()) else None


def _reap(pid: int) -> int | None:
    """The wait status; None for one that lives on, or whose status is nobody's to have."""
    end = time.monotonic() + REAP
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if done:
            return status
        if time.monotonic() >= end:
            return None
        time.sleep(0.001)


def child(words: list[str]) -> None:
    """The child's whole life: its parent's pid, the library's path, bus ids; JSON lines on stdout. Ends the process."""
    parent, library, *bus_ids = words
    # Nobody listens once the parent is gone, whatever NVML waits for.
    kernel.die_with_parent()
    if os.getppid() != int(parent):
        os._exit(1)
    # What the parent inherited without close-on-exec, such as a lock of a script's, is none of NVML's business.
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.close(int(name))
            except OSError:
                # The listing's own.
                continue
    # NVML may run nvidia-modprobe, which is set-uid; whatever it runs gains nothing.
    kernel.set_no_new_privs()
    # And whatever it prints is not ours: the copy closes when a program is executed, stdout goes to /dev/null.
    channel = os.dup(1)
    os.dup2(0, 1)
    for said in _tell(library, bus_ids):
        os.write(channel, json.dumps(said).encode() + b"\n")
    # Past NVML's own clean-up, which may hang as well.
    os._exit(0)


def _tell(library: str, bus_ids: list[str]) -> Iterator[dict[str, Any]]:
    import ctypes

    try:
        # By its absolute path first: the loader then gives pynvml's dlopen of `libnvidia-ml.so.1` this one,
        # and not another driver's from the loader cache.
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        import pynvml
    except (OSError, ImportError) as error:
        yield {"error": str(error), "done": True}
        return
    try:
        pynvml.nvmlInit()
        yield {"cuda": pynvml.nvmlSystemGetCudaDriverVersion()}
    except pynvml.NVMLError as error:
        yield {"error": str(error), "done": True}
        return
    for bus_id in bus_ids:
        yield {"asking": bus_id}
        handle = None
        try:
            # By bus id: NVML initialises a GPU when its handle is asked for, and no other needs to wake.
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            yield {"gpu": bus_id, "uuid": uuid if isinstance(uuid, str) else uuid.decode()}
            yield {"gpu": bus_id, **_facts(handle)}
            yield {"gpu": bus_id, **_mig_mode(handle), "mig": list(_mig_devices(handle))}
        except pynvml.NVMLError as error:
            sick = error.value in SICK or (handle is None and error.value not in NOT_SICK)
            yield {"gpu": bus_id, "sick" if sick else "error": str(error)}
    yield {"done": True}


def _facts(handle: Any) -> dict[str, str]:
    """What requirements compare; a part that this driver or GPU does not tell is left out."""
    import pynvml

    found = {}
    try:
        found["arch"] = "{}.{}".format(*pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    except pynvml.NVMLError:
        pass
    try:
        found["brand"] = BRANDS.get(pynvml.nvmlDeviceGetBrand(handle), BRANDS[0])
    except pynvml.NVMLError:
        pass
    return found


def _mig_mode(handle: Any) -> dict[str, bool]:
    """Whether it is in MIG mode; a GPU or a driver that knows no such mode is not, and other errors leave it open."""
    import pynvml

    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return {"mig_mode": False}
    except pynvml.NVMLError:
        return {}
    return {"mig_mode": current == pynvml.NVML_DEVICE_MIG_ENABLE}


def _mig_devices(handle: Any) -> Iterator[list[Any]]:
    """Index, GPU instance, compute instance, UUID and name of each MIG device; there may be gaps between indexes."""
    import pynvml

    try:
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:
        # Drivers before 450 do not know the question.
        return
    for index in range(count):
        try:
            device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            numbers = [pynvml.nvmlDeviceGetGpuInstanceId(device), pynvml.nvmlDeviceGetComputeInstanceId(device)]
            uuid = pynvml.nvmlDeviceGetUUID(device)
        except pynvml.NVMLError:
            continue
        yield [index, *numbers, uuid if isinstance(uuid, str) else uuid.decode(), _name(device)]


def _name(device: Any) -> str:
    """What NVML calls a MIG device, or nothing where it does not tell."""
    import pynvml

    try:
        name = pynvml.nvmlDeviceGetName(device)
    except pynvml.NVMLError:
        return ""
    return name if isinstance(name, str) else name.decode("utf-8", "replace")

# SPDX-License-Identifier: Apache-2.0
"""`nvhook verify`: does a CUDA program run here, or in a container that nvhook has equipped?

Cold. On the host the check is `hook._cuda`, in this process. In a container it is the program `cuda-check`,
made from the same C source, in a root of a dozen files: if it runs there, everything that it needed of the
driver was injected, since nothing else could have brought it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hook import mounts, peer
from ldcache.errors import NvhookError

HERE = Path(__file__).resolve().parent
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
RUNTIMES = ("runc", "crun")

# What libcuda and its compiler load besides libc, all of glibc but the last. Links that a glibc since 2.34
# no longer needs are there for drivers that still name them.
LIBRARIES = ("libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1")

DMESG = "look for the driver's own words in the kernel log: dmesg | grep -i nvrm"
NO_LIBRARY = "install the NVIDIA driver's user-space libraries, or name one with --library PATH"
REMEDIES = {
    2: "free device memory; nvidia-smi lists who uses it",
    46: "another process holds this GPU in exclusive mode: see the compute mode in nvidia-smi -q",
    100: "see what `nvidia-smi -L` lists, that /dev/nvidia* can be opened, and CUDA_VISIBLE_DEVICES",
    221: "libnvidia-ptxjitcompiler.so.1 of this driver's version is missing: reinstall the driver's libraries",
    222: "this driver is too old: it must know PTX 6.0, as every driver since CUDA 9 does",
    802: "start the fabric manager of this driver's version (nvidia-fabricmanager) and wait for it",
    803: "libcuda and the loaded kernel module differ in version: reload the module, or restart the machine",
    804: "this libcuda is a forward-compatibility one, which this GPU doesn't support: use the driver's own",
    999: "load the module nvidia-uvm, and see that /dev/nvidia-uvm can be opened",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """One failing call: `call` is the function as the manual names it, `name` and `text` are CUDA's words.

    `code` is its CUresult, 0 where the failure is not CUDA's (dlopen, a wrong element). `device` is None for
    what concerns the whole process.
    """

    step: str
    device: int | None
    call: str
    code: int
    name: str
    text: str

    def __str__(self) -> str:
        device = "" if self.device is None else f"device {self.device}, "
        code = f"{self.name} ({self.code}): " if self.code else ""
        return f"{device}step {self.step}: {self.call}: {code}{self.text}"

    @property
    def remedy(self) -> str:
        """One line: what to do about it."""
        if self.step == "load":
            return NO_LIBRARY
        return REMEDIES.get(self.code, DMESG)


@dataclass(frozen=True, slots=True)
class Result:
    """One device's run. `ms` has the milliseconds of each step that was reached, in order.

    `index` is the rank by PCI bus id among the devices that CUDA shows, so nvidia-smi's unless
    CUDA_VISIBLE_DEVICES hides some; `elements` counts the elements that the CPU found right; `hello` is what
    the device printed; `log` holds the compiler's messages if it refused the PTX.
    """

    index: int
    name: str
    uuid: str
    bus_id: str
    capability: str
    elements: int
    hello: str
    log: str
    ms: dict[str, float]
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """All of it. `driver` is the loaded kernel module's version, None where the kernel shows none; `cuda` is
    the CUDA version that libcuda implements."""

    driver: str | None
    cuda: str
    library: str
    count: int
    ms: dict[str, float]
    results: tuple[Result, ...]
    peers: tuple[peer.Peer, ...] = ()

    @property
    def good(self) -> bool:
        """Whether every call on every device succeeded."""
        return not any(result.failures for result in self.results) and not any(item.failures for item in self.peers)

    def to_json(self) -> dict[str, Any]:
        """What `cuda-check --json` prints, and the kernel module's version."""
        return {
            "driver": self.driver,
            "library": self.library,
            "cuda": self.cuda,
            "ms": self.ms,
            "failures": [],
            "devices": [asdict(result) for result in self.results],
            "peers": [copied.to_json() for copied in self.peers],
        }


def driver_version(path: Path = DRIVER_VERSION) -> str | None:
    """The loaded kernel module's version, from the line that starts with `NVRM version:`."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^NVRM version:.*?\s(\d{3,}\.\d+(?:\.\d+)*)\s", text, re.MULTILINE)
    return found[1] if found else None


def verify(devices: list[str] | None = None, library: str | None = None, copies: bool = False) -> Report:
    """Run both kernels on each of `devices` (index or UUID; None: all that CUDA shows). With `copies`, `devices` are
    two, and memory is copied from each to the other.

    `library` is libcuda's path, by default libcuda.so.1 as the loader finds it. Calls that fail on a device
    are in its Result. Raises NvhookError if libcuda can't be loaded or initialised, if there is no device,
    or if one of `devices` isn't there. Sets CUDA_DEVICE_ORDER and CUDA_CACHE_DISABLE in this process.
    """
    try:
        from hook import _cuda
    except ImportError as error:
        remedy = "install nvhook from its wheel or package; in a checkout run packaging/build.py"
        raise NvhookError(f"cannot load nvhook's CUDA module: {error}", remedy) from error
    ffi, lib = _cuda.ffi, _cuda.lib
    driver = ffi.new("nv_driver *")
    name = ffi.NULL if library is None else os.fsencode(library)
    if not lib.nv_cuda_open(name, driver):
        failure = _failures(_cuda, driver)[0]
        raise NvhookError(f"CUDA does not work here: {failure}", failure.remedy)
    chosen = list(range(driver.devices)) if devices is None else _choose(_cuda, driver.devices, devices)
    if copies and len(chosen) != 2:
        raise NvhookError(f"--peer names one device twice: it is {chosen[0]}", "name two, by index or UUID")
    results = tuple(_run(_cuda, index) for index in chosen)
    return Report(
        driver=driver_version(),
        cuda=f"{driver.version // 1000}.{driver.version % 1000 // 10}",
        library=_text(_cuda, driver.library),
        count=driver.devices,
        ms=_times(_cuda, driver),
        results=results,
        peers=_copy_both_ways(_cuda, *results) if copies else (),
    )


def _choose(module: Any, count: int, devices: list[str]) -> list[int]:
    """The indexes of the named devices, in the order named, each once."""
    uuids: dict[str, int] = {}
    device = module.ffi.new("nv_device *")
    for index in range(count):
        if module.lib.nv_cuda_identify(index, device):
            uuids[_text(module, device.uuid)] = index
    chosen = []
    for name in devices:
        index = int(name) if re.fullmatch(r"[0-9]{1,5}", name) else uuids.get(name, -1)
        if not 0 <= index < count:
            known = ", ".join(f"{index} ({uuid})" for uuid, index in uuids.items())
            raise NvhookError(f"CUDA shows no device {name!r}", f"it shows {known}")
        chosen.append(index)
    return list(dict.fromkeys(chosen))


def _run(module: Any, index: int) -> Result:
    device = module.ffi.new("nv_device *")
    module.lib.nv_cuda_run(index, device)
    return Result(
        index=index,
        name=_text(module, device.name),
        uuid=_text(module, device.uuid),
        bus_id=_text(module, device.bus_id),
        capability=f"{device.major}.{device.minor}",
        elements=device.elements,
        hello=_text(module, device.hello),
        log=_text(module, device.log),
        ms=_times(module, device),
        failures=_failures(module, device),
    )


def _copy_both_ways(module: Any, first: Result, second: Result) -> tuple[peer.Peer, ...]:
    """Both directions: a link may be good in one only."""
    copied = module.ffi.new("nv_peer[2]")
    module.lib.nv_cuda_peer(first.index, second.index, module.ffi.addressof(copied[0]))
    module.lib.nv_cuda_peer(second.index, first.index, module.ffi.addressof(copied[1]))
    link = peer.link(first.uuid, second.uuid)
    return tuple(
        peer.Peer(
            source=getattr(item, "from"),
            target=item.to,
            direct=bool(item.direct),
            elements=item.elements,
            bandwidth=item.bandwidth,
            link=link,
            failures=_failures(module, item),
        )
        for item in copied
    )


def _text(module: Any, array: Any) -> str:
    value: bytes = module.ffi.string(array)
    return value.decode("utf-8", "replace")


def _times(module: Any, owner: Any) -> dict[str, float]:
    steps = ((_text(module, module.lib.nv_step_name(step)), ms) for step, ms in enumerate(owner.ms))
    return {name: round(ms, 3) for name, ms in steps if ms >= 0}


def _failures(module: Any, owner: Any) -> tuple[Failure, ...]:
    return tuple(
        Failure(
            step=_text(module, module.lib.nv_step_name(item.step)),
            device=item.device if item.device >= 0 else None,
            call=_text(module, item.call),
            code=item.code,
            name=_text(module, item.name),
            text=_text(module, item.text),
        )
        for item in owner.failures.item[0 : owner.failures.count]
    )


def print_report(report: Report) -> None:
    """Print a report for people: results on stdout, failing calls and their remedies on stderr."""
    print(f"driver {report.driver or 'unknown'}, CUDA {report.cuda}, {report.library}, devices: {report.count}")
    print(f"  {_times_line(report.ms)}")
    for result in report.results:
        print_result(result)
    for copied in report.peers:
        if copied.elements:
            print(copied)
        _print_failures(copied.failures)


def print_result(result: Result) -> None:
    """Print one device's part of a report."""
    if result.uuid:
        facts = (result.name, result.uuid, result.bus_id, f"compute capability {result.capability}")
        print(f"device {result.index}: {', '.join(facts)}")
        print(f"  {_times_line(result.ms)}")
    if "check" in result.ms:
        print(f"  vector kernel: {result.elements} elements right")
    if not any(failure.step == "hello" for failure in result.failures):
        print(result.hello, end="")
    _print_failures(result.failures)
    if result.log:
        print(result.log, file=sys.stderr)


def _print_failures(failures: tuple[Failure, ...]) -> None:
    # The two streams may be one file: what was found comes before what failed.
    sys.stdout.flush()
    for failure in failures:
        print(f"nvhook: error: {failure}\n  remedy: {failure.remedy}", file=sys.stderr)


def _times_line(ms: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in ms.items()) + " ms"


# In a container


def installed(name: str) -> Path | None:
    """One of nvhook's own executables: in hook/bin (checkout, wheel), beside hook/ or in the prefix (installed)."""
    folders = [HERE / "bin", Path("/usr/local/bin"), Path("/usr/bin")]
    if HERE.parts[-3:-1] == ("lib", "nvhook") and (HERE.parent / "bin/launch").is_file():
        # Only there is this an installed copy; above a checkout, `bin` may be anybody's.
        folders[1:1] = [HERE.parent / "bin", HERE.parents[2] / "bin"]
    for folder in folders:
        if os.access(folder / name, os.X_OK):
            return folder / name
    return None


def hook_command() -> list[str]:
    """Path and arguments of the prestart hook as a config.json names them. Raises NvhookError."""
    launcher = installed("nvhook-prestart")
    if launcher is None:
        remedy = "run `nvhook install`"
        raise NvhookError("nvhook's prestart hook (nvhook-prestart) is not installed", remedy)
    return [str(launcher)]


def find_runtime(name: str | None) -> str:
    """The absolute path of the runtime `name`, or of the first of runc and crun. Raises NvhookError."""
    for candidate in RUNTIMES if name is None else (name,):
        if found := shutil.which(candidate):
            return os.path.abspath(found)
    what = "neither runc nor crun is" if name is None else f"{name} is not"
    raise NvhookError(f"{what} on PATH", "install one (Debian: apt-get install runc), or name it with --runtime")


def find_libraries(program: Path) -> list[Path]:
    """The dynamic loader that `program` names, and the C library's files where that loader finds them.

    The loader is asked rather than its cache read, as it is this loader that will run in the container.
    LIBRARIES lie beside libc, on every distribution; those that a host lacks are left out.
    """
    listed = subprocess.run(
        [program], env={"LD_TRACE_LOADED_OBJECTS": "1"}, capture_output=True, text=True, check=False
    )
    paths = [Path(path) for path in re.findall(r"(?:=> |^\s*)(/\S+) \(0x", listed.stdout, re.MULTILINE)]
    libc = next((path for path in paths if path.name.startswith("libc.so.")), None)
    if libc is None:
        said = (listed.stderr or listed.stdout).strip() or f"exit status {listed.returncode}"
        raise NvhookError(f"{program} does not start here: {said}", "it needs glibc: run this on a glibc system")
    beside = [path for name in LIBRARIES if (path := libc.with_name(name)).exists()]
    return list(dict.fromkeys([*paths, *beside]))


def build_root(root: Path, program: Path) -> None:
    """Make the smallest root in which `program` starts: itself, the loader, the C library, empty folders.

    It has no loader cache and no ldconfig, and merged /usr as the distributions have it.
    """
    for folder in ("usr/lib", "usr/lib64", "usr/bin", "etc", "proc", "sys", "dev", "run", "tmp"):
        (root / folder).mkdir(parents=True)
    for name in ("lib", "lib64", "bin"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "tmp").chmod(0o1777)
    shutil.copy(program, root / "cuda-check")
    for path in find_libraries(program):
        # Through the link lib or lib64, whichever form the path has.
        target = root / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def make_config(identity: str, arguments: list[str], devices: list[str] | None, hook: list[str]) -> dict[str, Any]:
    """The OCI configuration of the container (runtime specification 1.0), as an engine would write it.

    No capability, no device allowed but what the hook allows, no network namespace of its own: nothing in it
    uses the network, and without one a machine that can't set up networks will do.
    """
    environment = {
        "PATH": "/usr/bin",
        "NVIDIA_VISIBLE_DEVICES": "all" if devices is None else ",".join(devices),
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    }
    hidden = ["nosuid", "noexec", "nodev"]
    shm = [*hidden, "mode=1777", "size=65536k"]
    dev = ["nosuid", "strictatime", "mode=755", "size=65536k"]
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": hidden},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": dev},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": shm},
        {
            "destination": "/sys",
            "type": "sysfs",
            "source": "sysfs",
            "options": ["nosuid", "noexec", "nodev", "ro"],
        },
    ]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": ["/cuda-check", *arguments],
            "env": [f"{name}={value}" for name, value in environment.items()],
            "cwd": "/",
            "capabilities": {"bounding": [], "effective": [], "permitted": []},
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": False},
        "hostname": "nvhook-verify",
        "mounts": mounts,
        "hooks": {"prestart": [{"path": hook[0], "args": hook}]},
        "linux": {
            "cgroupsPath": f"/{identity}",
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
            "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")],
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
    }


def in_container(
    devices: list[str] | None = None,
    runtime: str | None = None,
    hook: list[str] | None = None,
    arguments: list[str] | None = None,
) -> int:
    """Run cuda-check in a fresh container, equipped by the prestart hook `hook`, and return its exit status.

    `devices` are indexes or UUIDs, None all; `runtime` is a name or path; `hook` is the hook's absolute path
    and its further arguments; `arguments` go to cuda-check. Both outputs are the caller's own. Nothing of it
    is left afterwards, however it ends. Raises NvhookError.
    """
    if os.geteuid() != 0:
        raise NvhookError("only root can start a container with a prestart hook", "run it as root, or with sudo")
    program = installed("cuda-check")
    if program is None:
        raise NvhookError("nvhook's program cuda-check is not installed", "in a checkout run packaging/build.py")
    path = find_runtime(runtime)
    command = hook_command() if hook is None else hook
    with _bundle() as bundle:
        identity = bundle.name
        build_root(bundle / "rootfs", program)
        config = make_config(identity, arguments or [], devices, command)
        (bundle / "config.json").write_text(json.dumps(config, indent=1))
        return _run_container([path, "--root", str(bundle / "state")], bundle, identity)


def _run_container(runtime: list[str], bundle: Path, identity: str) -> int:
    # In a session of its own: a ^C at the terminal is for us, and we end the container in order.
    child = subprocess.Popen(
        [*runtime, "run", "--bundle", str(bundle), identity],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return child.wait()
    finally:
        _end(child, [*runtime, "delete", "--force", identity])


def _end(child: subprocess.Popen[bytes], delete: list[str]) -> None:
    """Delete the container until the runtime's process is gone.

    Once is not enough: a container that is still being made can't be deleted yet. A runtime killed instead
    would leave the container's cgroups behind.
    """
    for _ in range(100):
        subprocess.run(delete, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        try:
            child.wait(0.1)
            return
        except subprocess.TimeoutExpired:
            continue
    child.kill()
    child.wait()


@contextlib.contextmanager
def _bundle() -> Iterator[Path]:
    """A new folder for a container, on a filesystem whose programs may be executed; removed at the end."""
    folders = [tempfile.gettempdir(), "/var/tmp", "/run"]
    usable = [folder for folder in folders if os.path.isdir(folder) and not _noexec(folder)]
    if not usable:
        remedy = "set TMPDIR to a folder on a filesystem mounted without it"
        raise NvhookError(f"{' and '.join(folders)} are mounted noexec", remedy)
    bundle = Path(tempfile.mkdtemp(prefix="nvhook-verify-", dir=usable[0])).resolve()
    try:
        yield bundle
    finally:
        _remove(bundle)


def _noexec(folder: str) -> bool:
    return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)


def _remove(bundle: Path) -> None:
    """Remove the bundle, but never through a mount.

    A hook that mounted on the host instead of in the container has hung host folders into the root: to
    remove that tree would be to remove them.
    """
    # Lines of bytes: a mount's name need be no text, and may hold what str takes for the end of a line.
    table = os.fsdecode(Path(mounts.TABLE).read_bytes())
    places = [line.split(" ")[4] for line in table.split("\n") if line]
    below = [place for place in places if place.startswith(mounts.escape(f"{bundle}/"))]
    if below:
        remedy = "unmount it, then remove the folder; and report it, since no hook may leave a mount"
        raise NvhookError(f"{below[0]} is still mounted, so {bundle} is left as it is", remedy)
    shutil.rmtree(bundle)


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `nvhook verify`."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--device",
        action="append",
        metavar="INDEX|UUID",
        help="a GPU to verify; repeatable; default: all",
    )
    which.add_argument(
        "--peer",
        nargs=2,
        metavar="INDEX|UUID",
        help="two GPUs to verify, and to copy memory between, both ways",
    )
    parser.add_argument("--library", metavar="PATH", help="libcuda to load; default: libcuda.so.1")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--in-container", action="store_true", help="in a new container, equipped by nvhook")
    parser.add_argument("--runtime", metavar="NAME|PATH", help="with --in-container: runc or crun")
    parser.add_argument(
        "--hook", metavar="PATH", help="with --in-container: nvhook-prestart; default: the installed one"
    )


def run(args: argparse.Namespace) -> int:
    """`nvhook verify`: 0 if everything ran and was right, else 1. Raises NvhookError."""
    devices = None if args.device is None else [name for item in args.device for name in item.split(",") if name]
    if args.peer is not None:
        devices = args.peer
    if args.in_container:
        return _run_in_container(args, devices)
    with _signals(signal.SIG_DFL):
        # Python's own handler would wait for a C call to return, and cuInit on a sick GPU may not.
        report = verify(devices, args.library, args.peer is not None)
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print_report(report)
    return 0 if report.good else 1


def _run_in_container(args: argparse.Namespace, devices: list[str] | None) -> int:
    arguments = ["--json"] if args.json else []
    if args.library is not None:
        arguments += ["--library", args.library]
    if args.peer is not None:
        # Of the container's own devices, which are these two.
        arguments += ["--peer", "0", "1"]
    if not args.json:
        print(f"driver {driver_version() or 'unknown'}, in a container of {find_runtime(args.runtime)}")
    # The container writes to our stdout directly.
    sys.stdout.flush()
    try:
        with _signals(_interrupt):
            hook = None if args.hook is None else [args.hook]
            status = in_container(devices, args.runtime, hook, arguments)
    except KeyboardInterrupt:
        raise NvhookError("interrupted; the container is deleted", "start it again for a result") from None
    # A runtime that fails has statuses of its own.
    return 0 if status == 0 else 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _signals(handler: Any) -> Iterator[None]:
    """Give SIGINT and SIGTERM another handler for a while."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)

# SPDX-License-Identifier: Apache-2.0
"""cdi.host.store: a kept inventory is used while it holds, and renewed by a child where it does not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdi import VERSION
from cdi.host import inventory, store
from cdi.host.store import Options
from ldcache import root
from ldcache.errors import NvhookError
from tests.needs import needs_root
from tests.simhost import Fault, Gpu, Host, Nvml, SimulatedHost, build, gpus

TREE = Path(__file__).resolve().parents[2]
UNKNOWN = tuple(Gpu(one.bus_id, one.minor, one.uuid, known=False) for one in gpus(2))


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return build(tmp_path / "host", Host(gpus=UNKNOWN, graphics=False))


@pytest.fixture
def fd(host: SimulatedHost) -> Iterator[int]:
    opened = root.open_root(str(host.root))
    yield opened
    os.close(opened)


@pytest.fixture
def folder(fd: int, host: SimulatedHost) -> Iterator[int]:
    opened = store.make_folder(fd, str(host.root))
    yield opened
    os.close(opened)


def kept_file(host: SimulatedHost) -> Path:
    return host.path("/run/nvhook/inventory.json")


def uuids(found: dict[str, Any]) -> list[str | None]:
    return [gpu["uuid"] for gpu in found["gpus"]]


def run_python(text: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, for what must not happen in the test's process."""
    command = [sys.executable, "-c", text, *arguments]
    environment = {"PYTHONPATH": str(TREE), "PATH": os.environ["PATH"], **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


# --- renewal


def test_absent_it_is_made_by_a_child_and_kept(fd: int, host: SimulatedHost) -> None:
    found = store.inventory(fd, str(host.root))
    assert [gpu["index"] for gpu in found["gpus"]] == [0, 1]
    assert json.loads(kept_file(host).read_text()) == found
    assert found == inventory.gather(Options(str(host.root), nvml="never"))
    # The kernel does not tell the UUIDs, and a request by index does not need them: NVML is left alone.
    assert uuids(found) == [None, None] and host.nvml_calls() == ()


def test_fresh_it_is_only_read(fd: int, host: SimulatedHost) -> None:
    first = store.inventory(fd, str(host.root))
    status = kept_file(host).stat()
    assert store.inventory(fd, str(host.root)) == first
    # Its inode and times; not atime, which reading may change.
    assert (kept_file(host).stat().st_ino, kept_file(host).stat().st_ctime_ns) == (status.st_ino, status.st_ctime_ns)


def test_stale_it_is_renewed(fd: int, host: SimulatedHost) -> None:
    store.inventory(fd, str(host.root))
    before = kept_file(host).stat()
    (host.path(host.library_folder) / "libnvidia-opencl.so.580.159.04").unlink()
    found = store.inventory(fd, str(host.root))
    assert not any(item["soname"] == "libnvidia-opencl.so.1" for item in found["libraries"])
    assert kept_file(host).stat().st_mtime_ns > before.st_mtime_ns


def test_other_options_ask_for_another_inventory(fd: int, host: SimulatedHost) -> None:
    host.path("/srv/nv").mkdir(parents=True)
    (host.path("/srv/nv") / "file").touch()
    store.inventory(fd, str(host.root))
    options = Options(str(host.root), library_search_path=("/srv/nv",), nvml="never")
    assert store.inventory(fd, str(host.root), options)["options"] == options.to_json()


@pytest.mark.parametrize(
    "change", [{"schema": 0}, {"nvhook": "0.0.1"}, {"fingerprint": None}, {"fingerprint": [["x"]]}]
)
def test_of_another_form_it_is_renewed(fd: int, folder: int, host: SimulatedHost, change: dict[str, Any]) -> None:
    made = store.inventory(fd, str(host.root))
    store.save(folder, made | change)
    assert store.inventory(fd, str(host.root)) == made
    assert json.loads(kept_file(host).read_text()) == made


def test_uuids_are_asked_for_on_demand_and_then_kept(fd: int, host: SimulatedHost) -> None:
    store.inventory(fd, str(host.root))
    known = [one.uuid for one in UNKNOWN]
    assert uuids(store.renew(fd, str(host.root), nvml=True)) == known
    calls = host.nvml_calls()
    assert calls
    assert uuids(store.inventory(fd, str(host.root))) == known
    # Once another start has asked, asking again tells nothing new.
    assert uuids(store.renew(fd, str(host.root), nvml=True)) == known
    # A renewal for another reason does not forget what NVML told, as long as the module is the same.
    (host.path(host.library_folder) / "unrelated").touch()
    assert uuids(store.inventory(fd, str(host.root))) == known
    assert host.nvml_calls() == calls
    text = host.path("/proc/driver/nvidia/version")
    text.chmod(0o644)
    text.write_text(text.read_text().replace("Release", "Another"))
    assert uuids(store.inventory(fd, str(host.root))) == [None, None]


def test_a_renewal_may_be_forced(fd: int, host: SimulatedHost) -> None:
    store.inventory(fd, str(host.root))
    before = kept_file(host).stat()
    store.renew(fd, str(host.root))
    assert kept_file(host).stat().st_mtime_ns > before.st_mtime_ns


def test_a_failed_renewal_says_what_the_child_said(fd: int, host: SimulatedHost) -> None:
    host.path("/proc/driver/nvidia/version").unlink()
    with pytest.raises(NvhookError) as caught:
        store.inventory(fd, str(host.root))
    with pytest.raises(NvhookError) as direct:
        inventory.gather(Options(str(host.root)))
    assert (caught.value.what, caught.value.remedy) == (direct.value.what, direct.value.remedy)


def test_a_child_that_can_not_start_is_named(fd: int, host: SimulatedHost) -> None:
    text = (
        "import sys, os; from cdi.host import store; from ldcache import root; from ldcache.errors import NvhookError\n"
        "sys.executable = '/nowhere/python'\n"
        "try: store.inventory(root.open_root(sys.argv[1]), sys.argv[1])\n"
        "except NvhookError as error: print(error.what)"
    )
    done = run_python(text, str(host.root))
    assert done.stdout == "cannot start /nowhere/python: No such file or directory\n", done.stderr


def test_a_child_past_the_deadline_is_given_up(fd: int, host: SimulatedHost) -> None:
    """It waits for an NVML that hangs: both go, nobody waits for them."""
    host.set_nvml(Nvml(faults=(Fault("nvmlInit", action="hang"),)))
    store.inventory(fd, str(host.root))
    options = Options(str(host.root), nvml="auto", nvml_timeout=60)
    start = time.monotonic()
    with pytest.raises(NvhookError, match="took too long"):
        store.renew(fd, str(host.root), nvml=True, options=options, deadline=2.0)
    assert time.monotonic() - start < 10
    pids = {call.pid for call in host.nvml_calls()}
    assert len(pids) == 1
    end = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(is_alive(pid) for pid in pids)


def is_alive(pid: int) -> bool:
    """A zombie is none: whose child it is, nobody waits for it, and init will."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


# --- the lock


def test_one_renewal_serves_all_who_wait(fd: int, host: SimulatedHost) -> None:
    text = (
        "import sys; from cdi.host import store; from ldcache import root\n"
        "found = store.renew(root.open_root(sys.argv[1]), sys.argv[1], nvml=True)\n"
        "sys.exit(any(gpu['uuid'] is None for gpu in found['gpus']))"
    )
    environment = {"PYTHONPATH": str(TREE), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", text, str(host.root)]
    starts = [subprocess.Popen(command, env=environment) for _ in range(6)]
    assert [start.wait(timeout=60) for start in starts] == [0] * 6
    assert len({call.pid for call in host.nvml_calls()}) == 1


def test_who_waits_too_long_names_the_holder(folder: int) -> None:
    lock = store.take_lock(folder, time.monotonic())
    try:
        with pytest.raises(NvhookError, match=f"by process {os.getpid()}, does not come to its end") as caught:
            store.take_lock(folder, time.monotonic() + 0.05)
    finally:
        os.close(lock)
    assert str(os.getpid()) in caught.value.remedy
    os.close(store.take_lock(folder, time.monotonic()))


def test_no_child_inherits_the_lock(folder: int) -> None:
    """One that outlives its parent would hold it for good."""
    lock = store.take_lock(folder, time.monotonic())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        os.close(lock)
        # The kernel closes what a program does not inherit a moment after its parent goes on.
        os.close(store.take_lock(folder, time.monotonic() + 5))
        assert child.poll() is None
    finally:
        child.communicate(b"\n")


# --- the file and its folder


def test_modes_do_not_depend_on_the_umask(host: SimulatedHost) -> None:
    text = (
        "import os, sys; from cdi.host import store; from ldcache import root\n"
        "os.umask(0o077)\n"
        "store.inventory(root.open_root(sys.argv[1]), sys.argv[1])"
    )
    done = run_python(text, str(host.root))
    assert done.returncode == 0, done.stderr
    assert kept_file(host).stat().st_mode & 0o7777 == 0o644
    assert kept_file(host).parent.stat().st_mode & 0o7777 == 0o755
    assert sorted(os.listdir(kept_file(host).parent)) == ["inventory.json", "lock"]


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_may_write_is_refused(fd: int, folder: int, host: SimulatedHost, mode: int) -> None:
    store.inventory(fd, str(host.root))
    assert store.load(folder) is not None
    kept_file(host).chmod(mode)
    assert store.load(folder) is None
    store.inventory(fd, str(host.root))
    assert kept_file(host).stat().st_mode & 0o7777 == 0o644


@needs_root
def test_a_file_of_somebody_else_is_refused(fd: int, folder: int, host: SimulatedHost) -> None:
    store.inventory(fd, str(host.root))
    os.chown(kept_file(host), 4242, 4242)
    assert store.load(folder) is None


def test_a_link_is_refused(fd: int, folder: int, host: SimulatedHost) -> None:
    store.inventory(fd, str(host.root))
    os.rename(kept_file(host), host.path("/run/elsewhere"))
    kept_file(host).symlink_to("../elsewhere")
    assert store.load(folder) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_what_is_no_inventory_is_none(folder: int, host: SimulatedHost, content: bytes) -> None:
    store.write_own(folder, store.FILE, content)
    assert store.load(folder) is None


def test_a_fifo_does_not_stop_us(folder: int, host: SimulatedHost) -> None:
    os.mkfifo(kept_file(host))
    assert store.load(folder) is None


def test_a_folder_that_others_may_write_is_refused(fd: int, host: SimulatedHost) -> None:
    host.path("/run/nvhook").mkdir()
    host.path("/run/nvhook").chmod(0o777)
    with pytest.raises(NvhookError, match="/run/nvhook: mode 0777 lets others in"):
        store.make_folder(fd, str(host.root))
    assert store.find_folder(fd, str(host.root)) is None


def test_a_failed_write_leaves_nothing(folder: int, host: SimulatedHost) -> None:
    kept_file(host).mkdir()
    with pytest.raises(OSError):
        store.save(folder, {"schema": 1})
    assert os.listdir(kept_file(host).parent) == ["inventory.json"]


RUNTIME_FOLDER = """
import os, sys
from cdi.host import store
from ldcache import root
from ldcache.errors import NvhookError
fd = root.open_root(sys.argv[1])
try:
    folder = store.make_folder(fd, "/")
    print(os.readlink(f"/proc/self/fd/{folder}"), store.find_folder(fd, "/") is not None)
except NvhookError as error:
    print(error.what)
"""


def without_system_folder(tmp_path: Path) -> Path:
    """A root where /run/nvhook can't be made: there is no /run."""
    (tmp_path / "bare").mkdir()
    return tmp_path / "bare"


def test_without_a_system_folder_the_users_own_is_taken(tmp_path: Path) -> None:
    place = tmp_path / "user"
    place.mkdir(mode=0o700)
    done = run_python(RUNTIME_FOLDER, str(without_system_folder(tmp_path)), XDG_RUNTIME_DIR=str(place))
    assert done.stdout == f"{place}/nvhook True\n", done.stderr
    assert (place / "nvhook").stat().st_mode & 0o7777 == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o710])
def test_a_runtime_folder_that_lets_others_in_is_not_trusted(tmp_path: Path, mode: int) -> None:
    place = tmp_path / "user"
    place.mkdir()
    place.chmod(mode)
    done = run_python(RUNTIME_FOLDER, str(without_system_folder(tmp_path)), XDG_RUNTIME_DIR=str(place))
    assert done.stdout.startswith("no place to keep the inventory: there is no /run"), done.stderr
    place.chmod(0o700)
    (place / "nvhook").mkdir()
    (place / "nvhook").chmod(mode)
    done = run_python(RUNTIME_FOLDER, str(tmp_path / "bare"), XDG_RUNTIME_DIR=str(place))
    assert f"{place}/nvhook: mode {mode:04o} lets others in" in done.stdout


def test_another_hosts_inventory_is_never_kept_in_a_runtime_folder(tmp_path: Path) -> None:
    place = tmp_path / "user"
    place.mkdir(mode=0o700)
    text = RUNTIME_FOLDER.replace('"/"', "sys.argv[1]")
    done = run_python(text, str(without_system_folder(tmp_path)), XDG_RUNTIME_DIR=str(place))
    assert done.stdout.startswith("no place to keep the inventory"), done.stderr


def test_without_any_place_the_inventory_is_still_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = build(tmp_path, Host(graphics=False))
    host.path("/run").rename(host.path("/gone"))
    assert inventory.main(["--host-root", str(host.root)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("driver 580.159.04")
    assert err.startswith("nvhook: warning: no place to keep the inventory: there is no /run")


def test_the_version_is_the_projects() -> None:
    assert f'\nversion = "{VERSION}"\n' in (TREE / "pyproject.toml").read_text()


def test_a_hanging_nvml_stops_no_start(fd: int, host: SimulatedHost) -> None:
    """What the kernel tells is kept before NVML is asked, and the lock given back."""
    host.set_nvml(Nvml(faults=(Fault("nvmlInit", action="hang"),)))
    command = [sys.executable, "-m", "hook", "inventory", "--nvml-timeout", "30", "--host-root", str(host.root)]
    asking = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 10
        while not host.nvml_calls():
            assert time.monotonic() < end
            time.sleep(0.01)
        before = time.monotonic()
        assert len(store.inventory(fd, str(host.root), deadline=2.0)["gpus"]) == 2
        store.renew(fd, str(host.root), deadline=5.0)
        assert time.monotonic() - before < 5
    finally:
        asking.kill()
        asking.wait()


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_something_in_the_locks_place(fd: int, folder: int, host: SimulatedHost, kind: str) -> None:
    lock = host.path("/run/nvhook/lock")
    lock.unlink(missing_ok=True)
    if kind == "link":
        lock.symlink_to("elsewhere")
    elif kind == "fifo":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    if kind == "fifo":
        # Harmless: a lock can be had on it too.
        os.close(store.take_lock(folder, time.monotonic() + 1))
        return
    with pytest.raises(NvhookError, match="cannot open the inventory's lock /run/nvhook/lock"):
        store.take_lock(folder, time.monotonic() + 1)


def test_a_full_run_stops_no_start(fd: int, host: SimulatedHost) -> None:
    """The number in the lock is for people."""
    text = (
        "import resource, signal, sys, time\n"
        "from cdi.host import store; from ldcache import root\n"
        "folder = store.make_folder(root.open_root(sys.argv[1]), sys.argv[1])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "print(store.take_lock(folder, time.monotonic() + 1) > 2)"
    )
    assert run_python(text, str(host.root)).stdout == "True\n"


ASK = """
import sys
from cdi.host import store
from ldcache import root
options = store.Options(sys.argv[1], nvml="auto", nvml_timeout=30)
store.renew(root.open_root(sys.argv[1]), sys.argv[1], nvml=True, options=options)
"""


def start(*command: str) -> subprocess.Popen[bytes]:
    """A process beside the test's."""
    environment = {"PYTHONPATH": str(TREE), "PATH": os.environ["PATH"]}
    quiet = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, *command], env=environment, stdout=quiet, stderr=quiet)


def wait_for_nvml(host: SimulatedHost) -> None:
    end = time.monotonic() + 10
    while not host.nvml_calls():
        assert time.monotonic() < end, "NVML was not asked"
        time.sleep(0.01)


def test_a_start_by_uuid_that_hangs_stops_no_other(fd: int, host: SimulatedHost) -> None:
    """NVML has a lock of its own: who does not need it gets a new inventory meanwhile."""
    host.set_nvml(Nvml(faults=(Fault("nvmlInit", action="hang"),)))
    asking = start("-c", ASK, str(host.root))
    try:
        wait_for_nvml(host)
        assert len(store.inventory(fd, str(host.root), deadline=5.0)["gpus"]) == 2
        (host.path(host.library_folder) / "libnvidia-opencl.so.580.159.04").unlink()
        found = store.inventory(fd, str(host.root), deadline=5.0)
        assert not any(item["soname"] == "libnvidia-opencl.so.1" for item in found["libraries"])
        assert asking.poll() is None
    finally:
        asking.kill()
        asking.wait()
        # The renewal is a process group of its own, NVML's child with it.
        for pid in {call.pid for call in host.nvml_calls()}:
            os.killpg(os.getpgid(pid), signal.SIGKILL)


def test_what_nvml_told_is_kept_beside_a_newer_look(fd: int, folder: int, host: SimulatedHost) -> None:
    host.set_nvml(Nvml(faults=(Fault("nvmlInit", delay_ms=1500),)))
    asking = start("-m", "hook", "inventory", "--host-root", str(host.root))
    wait_for_nvml(host)
    (host.path(host.library_folder) / "libnvidia-opencl.so.580.159.04").unlink()
    assert uuids(store.inventory(fd, str(host.root))) == [None, None]
    assert asking.wait(30) == 0
    kept = store.load(folder)
    assert kept is not None and uuids(kept) == [one.uuid for one in UNKNOWN]
    assert not any(item["soname"] == "libnvidia-opencl.so.1" for item in kept["libraries"])
    assert store.inventory(fd, str(host.root)) == kept


def test_of_two_commands_one_asks(host: SimulatedHost) -> None:
    host.set_nvml(Nvml(faults=(Fault("nvmlInit", delay_ms=1000),)))
    command = ("-m", "hook", "inventory", "--host-root", str(host.root))
    assert [one.wait(30) for one in [start(*command), start(*command)]] == [0, 0]
    assert len({call.pid for call in host.nvml_calls()}) == 1


def test_after_a_reload_nvml_is_asked_again(fd: int, host: SimulatedHost) -> None:
    """The folder in sysfs tells; those in procfs may have the numbers that they had. Another module is no matter."""
    store.inventory(fd, str(host.root))
    known = [one.uuid for one in UNKNOWN]
    assert uuids(store.renew(fd, str(host.root), nvml=True)) == known
    host.path("/sys/module/nvidia_drm").mkdir()
    assert uuids(store.inventory(fd, str(host.root))) == known
    module = host.path("/sys/module/nvidia")
    module.rename(module.with_name("aside"))
    module.mkdir()
    assert uuids(store.inventory(fd, str(host.root))) == [None, None]


def test_without_sysfs_nothing_is_carried_over(fd: int, host: SimulatedHost) -> None:
    host.path("/sys").rename(host.path("/gone"))
    store.inventory(fd, str(host.root))
    assert uuids(store.renew(fd, str(host.root), nvml=True)) == [one.uuid for one in UNKNOWN]
    (host.path(host.library_folder) / "unrelated").touch()
    assert uuids(store.inventory(fd, str(host.root))) == [None, None]


def test_an_inventory_that_cannot_be_kept_is_still_printed(host: SimulatedHost) -> None:
    text = (
        "import resource, signal, sys\n"
        "from cdi.host import inventory\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "sys.exit(inventory.main(['--nvml', 'never', '--host-root', *sys.argv[1:]]))"
    )
    done = run_python(text, str(host.root))
    assert (done.returncode, done.stderr) == (0, "nvhook: warning: cannot keep the inventory: File too large\n")
    assert done.stdout.startswith("driver 580.159.04")
    done = run_python(text, str(host.root), "--lock-held", str(os.getpid()), "--refresh")
    assert done.returncode == 1
    assert done.stderr.startswith("nvhook: error: cannot keep the inventory: File too large\n  remedy: ")


def test_a_fifo_in_the_locks_place_names_no_holder(folder: int, host: SimulatedHost) -> None:
    os.mkfifo(host.path("/run/nvhook/lock"))
    lock = store.take_lock(folder, time.monotonic())
    with pytest.raises(NvhookError, match="by process unknown, does not come to its end"):
        store.take_lock(folder, time.monotonic())
    os.close(lock)


MEDDLE = """
import itertools, os, sys
os.setuid(65534)
os.mkdir(sys.argv[1])
print(flush=True)
for mode in itertools.cycle(range(0o700, 0o777)):
    os.chmod(sys.argv[1], mode)
"""


@contextlib.contextmanager
def meddling(folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of another user, who changes the mode of a folder of that name all the time."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o1777)
    user = subprocess.Popen([sys.executable, "-c", MEDDLE, name], cwd=folder, stdout=subprocess.PIPE)
    try:
        assert user.stdout is not None and user.stdout.readline() == b"\n"
        yield user
        assert user.poll() is None
    finally:
        user.kill()
        user.communicate()


@needs_root
def test_a_user_who_meddles_in_tmp_stops_no_start(fd: int, host: SimulatedHost) -> None:
    with meddling(host.path("/tmp"), "nvidia-mps"):
        for _ in range(3):
            kept_file(host).unlink(missing_ok=True)
            assert store.inventory(fd, str(host.root))["sockets"] == []
            before = kept_file(host).stat()
            for _ in range(100):
                store.inventory(fd, str(host.root))
            assert kept_file(host).stat().st_ino == before.st_ino


@needs_root
def test_what_keeps_changing_is_named_with_its_owner(fd: int, host: SimulatedHost) -> None:
    with meddling(host.path("/run/nvidia-persistenced"), "socket"), pytest.raises(NvhookError) as raised:
        store.inventory(fd, str(host.root))
    what = "the host keeps changing while its inventory is made: /run/nvidia-persistenced/socket changed again"
    assert raised.value.what == f"{what}; it belongs to uid 65534"


@needs_root
def test_whose_a_path_is(fd: int, host: SimulatedHost) -> None:
    folder = host.path("/home/user")
    folder.mkdir(parents=True)
    os.chown(folder, 4242, 4242)
    (folder / "link").symlink_to("/etc")
    os.chown(folder / "link", 4243, 4243, follow_symlinks=False)
    assert store.owner(fd, "/home/user/link") == "; it belongs to uid 4243"
    assert store.owner(fd, "/home/user/gone/file") == "; /home/user belongs to uid 4242"
    assert store.owner(fd, "/gone") == store.owner(fd, "until") == ""

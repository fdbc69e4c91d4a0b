# SPDX-License-Identifier: Apache-2.0
"""cdi.host.fingerprint: whatever an inventory depends on, its change is seen and named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cdi.host import fingerprint, inventory
from cdi.host.store import Options
from ldcache import root
from tests.conftest import TREE
from tests.needs import needs_root
from tests.simhost import Gpu, Host, SimulatedHost, build, gpus
from tests.simhost.tree import ldconfig

MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
CUDA = f"{LIBRARIES}/libcuda.so.580.159.04"


class Judged:
    """A host, the fingerprint of its inventory, and the question whether it still holds."""

    def __init__(self, host: SimulatedHost, **options: Any) -> None:
        self.host = host
        self.fingerprint = inventory.gather(Options(str(host.root), nvml="never", **options))["fingerprint"]
        self.fd = root.open_root(str(host.root))

    def changed(self) -> str | None:
        return fingerprint.changed(self.fd, self.fingerprint)


@pytest.fixture
def judged(tmp_path: Path) -> Iterator[Judged]:
    host = build(tmp_path, Host(gpus=gpus(2), modules=MODULES, persistenced="answering", mps=True))
    made = Judged(host)
    yield made
    os.close(made.fd)
    host.close()


def test_it_holds_while_nothing_changes(judged: Judged) -> None:
    assert judged.changed() is None
    # Reading the driver's files, or talking to its daemons, is no change.
    judged.host.path(CUDA).read_bytes()
    judged.host.path("/tmp/nvidia-mps/new").touch()
    assert judged.changed() is None


def test_it_does_not_depend_on_how_the_root_is_named(judged: Judged) -> None:
    os.rename(judged.host.root, judged.host.root.with_name("moved"))
    assert judged.changed() is None


def rewrite(name: str, text: str) -> Callable[[SimulatedHost], None]:
    def change(host: SimulatedHost) -> None:
        path = host.path(name)
        path.chmod(0o644)
        path.write_text(text)

    return change


def remove(name: str) -> Callable[[SimulatedHost], None]:
    return lambda host: host.path(name).unlink()


def create(name: str) -> Callable[[SimulatedHost], None]:
    def change(host: SimulatedHost) -> None:
        host.path(name).parent.mkdir(parents=True, exist_ok=True)
        host.path(name).touch()

    return change


def reload_module(host: SimulatedHost) -> None:
    """The folders of gpus/* are new ones, with the names and texts that they had."""
    folder = host.path("/proc/driver/nvidia/gpus/0000:10:00.0")
    new = folder.with_name("new")
    new.mkdir()
    for entry in folder.iterdir():
        os.rename(entry, new / entry.name)
    os.rename(folder, host.path("/proc/driver/nvidia/old"))
    os.rename(new, folder)


def unplug(host: SimulatedHost) -> None:
    os.rename(host.path("/proc/driver/nvidia/gpus/0000:18:00.0"), host.path("/proc/unplugged"))


def make_mig_instance(host: SimulatedHost) -> None:
    create("/proc/driver/nvidia/capabilities/gpu1/mig/gi3/ci0/access")(host)


def replace_unnoticed(host: SimulatedHost) -> None:
    """Another file of the same size and times, as where every file has the same time; the folder tells too."""
    path = host.path(CUDA)
    status = path.stat()
    new = path.with_name("new")
    new.write_bytes(bytes(status.st_size))
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    folder = path.parent.stat()
    os.rename(new, path)
    os.utime(path.parent, ns=(folder.st_atime_ns, folder.st_mtime_ns))


def write_in_place_unnoticed(host: SimulatedHost) -> None:
    """The same inode, size and mtime; only its ctime can't be set back."""
    path = host.path(CUDA)
    status = path.stat()
    with path.open("r+b") as file:
        file.write(b"\0")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def add_unnoticed(host: SimulatedHost) -> None:
    """A new library in a folder whose time is constant."""
    folder = host.path(LIBRARIES)
    status = folder.stat()
    create(f"{LIBRARIES}/libnvidia-more.so.580.159.04")(host)
    os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns))


def turn_library_into_link(host: SimulatedHost) -> None:
    path = host.path(CUDA)
    os.rename(path, host.path("/usr/lib/moved"))
    path.symlink_to("/usr/lib/moved")


def turn_link_of_lib(host: SimulatedHost) -> None:
    """/lib leads elsewhere."""
    host.path("/lib").unlink()
    host.path("/lib").symlink_to("usr/share")


def restart_daemon(host: SimulatedHost) -> None:
    path = host.path("/run/nvidia-persistenced/socket")
    os.rename(path, host.path("/run/old"))
    host.add_socket("/run/nvidia-persistenced/socket", "dead")


CHANGES: list[tuple[Callable[[SimulatedHost], None], str]] = [
    (rewrite("/proc/sys/kernel/random/boot_id", "another boot\n"), "/proc/sys/kernel/random/boot_id"),
    (rewrite("/proc/driver/nvidia/version", "another driver\n"), "/proc/driver/nvidia/version"),
    (remove("/proc/driver/nvidia/version"), "/proc/driver/nvidia/version"),
    (reload_module, "/proc/driver/nvidia/gpus"),
    (unplug, "/proc/driver/nvidia/gpus"),
    (make_mig_instance, "/proc/driver/nvidia/capabilities"),
    (rewrite("/etc/ld.so.cache", "another cache"), "/etc/ld.so.cache"),
    (rewrite("/etc/ld.so.conf", "# another\n"), "/etc/ld.so.conf"),
    (create("/etc/ld.so.conf.d/more.conf"), "/etc/ld.so.conf.d"),
    (create("/etc/nvhook/config.toml"), "/etc/nvhook"),
    (create(f"{LIBRARIES}/libnvidia-new.so.580.159.04"), LIBRARIES),
    (rewrite(CUDA, "another library"), CUDA),
    (replace_unnoticed, LIBRARIES),
    (write_in_place_unnoticed, CUDA),
    (add_unnoticed, LIBRARIES),
    (turn_link_of_lib, "/lib"),
    (remove("/usr/bin/nvidia-smi"), "/usr/bin/nvidia-smi"),
    (create("/usr/bin/nvidia-imex"), "/usr/bin/nvidia-imex"),
    (create("/etc/vulkan/icd.d/nvidia_icd.json"), "/etc/vulkan"),
    (create("/usr/lib/firmware/nvidia/580.159.04/gsp_new.bin"), "/usr/lib/firmware/nvidia/580.159.04"),
    (restart_daemon, "/run/nvidia-persistenced/socket"),
    (create("/run/nvidia-fabricmanager/socket"), "/run/nvidia-fabricmanager"),
]


@pytest.mark.parametrize(("change", "named"), CHANGES)
def test_a_change_is_named(judged: Judged, change: Callable[[SimulatedHost], None], named: str) -> None:
    change(judged.host)
    assert judged.changed() == named


def test_a_library_that_became_a_link_is_seen(judged: Judged) -> None:
    turn_library_into_link(judged.host)
    # Folders changed as well, and which of all is looked at first does not matter.
    assert judged.changed() in (CUDA, LIBRARIES, "/usr/lib")


def test_a_replaced_library_is_seen_where_its_folder_does_not_tell(judged: Judged) -> None:
    """As on another image mounted in the same place, every file of it as old as the next."""
    replace_unnoticed(judged.host)
    judged.fingerprint = [entry for entry in judged.fingerprint if entry[1] != LIBRARIES]
    assert judged.changed() == CUDA


def test_a_mig_instance_that_is_made_again_is_seen(tmp_path: Path) -> None:
    host = build(tmp_path, Host(graphics=False))
    make_mig_instance(host)
    made = Judged(host)
    assert made.changed() is None
    gi = host.path("/proc/driver/nvidia/capabilities/gpu1/mig/gi3")
    os.rename(gi, host.path("/proc/old"))
    make_mig_instance(host)
    assert made.changed() == fingerprint.CAPABILITIES
    os.close(made.fd)


@needs_root
@pytest.mark.parametrize("name", ["/dev/nvidia1", "/dev/nvidia-uvm", "/dev/dri/renderD129"])
def test_changes_of_a_node_are_seen(judged: Judged, name: str) -> None:
    path = judged.host.path(name)
    status = path.stat()
    os.chown(path, -1, 44)
    assert judged.changed() == name
    os.chown(path, -1, status.st_gid)
    assert judged.changed() is None
    path.chmod(0o600)
    assert judged.changed() == name
    path.unlink()
    assert judged.changed() in (name, "/dev/dri")
    os.mknod(path, status.st_mode, os.makedev(99, 9))
    assert judged.changed() in (name, "/dev/dri")


@needs_root
def test_a_node_that_comes_later_is_seen(tmp_path: Path) -> None:
    host = build(tmp_path, Host(graphics=False, missing=frozenset({"nvidia-modeset"})))
    made = Judged(host)
    assert made.changed() is None
    os.mknod(host.path("/dev/nvidia-modeset"), 0o020666, os.makedev(195, 254))
    assert made.changed() == "/dev/nvidia-modeset"
    os.close(made.fd)


def test_links_on_the_way_to_a_folder_are_seen(tmp_path: Path) -> None:
    """Absolute ones lead on inside the driver root."""
    host = build(tmp_path, Host(driver_root="/drv", dev_root="/drv", graphics=False))
    os.rename(host.path("/drv/usr/lib/x86_64-linux-gnu"), host.path("/drv/one"))
    host.path("/drv/usr/lib/x86_64-linux-gnu").symlink_to("/one")
    made = Judged(host, driver_root="/drv")
    assert ["link", "/drv/usr/lib/x86_64-linux-gnu", "/one"] in made.fingerprint
    assert made.changed() is None
    host.path("/drv/usr/lib/x86_64-linux-gnu").unlink()
    host.path("/drv/usr/lib/x86_64-linux-gnu").symlink_to("/one/../one")
    assert made.changed() in ("/drv/usr/lib/x86_64-linux-gnu", "/drv/usr/lib")
    os.close(made.fd)


def test_a_link_that_goes_in_circles_ends(tmp_path: Path) -> None:
    host = build(tmp_path, Host(graphics=False))
    host.path("/etc/vulkan").symlink_to("vulkan")
    made = Judged(host)
    assert ["link", "/etc/vulkan", "vulkan"] in made.fingerprint
    assert made.changed() is None
    os.close(made.fd)


def test_a_gpu_that_was_left_out_is_looked_at_again(tmp_path: Path) -> None:
    card = Gpu("0000:10:00.0", 0, gpus(1)[0].uuid, powered=False)
    made = Judged(build(tmp_path, Host(gpus=(card,), graphics=False)))
    assert made.changed() is None
    (entry,) = [entry for entry in made.fingerprint if entry[0] == "until"]
    # It is rounded to a millisecond.
    assert 0 < entry[2] - fingerprint.now() <= inventory.FAULT_PAUSE + 0.001
    entry[2] = fingerprint.now() - 1
    assert made.changed() == "until"
    os.close(made.fd)


def test_another_version_of_nvhook_makes_its_own(judged: Judged) -> None:
    (entry,) = [entry for entry in judged.fingerprint if entry[0] == "nvhook"]
    entry[2] = "0.0.1"
    assert judged.changed() == "nvhook"


def test_what_can_not_be_looked_at_counts_as_absent(judged: Judged) -> None:
    """A whole folder that is gone, and one that is a file now."""
    judged.host.path("/usr/share").rename(judged.host.path("/usr/gone"))
    changed = judged.changed()
    assert changed is not None and changed.startswith("/usr/share/")
    judged.host.path("/usr/share").write_text("")
    assert judged.changed() == changed


def test_no_descriptor_is_left_open(judged: Judged) -> None:
    before = os.listdir("/proc/self/fd")
    judged.changed()
    rewrite(CUDA, "another library")(judged.host)
    judged.changed()
    inventory.gather(Options(str(judged.host.root), nvml="never"))
    assert os.listdir("/proc/self/fd") == before


def test_folders_are_opened_once_each(judged: Judged) -> None:
    """What keeps the judgement at a fraction of a millisecond: entries of one folder follow each other."""
    folders = [path.rpartition("/")[0] for kind, path, _ in judged.fingerprint if kind in fingerprint.IN_FOLDER]
    turns = [folder for place, folder in enumerate(folders) if place == 0 or folder != folders[place - 1]]
    assert len(turns) == len(set(turns))
    assert len(judged.fingerprint) < 250


@needs_root
def test_an_owner_is_part_of_what_a_folder_is(judged: Judged) -> None:
    """A removed folder's inode may be given to anybody's next one."""
    os.chown(judged.host.path("/tmp/nvidia-mps"), 65534, 65534)
    assert judged.changed() == "/tmp/nvidia-mps"


@needs_root
def test_a_nodes_owner(judged: Judged) -> None:
    os.chown(judged.host.path("/dev/nvidia0"), 65534, -1)
    assert judged.changed() == "/dev/nvidia0"


def test_a_reloaded_module(judged: Judged) -> None:
    """Its folder in sysfs is another one; its nodes and the text of its version are what they were."""
    folder = judged.host.path("/sys/module/nvidia")
    folder.rename(folder.with_name("aside"))
    folder.mkdir()
    assert judged.changed() == "/sys/module/nvidia"


def test_another_major(judged: Judged) -> None:
    devices = judged.host.path("/proc/devices")
    devices.write_text(devices.read_text().replace("508 nvidia-uvm", "509 nvidia-uvm"))
    assert judged.changed() == "/proc/devices"


def test_drivers_of_others_come_and_go(judged: Judged) -> None:
    devices = judged.host.path("/proc/devices")
    devices.write_text(devices.read_text().replace("Block devices:", "999 somebody\n\nBlock devices:"))
    assert judged.changed() is None


def test_a_new_file_at_the_driver_roots_top(tmp_path: Path) -> None:
    host = build(tmp_path, Host(driver_root="/run/nvidia/driver", graphics=False))
    judged = Judged(host, driver_root="/run/nvidia/driver")
    host.path("/run/nvidia/driver/libnvidia-new.so.580.159.04").touch()
    assert judged.changed() == "/run/nvidia/driver"
    os.close(judged.fd)


def test_a_long_list_of_drivers(tmp_path: Path) -> None:
    """/proc/devices of a machine with many drivers, ours at the end."""
    host = build(tmp_path, Host(graphics=False))
    devices = host.path("/proc/devices")
    others = "".join(f"{number:3} driver-of-somebody-{number}\n" for number in range(300, 500))
    text = devices.read_text().replace("508 nvidia-uvm", f"{others}508 nvidia-uvm")
    devices.chmod(0o644)
    devices.write_text(text)
    judged = Judged(host)
    devices.write_text(text.replace("508 nvidia-uvm", "509 nvidia-uvm"))
    assert judged.changed() == "/proc/devices"
    os.close(judged.fd)


def test_the_first_look_counts(tmp_path: Path) -> None:
    """What changed between two looks of one gathering was read in two states."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "file").touch()
    fd = root.open_root(str(tmp_path))
    recorder = fingerprint.Recorder(fd)
    host = fingerprint.Base(fd, "")
    assert recorder.file(host, "/link") == "/a"
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("b")
    assert recorder.file(host, "/link") == "/b"
    assert fingerprint.changed(fd, recorder.fingerprint()) == "/link"
    recorder = fingerprint.Recorder(fd)
    assert recorder.file(host, "/late") is None
    (tmp_path / "late").touch()
    assert recorder.file(host, "/late") == "/late"
    assert fingerprint.changed(fd, recorder.fingerprint()) == "/late"
    os.close(fd)


def test_a_cached_name_that_is_led_here_later(tmp_path: Path) -> None:
    """The loader cache alone knows the folder, and its name there leads to another driver's file at first."""
    host = build(tmp_path, Host(graphics=False))
    place = host.path("/opt/driver/lib")
    place.mkdir(parents=True)
    library = host.library("libnvidia-ml.so.1")
    library.rename(place / library.name)
    library.with_name("libnvidia-ml.so.1").unlink()
    shutil.copy(place / library.name, place / "libnvidia-ml.so.570.1")
    (place / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.570.1")
    host.path("/etc/ld.so.conf.d/driver.conf").write_text("/opt/driver/lib\n")
    # Not ldconfig's own choice of the link.
    ldconfig("-X", "-r", str(host.root))
    judged = Judged(host)
    (place / "libnvidia-ml.so.1").unlink()
    (place / "libnvidia-ml.so.1").symlink_to(library.name)
    assert judged.changed() == "/opt/driver/lib/libnvidia-ml.so.1"
    os.close(judged.fd)


JUDGE = """
import json, sys
from cdi.host import fingerprint
from ldcache import root
print(fingerprint.changed(root.open_root(sys.argv[1]), json.load(open(sys.argv[2]))))
"""


@needs_root
@pytest.mark.parametrize("root_path", ["/run/nvidia/driver", "/"])
def test_a_driver_root_that_something_is_mounted_over(tmp_path: Path, root_path: str) -> None:
    """The same driver in another copy, with all its sizes and times, as where an operator's container comes anew; and
    nothing at all. Mounts are made in a namespace of their own."""
    host = build(tmp_path / "host", Host(driver_root=root_path, dev_root=root_path, graphics=False))
    judged = Judged(host, driver_root=root_path)
    os.close(judged.fd)
    kept, copy = tmp_path / "fingerprint", tmp_path / "copy"
    kept.write_text(json.dumps(judged.fingerprint))
    # The host's own root can't be mounted over, since it is held open; its libraries can.
    covered = root_path if root_path != "/" else LIBRARIES
    place = host.path(covered)
    subprocess.run(["cp", "-a", place, copy], check=True)

    def changed(mount: str) -> str:
        script = f'{mount} && exec "$@"'
        judge = [sys.executable, "-c", JUDGE, str(host.root), str(kept)]
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *judge]
        environment = os.environ | {"PYTHONPATH": str(TREE)}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()

    assert changed("true") == "None"
    assert changed(f"mount --bind {copy} {place}").startswith(covered)
    assert changed(f"mount -t tmpfs none {place}").startswith(covered)


def mps(host: SimulatedHost, uid: int = 4242, mode: int = 0o777) -> None:
    """Another user's folder."""
    path = host.path("/tmp/nvidia-mps")
    path.mkdir()
    path.chmod(mode)
    os.chown(path, uid, uid)


def lead_to(target: str) -> Callable[[SimulatedHost], None]:
    return lambda host: host.path("/tmp/nvidia-mps").symlink_to(target)


# What another user may have put where MPS has its folder.
FOREIGN: dict[str, Callable[[SimulatedHost], None]] = {
    "nothing": lambda host: None,
    "folder": mps,
    "another mode": lambda host: mps(host, mode=0o700),
    "another user's": lambda host: mps(host, uid=4243),
    "file": lambda host: host.path("/tmp/nvidia-mps").touch(),
    "fifo": lambda host: os.mkfifo(host.path("/tmp/nvidia-mps")),
    "socket": lambda host: host.add_socket("/tmp/nvidia-mps", "dead"),
    "link to root's folder": lead_to("/usr"),
    "link to a file that changes": lead_to("own/file"),
    "link that leads nowhere": lead_to("own/none"),
}


@needs_root
@pytest.mark.parametrize("first", FOREIGN)
def test_what_others_do_in_tmp_makes_nothing_stale(tmp_path: Path, first: str) -> None:
    """Else whoever may write there could stop all starts by changing it, again and again."""
    host = build(tmp_path, Host(graphics=False))
    path = host.path("/tmp/nvidia-mps")
    own = host.path("/tmp/own")
    own.mkdir(parents=True)
    FOREIGN[first](host)
    made = Judged(host)
    for change in FOREIGN.values():
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        change(host)
        (own / "file").write_text("changed" * len(os.listdir(own)))
        assert made.changed() is None
    assert [item for item in made.fingerprint if item[1].startswith("/tmp/")] == [["ours", "/tmp/nvidia-mps", None]]
    path.unlink()
    path.mkdir()
    assert made.changed() == "/tmp/nvidia-mps"
    os.close(made.fd)
    host.close()


def test_a_daemons_link_is_not_followed(judged: Judged) -> None:
    """Its folder may be its own, and it no friend: what its link leads to makes nothing stale."""
    socket = judged.host.path("/run/nvidia-persistenced/socket")
    socket.rename(socket.with_name("aside"))
    socket.symlink_to("aside")
    made = Judged(judged.host)
    recorded = [item[0] for item in made.fingerprint if item[1].startswith("/run/nvidia-persistenced/")]
    assert recorded == ["entry"]
    socket.with_name("aside").unlink()
    assert made.changed() is None
    os.close(made.fd)

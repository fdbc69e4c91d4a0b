# SPDX-License-Identifier: Apache-2.0
"""Every kind of image and root file system, in real runc containers on the simulated host."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdi.host import store
from hook import loader, planner
from ldcache import cache as loader_cache
from ldcache import root
from tests import roots, simhost
from tests.containers import Bundle, hook
from tests.needs import needs_path, needs_program
from tests.simhost import SimulatedHost, elfwriter
from tests.simhost.tree import ldconfig
from tests.system import runtimes
from tests.system.prestart import MULTIARCH, nvhook, output, reported, tree_of, visible

pytestmark = needs_program("runc")

TREE = Path(__file__).resolve().parents[2]
DROP_IN = "etc/ld.so.conf.d/00-nvhook.conf"
NAMES = ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1")


class Kind:
    """One image, the bundle to come, and the hook's words."""

    def __init__(self, folder: Path, prefix: Path, host: SimulatedHost, flavour: roots.Flavour) -> None:
        self.folder = folder
        self.numbers = itertools.count(1)
        self.plain = nvhook(prefix, host)
        self.hooks = reported(self.plain, folder / "report")
        self.host = host
        self.root = roots.make_root(folder / "image", flavour)

    def bundle(self, *arguments: str, **others: Any) -> Bundle:
        """A container of the image that runs a program; the request is GPU 0."""
        others = {"env": visible("0"), "prestart": self.hooks} | others
        return Bundle(self.folder / f"bundle-{next(self.numbers)}", self.root, list(arguments), **others)

    def shell(self, script: str, **others: Any) -> list[str]:
        """What a shell script in the container printed."""
        return output(self.bundle("/bin/sh", "-c", script, **others)).splitlines()

    def warnings(self) -> str:
        return (self.folder / "report").read_text()

    def identity(self, soname: str) -> str:
        """DEVICE:INODE of the host's library."""
        status = self.host.library(soname).stat()
        return f"{status.st_dev}:{status.st_ino}"

    def identities(self, names: tuple[str, ...] = NAMES) -> list[str]:
        """What `resolve -s` must print last for each name."""
        return [self.identity("libcuda.so.1" if name == "libcuda.so" else name) for name in names]


MakeKind = Callable[..., Kind]


@pytest.fixture
def kind(tmp_path: Path, prefix: Path, host: SimulatedHost) -> MakeKind:
    """A function that makes an image of a flavour."""

    def make(flavour: roots.Flavour = "debian") -> Kind:
        return Kind(tmp_path, prefix, host, flavour)

    return make


def found(lines: list[str]) -> list[str]:
    """The identities that `resolve -s` printed."""
    return [line.split()[-1] for line in lines]


RESOLVE = "resolve -s " + " ".join(NAMES)
# What each package installation in the container does: Debian's libc-bin trigger is `ldconfig`.
LDCONFIG = f"ldconfig && {RESOLVE}"


@pytest.mark.parametrize("flavour", ["debian", "lib64", "centos7", "arch"])
def test_a_distribution(kind: MakeKind, flavour: roots.Flavour) -> None:
    """Before and after an ldconfig of its own, and its own libraries as before."""
    image = kind(flavour)
    lines = image.shell(f"{RESOLVE}; resolve libimage.so.1; {LDCONFIG}; resolve libimage.so.1; nvidia-smi -L")
    assert found(lines[:4]) == found(lines[5:9]) == image.identities()
    assert lines[4] == lines[9] == f"libimage.so.1 {roots.IMAGE_FOLDER}/libimage.so.1"
    assert lines[10].startswith("GPU 0: ")
    assert image.warnings() == ""
    assert not (image.root / DROP_IN).exists()


def test_the_form_of_a_cache_stays(kind: MakeKind) -> None:
    """glibc 2.17 knows neither the new form alone nor extension directories."""
    image = kind("centos7")
    image.shell("true")
    parsed = loader_cache.parse((image.root / "etc/ld.so.cache").read_bytes())
    assert (parsed.form, parsed.generator, parsed.sorted_strings) == ("combined", None, False)
    assert any(entry.path == b"/usr/lib64/libcuda.so.1" for entry in parsed.entries)


def test_everything_in_usr_lib(kind: MakeKind) -> None:
    image = kind("arch")
    assert image.shell("resolve libcuda.so.1") == ["libcuda.so.1 /usr/lib/libcuda.so.1"]


@needs_path("/lib/ld-musl-x86_64.so.1")
@pytest.mark.parametrize(
    ("text", "after"),
    [
        (None, None),
        ("/lib:/usr/local/lib:/usr/lib", "/lib:/usr/local/lib:/usr/lib"),
        ("/lib\n/usr/local/lib", "/lib\n/usr/local/lib\n/usr/lib\n"),
        ("", "/usr/lib\n"),
    ],
)
def test_musl(kind: MakeKind, text: str | None, after: str | None) -> None:
    """No cache is made. A path file that lacks our folder would hide it, an empty one hides everything."""
    image = kind("alpine")
    path = image.root / "etc/ld-musl-x86_64.path"
    if text is not None:
        path.write_text(text)
    lines = image.shell(RESOLVE)
    assert found(lines) == image.identities()
    assert lines[0].startswith("libcuda.so.1 /usr/lib/libcuda.so.1 ")
    assert (path.read_text() if path.exists() else None) == after
    assert not (image.root / "etc/ld.so.cache").exists()


@needs_path("/lib/ld-musl-x86_64.so.1")
def test_musl_beside_glibc_is_a_glibc_image(kind: MakeKind) -> None:
    """Debian's package musl brings the loader only."""
    image = kind()
    shutil.copy("/lib/ld-musl-x86_64.so.1", image.root / "usr/lib/ld-musl-x86_64.so.1")
    assert image.shell("resolve libcuda.so.1") == [f"libcuda.so.1 {MULTIARCH}/libcuda.so.1"]


@pytest.mark.parametrize("flavour", ["distroless", "busybox"])
@pytest.mark.parametrize("with_etc", [True, False])
def test_without_ldconfig_and_cache(kind: MakeKind, flavour: roots.Flavour, with_etc: bool) -> None:
    image = kind(flavour)
    if not with_etc:
        shutil.rmtree(image.root / "etc")
    lines = output(image.bundle("resolve", "-s", *NAMES)).splitlines()
    assert found(lines) == image.identities()
    folder = MULTIARCH if flavour == "distroless" else "/usr/lib64"
    assert lines[0].startswith(f"libcuda.so.1 {folder}/libcuda.so.1 ")
    assert (image.root / "etc/ld.so.cache").exists()
    # This machine's loader does not search /usr/lib64 by itself.
    assert (image.root / DROP_IN).exists() == (flavour == "busybox")


def test_scratch(kind: MakeKind) -> None:
    """One static program: the files are there for whoever knows their place."""
    image = kind("scratch")
    bundle = image.bundle("/busybox", "stat", "-L", "-c", "%d:%i", "/usr/lib64/libcuda.so.1", "/usr/bin/nvidia-smi")
    assert output(bundle).splitlines()[0] == image.identity("libcuda.so.1")
    assert not (image.root / DROP_IN).exists()


# Stale caches


def add_library(image: Kind, path: str, soname: str) -> None:
    """Copy a library in, as a Dockerfile's COPY does: no ldconfig."""
    target = image.root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(elfwriter.shared_object(soname))


def test_a_folder_that_the_cache_does_not_list(kind: MakeKind) -> None:
    """The file's name is its version's, and no link has its soname: ldconfig would have made it."""
    image = kind()
    (image.root / "etc/ld.so.conf.d/more.conf").write_text("/opt/more/lib\n")
    add_library(image, "/opt/more/lib/libmore.so.1.2", "libmore.so.1")
    assert image.shell("resolve libmore.so.1 libimage.so.1 libcuda.so.1") == [
        "libmore.so.1 /opt/more/lib/libmore.so.1.2",
        f"libimage.so.1 {roots.IMAGE_FOLDER}/libimage.so.1",
        f"libcuda.so.1 {MULTIARCH}/libcuda.so.1",
    ]
    assert sorted(path.name for path in (image.root / "opt/more/lib").iterdir()) == ["libmore.so.1.2"]


def test_a_folder_that_is_newer_than_the_cache(kind: MakeKind) -> None:
    image = kind()
    add_library(image, f"{roots.IMAGE_FOLDER}/libmore.so.1", "libmore.so.1")
    folder = image.root / roots.IMAGE_FOLDER.lstrip("/")
    changed = (image.root / "etc/ld.so.cache").stat().st_mtime_ns + 1
    os.utime(folder, ns=(changed, changed))
    assert image.shell("resolve libmore.so.1") == [f"libmore.so.1 {roots.IMAGE_FOLDER}/libmore.so.1"]


def test_no_cache_at_all(kind: MakeKind) -> None:
    image = kind()
    (image.root / "etc/ld.so.cache").unlink()
    assert image.shell("resolve libimage.so.1 libcuda.so.1") == [
        f"libimage.so.1 {roots.IMAGE_FOLDER}/libimage.so.1",
        f"libcuda.so.1 {MULTIARCH}/libcuda.so.1",
    ]


def test_a_stale_folder_does_not_win_over_earlier_ones(kind: MakeKind) -> None:
    image = kind()
    (image.root / "etc/ld.so.conf.d/more.conf").write_text("/opt/more/lib\n")
    add_library(image, "/opt/more/lib/libimage.so.1", "libimage.so.1")
    assert image.shell("resolve libimage.so.1") == [f"libimage.so.1 {roots.IMAGE_FOLDER}/libimage.so.1"]


def test_the_first_of_several_stale_folders_wins(kind: MakeKind) -> None:
    """As ldconfig has it; and none of them wins over a folder that the cache knows."""
    image = kind()
    (image.root / "etc/ld.so.conf.d/more.conf").write_text("/opt/one\n/opt/two\n/opt/three\n")
    for folder in ("two", "three"):
        add_library(image, f"/opt/{folder}/libmore.so.1", "libmore.so.1")
        add_library(image, f"/opt/{folder}/lib{folder}.so.1", f"lib{folder}.so.1")
    assert image.shell("resolve libmore.so.1 libtwo.so.1 libthree.so.1") == [
        "libmore.so.1 /opt/two/libmore.so.1",
        "libtwo.so.1 /opt/two/libtwo.so.1",
        "libthree.so.1 /opt/three/libthree.so.1",
    ]


def test_variants_for_newer_processors_in_a_stale_folder(kind: MakeKind) -> None:
    """The loader takes what its ldconfig would have listed; x86-64-v2 is what every machine of today is."""
    image = kind()
    (image.root / "etc/ld.so.conf.d/more.conf").write_text("/opt/more\n")
    variant = "/opt/more/glibc-hwcaps/x86-64-v2/libmore.so.1"
    add_library(image, "/opt/more/libmore.so.1", "libmore.so.1")
    add_library(image, variant, "libmore.so.1")
    assert image.shell("resolve libmore.so.1; ldconfig; resolve libmore.so.1") == [f"libmore.so.1 {variant}"] * 2


def test_a_stale_folder_that_is_too_big_is_left(kind: MakeKind) -> None:
    image = kind()
    (image.root / "etc/ld.so.conf.d/more.conf").write_text("/opt/more\n")
    folder = image.root / "opt/more"
    folder.mkdir()
    for number in range(2049):
        (folder / f"lib{number}.so").touch()
    assert image.shell("resolve libcuda.so.1") == [f"libcuda.so.1 {MULTIARCH}/libcuda.so.1"]
    assert "/opt/more of the container is not read into /etc/ld.so.cache" in image.warnings()


def test_more_stale_folders_than_a_start_reads(kind: MakeKind) -> None:
    image = kind()
    folders = [f"/opt/more/{number:02}" for number in range(loader.STALE_MAX + 2)]
    (image.root / "etc/ld.so.conf.d/more.conf").write_text("\n".join(folders))
    for folder in folders:
        add_library(image, f"{folder}/liba{folder[-2:]}.so.1", f"liba{folder[-2:]}.so.1")
    assert image.shell("resolve liba00.so.1 libcuda.so.1") == [
        "liba00.so.1 /opt/more/00/liba00.so.1",
        f"libcuda.so.1 {MULTIARCH}/libcuda.so.1",
    ]
    assert image.warnings().count("is not read into /etc/ld.so.cache") == 1


# Caches that can't be kept


def spoil(image: Kind, *more: loader_cache.Entry) -> bytes:
    """Leave the image a cache whose order doesn't hold, which no ldconfig writes."""
    path = image.root / "etc/ld.so.cache"
    parsed = loader_cache.parse(path.read_bytes())
    parsed.entries.reverse()
    parsed.entries += more
    path.write_bytes(loader_cache.serialize(parsed))
    return path.read_bytes()


def test_a_cache_out_of_order_is_left(kind: MakeKind) -> None:
    """The loader's default folders have our libraries, and the image's next ldconfig makes all well."""
    image = kind()
    before = spoil(image)
    assert found(image.shell(RESOLVE)) == image.identities()
    assert (image.root / "etc/ld.so.cache").read_bytes() == before
    assert "/etc/ld.so.cache of the container is left as it is: entry 1" in image.warnings()
    assert "the loader finds" not in image.warnings()
    assert found(image.shell(LDCONFIG)) == image.identities()
    loader_cache.parse((image.root / "etc/ld.so.cache").read_bytes())


def test_a_cache_out_of_order_that_has_a_rival(kind: MakeKind) -> None:
    image = kind()
    spoil(image, loader_cache.Entry(b"libcuda.so.1", b"/opt/libcuda.so.1", 0x303))
    image.shell("true")
    assert "the loader finds /opt/libcuda.so.1 of the image, not the host's" in image.warnings()


def test_a_cache_out_of_order_where_nothing_else_is_searched(kind: MakeKind) -> None:
    """The loader is Debian's, which does not search /usr/lib64 by itself."""
    image = kind("lib64")
    before = spoil(image)
    done = image.bundle("true").run()
    assert done.returncode != 0
    assert "/etc/ld.so.cache of the container is left as it is" in image.warnings()
    assert "remedy: run ldconfig in the image" in image.warnings()
    assert (image.root / "etc/ld.so.cache").read_bytes() == before


# Images with driver files of their own


@pytest.mark.parametrize("version", ["470.129.06", "525.105.17", "999", "999.1"])
def test_another_version_in_our_folder(kind: MakeKind, version: str) -> None:
    """A greater one would get the soname's link by the next ldconfig; ours is a file there, which it leaves."""
    image = kind()
    add_library(image, f"{MULTIARCH}/libnvidia-ml.so.{version}", "libnvidia-ml.so.1")
    add_library(image, f"{MULTIARCH}/libcuda.so.{version}", "libcuda.so.1")
    lines = image.shell(f"{RESOLVE}; {LDCONFIG}; {LDCONFIG}")
    assert found(lines) == image.identities() * 3
    assert f"{MULTIARCH}/libnvidia-ml.so.{version} of the image is another driver's" in image.warnings()


def test_an_older_drivers_links(kind: MakeKind) -> None:
    image = kind()
    add_library(image, f"{MULTIARCH}/libnvidia-ml.so.999.1", "libnvidia-ml.so.1")
    link = image.root / f"{MULTIARCH.lstrip('/')}/libnvidia-ml.so.1"
    link.symlink_to("libnvidia-ml.so.999.1")
    lines = image.shell(f"{RESOLVE}; {LDCONFIG}")
    assert found(lines) == image.identities() * 2
    assert os.readlink(link) == "libnvidia-ml.so.999.1"


def test_empty_files_of_an_earlier_start(kind: MakeKind) -> None:
    """What a container that was committed has left, of this driver and of another: nothing to say about."""
    image = kind()
    for name in ("libcuda.so.580.159.04", "libcuda.so.1", "libcuda.so", "libcuda.so.999.1", "libnvidia-ml.so.1"):
        (image.root / MULTIARCH.lstrip("/") / name).touch()
    lines = image.shell(f"{RESOLVE}; {LDCONFIG}")
    assert found(lines) == image.identities() * 2
    assert image.warnings() == ""


@pytest.mark.parametrize("conf", ["/etc/ld.so.conf.d/000.conf", "/etc/ld.so.conf.d/image.conf", "/etc/ld.so.conf"])
def test_another_version_in_another_folder(kind: MakeKind, conf: str) -> None:
    """The image's cache and ldconfig know a folder that comes before ours."""
    image = kind()
    add_library(image, "/opt/driver/libcuda.so.1", "libcuda.so.1")
    path = image.root / conf.lstrip("/")
    path.write_text("/opt/driver\n" + (path.read_text() if path.exists() else ""))
    ldconfig("-r", str(image.root))
    lines = image.shell(f"{RESOLVE}; {LDCONFIG}; cat {DROP_IN}")
    assert found(lines[:8]) == image.identities() * 2
    assert lines[9:] == [MULTIARCH]
    assert "/opt/driver/libcuda.so.1 of the image is another driver's" in image.warnings()


# ldconfig's configuration


@pytest.mark.parametrize("left", ["include", "nothing", "no file"])
def test_our_folder_where_ldconfig_does_not_look(kind: MakeKind, left: str) -> None:
    """This machine's loader does not search lib64 by itself, so the drop-in must say it. Twice changes no more."""
    image = kind("lib64")
    (image.root / "etc/ld.so.conf.d/lib64.conf").unlink()
    conf = image.root / "etc/ld.so.conf"
    if left == "nothing":
        conf.write_text(f"{roots.IMAGE_FOLDER}\n")
    elif left == "no file":
        conf.unlink()
    script = "export LD_LIBRARY_PATH=/usr/lib64; ldconfig; unset LD_LIBRARY_PATH; ldconfig -p | grep -c libcuda.so.1"
    assert image.shell(script) == ["1"]
    first = conf.read_text()
    assert ("include /etc/ld.so.conf.d/00-nvhook.conf\n" in first) == (left != "include")
    assert image.shell(script) == ["1"]
    assert conf.read_text() == first


def test_a_drop_in_of_no_more_use_goes(kind: MakeKind) -> None:
    image = kind()
    drop_in = image.root / DROP_IN
    drop_in.write_text("# Written by nvhook: where the host's NVIDIA driver is in this container.\n/usr/lib64\n")
    assert found(image.shell(RESOLVE)) == image.identities()
    assert not drop_in.exists()


# Root file systems


def test_a_read_only_root(kind: MakeKind) -> None:
    """runc makes it read-only after its prestart hooks."""
    image = kind()
    lines = image.shell(f"{RESOLVE}; touch /etc/x 2>/dev/null || echo read-only", readonly=True)
    assert found(lines[:4]) == image.identities()
    assert lines[4] == "read-only"


def test_a_root_that_is_read_only_at_create_container(kind: MakeKind, prefix: Path) -> None:
    """As crun up to 1.25 leaves it; here a hook before ours does."""
    image = kind()
    library = image.host.library("libcuda.so.1")
    where = f"{MULTIARCH}/{library.name}"
    add_library(image, f"{MULTIARCH}/libcuda.so.999.1", "libcuda.so.1")
    (image.root / "etc/ld.so.conf.d/x86_64-linux-gnu.conf").unlink()
    remount = hook("/bin/mount", "-o", "remount,bind,ro", str(image.root))
    ours = hook(prefix / "bin/nvhook-create-container", "--link", f"{library.name}::{MULTIARCH}/libcuda.so.1")
    ours["args"] += ["--folder", MULTIARCH]
    mount = {"destination": where, "type": "bind", "source": str(library), "options": ["rbind", "ro"]}
    others = {"prestart": [], "create_container": [remount, ours], "mounts": [mount], "env": {}}
    lines = image.shell("resolve -s libcuda.so.1; touch /etc/x 2>/dev/null || echo read-only", **others)
    assert found(lines[:1]) == [image.identity("libcuda.so.1")]
    assert lines[1:] == ["read-only"]


def test_etc_on_a_read_only_mount(kind: MakeKind, tmp_path: Path) -> None:
    """The cache there is covered; nothing is written, and the start goes on."""
    image = kind()
    etc = tmp_path / "etc"
    shutil.copytree(image.root / "etc", etc, symlinks=True)
    before = tree_of(etc)
    mount = {"destination": "/etc", "type": "bind", "source": str(etc), "options": ["rbind", "ro"]}
    assert found(image.shell(RESOLVE, mounts=[mount])) == image.identities()
    assert tree_of(etc) == before
    assert "/etc/ld.so.cache" in image.warnings()


def test_a_read_only_etc_without_which_nothing_is_found(kind: MakeKind, tmp_path: Path) -> None:
    """No cache to cover, and a folder that the loader does not search by itself: one error that says where."""
    image = kind("busybox")
    etc = tmp_path / "etc"
    etc.mkdir()
    mount = {"destination": "/etc", "type": "bind", "source": str(etc), "options": ["rbind", "ro"]}
    done = image.bundle("resolve", "libcuda.so.1", prestart=image.plain, mounts=[mount]).run()
    assert done.returncode != 0
    assert "/etc in the container is a read-only mount from elsewhere" in done.stderr
    assert list(etc.iterdir()) == []


def test_a_volume_over_the_library_folder(kind: MakeKind, tmp_path: Path) -> None:
    """One error that says which folder; nothing is written to the volume."""
    image = kind("lib64")
    volume = tmp_path / "volume"
    shutil.copytree(image.root / "usr/lib64", volume, symlinks=True)
    before = tree_of(volume)
    mount = {"destination": "/usr/lib64", "type": "bind", "source": str(volume), "options": ["rbind", "rw"]}
    done = image.bundle("true", prestart=image.plain, mounts=[mount]).run()
    assert done.returncode != 0
    assert "/usr/lib64 in the container is a mount from elsewhere" in done.stderr
    assert tree_of(volume) == before


def test_run_of_the_host(kind: MakeKind, tmp_path: Path) -> None:
    """Sockets belong below /run, which is somebody else's here: the start goes on without them."""
    image = kind()
    run = tmp_path / "run"
    run.mkdir()
    mount = {"destination": "/run", "type": "bind", "source": str(run), "options": ["rbind", "rw"]}
    assert found(image.shell(RESOLVE, mounts=[mount])) == image.identities()
    assert list(run.iterdir()) == []
    assert "left out: /run in the container is a mount from elsewhere" in image.warnings()


@pytest.mark.parametrize("name", ["overlay", "tmpfs"])
def test_root_file_systems(kind: MakeKind, tmp_path: Path, name: str) -> None:
    """A plain folder is what every other test has."""
    image = kind()
    place = tmp_path / "place"
    place.mkdir()
    script = OVERLAY if name == "overlay" else TMPFS
    wrapper = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", str(image.root), str(place)]
    image.root, lower = place / "root", image.root
    before = tree_of(lower)
    assert found(image.shell(f"{RESOLVE}; {LDCONFIG}", wrapper=wrapper)) == image.identities() * 2
    assert tree_of(lower) == before


TMPFS = 'set -e; mount -t tmpfs none "$2"; cp -a "$1" "$2/root"; shift 2; exec "$@"'
# An overlay can't have its upper layer on another, which the test's folder may be on.
OVERLAY = """
set -e
mount -t tmpfs none "$2"
mkdir "$2/upper" "$2/work" "$2/root"
mount -t overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" none "$2/root"
shift 2
exec "$@"
"""


# Optional parts


@pytest.mark.parametrize(
    "path", ["/usr/bin/nvidia-smi", "/run/nvidia-persistenced", f"{MULTIARCH}/libnvidia-ptxjitcompiler.so.580.159.04"]
)
def test_an_optional_part_that_fails_is_left_out_alone(kind: MakeKind, path: str) -> None:
    """A folder where a file belongs, or the reverse; nothing that led there stays either."""
    image = kind()
    target = image.root / path.lstrip("/")
    if path.startswith("/run"):
        target.write_text("a file")
    else:
        target.mkdir()
    names = NAMES[:3]
    lines = image.shell(f"resolve -s {' '.join(names)}; ldconfig -p | grep -c ptxjit; ls {MULTIARCH} | grep ptxjit")
    assert found(lines[:3]) == image.identities(names)
    assert "left out: " in image.warnings() and image.warnings().count("left out") == 1
    if "ptxjit" in path:
        assert lines[3:] == ["0", "libnvidia-ptxjitcompiler.so.580.159.04"]


# Forward compatibility


def compat(image: Kind, version: str, branches: list[int] | None, folder: str = "usr/local/cuda/compat") -> None:
    """The image's libcuda of that version, with the note that names the branches, or without."""
    library = elfwriter.shared_object("libcuda.so.1")
    if branches is not None:
        text = json.dumps({"format": 1, "CUDA version": "13.9", "driver": branches, "device": []}).encode()
        library = elfwriter.with_note(library, ".note.cuda.fwd_compatibility", b"NVIDIA Corporation", text)
    target = image.root / folder
    target.mkdir(parents=True, exist_ok=True)
    (target / f"libcuda.so.{version}").write_bytes(library)
    for name in ("libcuda.so.1", "libcuda.so"):
        (target / name).unlink(missing_ok=True)
        (target / name).symlink_to(f"libcuda.so.{version}" if name.endswith(".1") else "libcuda.so.1")


COMPAT_FOLDER = "/usr/local/cuda/compat"


@pytest.mark.parametrize(
    ("version", "branches", "used"),
    [
        ("595.54.14", None, True),
        ("595.54.14", [575, 580], True),
        ("595.54.14", [575], False),
        ("580.159.04", None, False),
        ("580.159.04", [580], False),
        ("580.160", [580], True),
        ("580.99.1", [580], False),
        ("575.57.08", None, False),
        ("1000.1", None, True),
    ],
)
def test_forward_compatibility(kind: MakeKind, version: str, branches: list[int] | None, used: bool) -> None:
    """The host's driver is 580.159.04. It stays as decided after an ldconfig of the image's own."""
    image = kind()
    compat(image, version, branches)
    lines = image.shell("resolve libcuda.so.1 libcuda.so; ldconfig; resolve libcuda.so.1 libcuda.so")
    folders = {line.split()[1].rpartition("/")[0] for line in lines}
    assert folders <= ({COMPAT_FOLDER} if used else {MULTIARCH, MULTIARCH.removeprefix("/usr")})
    assert (image.root / DROP_IN).exists() == used
    table = image.shell(f"grep -c ' {COMPAT_FOLDER}' /proc/self/mountinfo || true")
    assert table == ["0"]


def test_forward_compatibility_by_an_absolute_link(kind: MakeKind) -> None:
    image = kind()
    compat(image, "595.54.14", None, "usr/local/cuda-13.1/compat")
    (image.root / "usr/local/cuda").symlink_to("/usr/local/cuda-13.1")
    assert image.shell("resolve libcuda.so.1") == ["libcuda.so.1 /usr/local/cuda-13.1/compat/libcuda.so.1"]


@pytest.mark.parametrize("other", ["notaversion", "595.x", "596.1"])
def test_odd_files_in_the_compat_folder(kind: MakeKind, other: str) -> None:
    image = kind()
    compat(image, "595.54.14", None)
    add_library(image, f"{COMPAT_FOLDER}/libcuda.so.{other}", "libcuda.so.1")
    lines = image.shell("resolve libcuda.so.1")
    expected = MULTIARCH if other == "596.1" else COMPAT_FOLDER
    assert lines == [f"libcuda.so.1 {expected}/libcuda.so.1"]
    assert ("several versions" if other == "596.1" else "its name ends in no version") in image.warnings()


def test_the_plan_says_why(kind: MakeKind) -> None:
    image = kind()
    compat(image, "595.54.14", [575])
    bundle = image.bundle("true")
    bundle.write()
    made = planner.plan(str(bundle.folder), str(image.host.root))
    assert made["finish"]["forward_compatibility"] == {
        "used": False,
        "folder": None,
        "reason": "the image's 595.54.14 works on the branches 575, not on the host driver's 580",
    }


# createContainer, the hook of CDI files: the same facts, in folders named by the host


class Finish:
    """What a CDI file would add to a container: the host's libcuda in a folder of the host's, and the hook."""

    def __init__(self, image: Kind, prefix: Path, folder: str, *arguments: str) -> None:
        library = image.host.library("libcuda.so.1")
        mount = {"type": "bind", "source": str(library), "options": ["rbind", "ro"]}
        mount["destination"] = f"{folder}/{library.name}"
        links = ["--link", f"{library.name}::{folder}/libcuda.so.1", "--link", f"libcuda.so.1::{folder}/libcuda.so"]
        ours = hook(prefix / "bin/nvhook-create-container", *arguments, *links, "--folder", folder)
        hooks = reported([ours], image.folder / "report")
        self.others: dict[str, Any] = {"prestart": [], "create_container": hooks, "mounts": [mount], "env": {}}


def test_a_hosts_folder_in_a_debian_image(kind: MakeKind, prefix: Path) -> None:
    """A Fedora host's folder in a Debian image: neither its loader nor its ldconfig know it."""
    image = kind()
    made = Finish(image, prefix, "/usr/lib64")
    lines = image.shell(
        "resolve -s libcuda.so.1 libcuda.so; ldconfig; resolve -s libcuda.so.1 libcuda.so", **made.others
    )
    assert found(lines) == [image.identity("libcuda.so.1")] * 4
    assert (image.root / DROP_IN).read_text().splitlines()[1:] == ["/usr/lib64"]
    assert image.warnings() == ""


@needs_path("/lib/ld-musl-x86_64.so.1")
def test_a_hosts_folder_in_a_musl_image(kind: MakeKind, prefix: Path) -> None:
    """A path file is made, and has musl's own folders too: it takes their place."""
    image = kind("alpine")
    made = Finish(image, prefix, MULTIARCH)
    assert found(image.shell("resolve -s libcuda.so.1", **made.others)) == [image.identity("libcuda.so.1")]
    path = image.root / "etc/ld-musl-x86_64.path"
    assert path.read_text().splitlines() == ["/lib", "/usr/local/lib", "/usr/lib", MULTIARCH]


@pytest.mark.parametrize("branches", [[580], [575]])
def test_forward_compatibility_by_cdi(kind: MakeKind, prefix: Path, branches: list[int]) -> None:
    image = kind()
    compat(image, "595.54.14", branches)
    made = Finish(image, prefix, MULTIARCH, "--driver", "580.159.04")
    where = COMPAT_FOLDER if branches == [580] else MULTIARCH
    assert image.shell("resolve libcuda.so.1", **made.others) == [f"libcuda.so.1 {where}/libcuda.so.1"]


@pytest.mark.parametrize("cuda", ["13.8", "13.9"])
def test_forward_compatibility_by_the_cuda_version(kind: MakeKind, prefix: Path, cuda: str) -> None:
    """As on Orin, whose driver has no branch, and for which images have a folder of its own."""
    image = kind()
    compat(image, "1.1", [], "usr/local/cuda/compat_orin")
    compat(image, "595.54.14", [580])
    words = ["--compat-cuda", cuda, "--compat-folder", "/usr/local/cuda/compat_orin"]
    where = "/usr/local/cuda/compat_orin" if cuda == "13.8" else MULTIARCH
    made = Finish(image, prefix, MULTIARCH, *words)
    assert image.shell("resolve libcuda.so.1", **made.others) == [f"libcuda.so.1 {where}/libcuda.so.1"]
    made = Finish(image, prefix, MULTIARCH, *words, "--no-forward-compatibility")
    assert image.shell("resolve libcuda.so.1", **made.others) == [f"libcuda.so.1 {MULTIARCH}/libcuda.so.1"]


def test_another_version_beside_a_cdi_mount(kind: MakeKind, prefix: Path) -> None:
    image = kind()
    add_library(image, f"{MULTIARCH}/libcuda.so.999.1", "libcuda.so.1")
    made = Finish(image, prefix, MULTIARCH)
    lines = image.shell("resolve -s libcuda.so.1; ldconfig; resolve -s libcuda.so.1", **made.others)
    assert found(lines) == [image.identity("libcuda.so.1")] * 2
    assert "libcuda.so.999.1 of the image is another driver's" in image.warnings()


def test_a_listed_compat_folder(kind: MakeKind) -> None:
    """Some images name it in ld.so.conf.d: in use it is no rival, and out of use it must not come first."""
    image = kind()
    compat(image, "595.54.14", [575])
    (image.root / "etc/ld.so.conf.d/000_compat.conf").write_text(f"{COMPAT_FOLDER}\n")
    ldconfig("-r", str(image.root))
    lines = image.shell(f"{RESOLVE}; {LDCONFIG}")
    assert found(lines) == image.identities() * 2
    assert "another driver's" in image.warnings()
    compat(image, "595.54.14", [580])
    lines = image.shell("resolve libcuda.so.1; ldconfig; resolve libcuda.so.1")
    assert lines == [f"libcuda.so.1 {COMPAT_FOLDER}/libcuda.so.1"] * 2
    assert image.warnings() == ""


def test_a_failure_at_any_step_leaves_nothing_behind(kind: MakeKind, prefix: Path) -> None:
    """Where all of the above is done at once: drop-in, first line, covered soname, stale folder, compat."""
    image = kind("lib64")
    (image.root / "etc/ld.so.conf.d/lib64.conf").unlink()
    (image.root / "etc/ld.so.conf").write_text(f"{roots.IMAGE_FOLDER}\n/opt/more\n")
    add_library(image, "/opt/more/libmore.so.1", "libmore.so.1")
    add_library(image, "/usr/lib64/libcuda.so.999.1", "libcuda.so.1")
    compat(image, "595.54.14", [580])
    failing = Path(__file__).with_name("failurehook.py")
    report = image.folder / "report.json"
    arguments = ["-I", "-S", str(failing), str(prefix / "lib/nvhook"), str(image.host.root), str(report)]
    hooks = [image.plain[0], hook(sys.executable, *arguments)]
    before = tree_of(image.root)
    output(image.bundle("true", prestart=hooks))
    results = json.loads(report.read_text())
    names = " ".join(result["step"] for result in results)
    for words in (
        "write /etc/ld.so.conf.d/00-nvhook.conf: ",
        "since the image has another version",
        "which it does not",
    ):
        assert words in names
    assert [result for result in results if result["differences"]] == []
    assert tree_of(image.root) == before


# The same under crun, which is Debian 13's


@pytest.mark.long
def test_crun_with_a_read_only_root(kind: MakeKind, prefix: Path, debian_13: Path) -> None:
    """Up to 1.25 it is read-only before createContainer hooks run: names are made through a clone of its mount."""
    image = kind("lib64")
    (image.root / "etc/ld.so.conf.d/lib64.conf").unlink()
    library = image.host.library("libcuda.so.1")
    copy = image.folder / library.name
    shutil.copy(library, copy)
    add_library(image, "/usr/lib64/libcuda.so.999.1", "libcuda.so.1")
    where = f"/usr/lib64/{library.name}"
    links = ["--link", f"{library.name}::/usr/lib64/libcuda.so.1", "--link", "libcuda.so.1::/usr/lib64/libcuda.so"]
    finish = runtimes.in_debian_13("create_container", *links, "--folder", "/usr/lib64")
    mount = {"destination": where, "type": "bind", "source": str(copy), "options": ["rbind", "ro"]}
    script = "resolve -s libcuda.so.1 libcuda.so; touch /etc/x 2>/dev/null || echo read-only"
    bundle = image.bundle(
        "/bin/sh", "-c", script, prestart=[], create_container=[finish], mounts=[mount], env={}, readonly=True
    )
    done = runtimes.run(debian_13, bundle, "crun")
    assert done.returncode == 0, done.stdout + done.stderr
    status = copy.stat()
    lines = done.stdout.splitlines()
    assert found(lines[:2]) == [f"{status.st_dev}:{status.st_ino}"] * 2
    assert lines[2:] == ["read-only"]


@pytest.mark.long
@pytest.mark.parametrize("flavour", ["debian", "lib64", "centos7", "arch", "alpine", "distroless", "busybox"])
@pytest.mark.parametrize("readonly", [False, True])
def test_crun(tmp_path: Path, prefix: Path, debian_13: Path, flavour: roots.Flavour, readonly: bool) -> None:
    machine = simhost.build(tmp_path / "host", simhost.Host())
    host = root.open_host(str(machine.root))
    store.inventory(host, str(machine.root))
    image = Kind(tmp_path, prefix, machine, flavour)
    # The first gives the container's proc a driver's folder.
    proc = hook(runtimes.PYTHON, *image.plain[0]["args"][1:])
    hooks = [proc, runtimes.in_debian_13("prestart", "--host-root", str(machine.root))]
    done = runtimes.run(debian_13, image.bundle("resolve", "-s", *NAMES, prestart=hooks, readonly=readonly), "crun")
    assert done.returncode == 0, done.stdout + done.stderr
    assert found(done.stdout.splitlines()) == image.identities()


@pytest.mark.long
@pytest.mark.parametrize("asked", ["all", "1", "uuid", "void", "7"])
def test_crun_by_any_name(tmp_path: Path, prefix: Path, debian_13: Path, asked: str) -> None:
    machine = simhost.build(tmp_path / "host", simhost.Host(gpus=simhost.gpus(2)))
    host = root.open_host(str(machine.root))
    store.inventory(host, str(machine.root))
    image = Kind(tmp_path, prefix, machine, "debian")
    proc = hook(runtimes.PYTHON, *image.plain[0]["args"][1:])
    hooks = [proc, runtimes.in_debian_13("prestart", "--host-root", str(machine.root))]
    second = machine.host.gpus[1].uuid
    env = {"NVIDIA_VISIBLE_DEVICES": second if asked == "uuid" else asked}
    bundle = image.bundle("/bin/sh", "-c", "cd /dev; echo nvidia[0-9]*", prestart=hooks, env=env)
    done = runtimes.run(debian_13, bundle, "crun")
    if asked == "7":
        # crun keeps what a hook says to itself.
        assert (done.returncode, done.stdout) == (255, "") and "error executing hook" in done.stderr
        return
    nodes = {"all": "nvidia0 nvidia1", "void": "nvidia[0-9]*"}.get(asked, "nvidia1")
    assert done.stdout.splitlines()[0] == nodes, done.stdout + done.stderr

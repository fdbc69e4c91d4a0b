# SPDX-License-Identifier: Apache-2.0
"""Images and volumes that want a file, a mount or a byte of the host's. Each test fails without its defence."""

from __future__ import annotations

import json
import posix
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ldcache import root
from tests import roots, simhost
from tests.containers import Bundle, hook
from tests.needs import needs_path, needs_program
from tests.simhost import SimulatedHost
from tests.system.conftest import MakeBundle
from tests.system.prestart import MULTIARCH, nvhook, output, reported, tree_of, visible

pytestmark = needs_program("runc")


@pytest.fixture
def host_tmpfs() -> Iterator[Path]:
    """A folder of a tmpfs that is the host's."""
    folder = Path(tempfile.mkdtemp(prefix="nvhook-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def bind(source: Path, destination: str, *options: str) -> dict[str, Any]:
    """A bind mount of config.json."""
    return {"destination": destination, "type": "bind", "source": str(source), "options": ["rbind", "rw", *options]}


def lead(image: Path, name: str, target: str) -> None:
    """Put a link in the place of something in the image, which goes aside."""
    path = image / name.lstrip("/")
    if path.exists():
        path.rename(path.with_name(f"{path.name}.aside"))
    path.symlink_to(target)


@needs_path("/dev/shm")
@pytest.mark.parametrize("name", [MULTIARCH, "/etc", "/usr/bin"])
def test_a_hosts_tmpfs_below_dev_takes_nothing(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, host_tmpfs: Path, tmp_path: Path, name: str
) -> None:
    """`--ipc=host` brings the host's /dev/shm, and the image's link leads there."""
    (host_tmpfs / "ld.so.cache").write_bytes(Path("/etc/ld.so.cache").read_bytes())
    hooks = reported(nvhook(prefix, host), tmp_path / "report")
    bundle = make_bundle("true", env=visible("0"), prestart=hooks, mounts=[bind(host_tmpfs, "/dev/shm")])
    lead(bundle.root, name, "/dev/shm")
    before = tree_of(host_tmpfs)
    bundle.run()
    assert tree_of(host_tmpfs) == before
    report = (tmp_path / "report").read_text()
    if name == "/etc":
        assert "/etc/ld.so.cache of the container is covered with a mount" in report
    else:
        assert "/dev/shm in the container is a mount from elsewhere" in report


def test_the_containers_own_tmpfs_is_known_by_any_name(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle
) -> None:
    tmpfs = {"destination": "/var/run", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]}
    script = "test -S /run/nvidia-persistenced/socket && echo there"
    bundle = make_bundle(script, env=visible("0"), prestart=nvhook(prefix, host), mounts=[tmpfs])
    (bundle.root / "var/run").symlink_to("/run")
    assert output(bundle) == "there\n"


SHARED = """
mount -t tmpfs nvhook-test "$1" && mount --make-shared "$1" && mkdir "$1/volume" && echo host > "$1/volume/nvidia-smi"
folder=$1
shift
"$@" >&2
cat "$folder/volume/nvidia-smi"
grep -c " $folder/" /proc/self/mountinfo
"""


def test_nothing_goes_to_the_host_through_a_shared_volume(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    """A volume with `rshared` propagation hands on what is mounted on it, and there it would stay."""
    shared = tmp_path / "shared"
    shared.mkdir()
    bundle = make_bundle(
        "true",
        env=visible("0", "utility") | {"PATH": "/usr/local/host"},
        prestart=reported(nvhook(prefix, host), tmp_path / "report"),
        mounts=[bind(shared / "volume", "/usr/local/host", "rshared")],
        linux={"rootfsPropagation": "rshared"},
        wrapper=["unshare", "--mount", "--propagation", "private", "sh", "-c", SHARED, "sh", str(shared)],
    )
    done = bundle.run()
    assert "is in a volume with rshared propagation" in (tmp_path / "report").read_text()
    assert done.stdout.splitlines() == ["host", "0"]


def test_one_host_file_for_two_names(prefix: Path, make_bundle: MakeBundle, tmp_path: Path) -> None:
    """A clone that is mounted twice would leave the first place empty."""
    machine = simhost.build(tmp_path / "host", simhost.Host())
    folder = machine.root / "usr/share/vulkan/icd.d"
    (folder / "nvidia_icd.x86_64.json").symlink_to("nvidia_icd.json")
    script = "for name in nvidia_icd nvidia_icd.x86_64; do find /etc/vulkan /usr/share -name $name.json -size +0; done"
    bundle = make_bundle(script, env=visible("0", "graphics"), prestart=nvhook(prefix, machine))
    assert len(output(bundle).splitlines()) == 2


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_a_temporary_name_left_behind(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, kind: str) -> None:
    """A start that was killed may leave one, an image may plant one: the next start works."""
    bundle = make_bundle("resolve libcuda.so.1", env=visible("0"), prestart=nvhook(prefix, host))
    (bundle.root / "victim").write_text("untouched")
    (bundle.root / MULTIARCH.lstrip("/") / "libcuda.so.1").symlink_to("libcuda.so.470.1")
    for name in ("etc/.ld.so.cache.nvhook-0", f"{MULTIARCH.lstrip('/')}/.libcuda.so.1.nvhook-0"):
        path = bundle.root / name
        if kind == "file":
            path.write_text("left behind")
        elif kind == "link":
            path.symlink_to("/victim")
        else:
            path.mkdir()
    assert output(bundle) == f"libcuda.so.1 {MULTIARCH}/libcuda.so.1\n"
    assert (bundle.root / "victim").read_text() == "untouched"
    left = [path.name for path in bundle.root.rglob(".*nvhook-*")]
    assert (len(left) == 2) == (kind == "folder")


def test_a_link_over_the_containers_root(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    hooks = reported(nvhook(prefix, host), tmp_path / "report")
    bundle = make_bundle("resolve libcuda.so.1", env=visible("0"), prestart=hooks)
    lead(bundle.root, "/tmp/nvidia-mps", "/")
    assert output(bundle) == f"libcuda.so.1 {MULTIARCH}/libcuda.so.1\n"
    assert "/tmp/nvidia-mps in the container leads to its root" in (tmp_path / "report").read_text()


def test_a_cache_that_is_the_kernels(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle) -> None:
    """/proc/kmsg, once read, is gone from the host's log. The libraries are found without a cache."""
    top = root.open_root("/")
    posix.close(root.open_file(top, "/proc/version"))
    with pytest.raises(OSError, match="not a regular file"):
        root.open_file(top, "/proc/version", stored=True)
    bundle = make_bundle("resolve libcuda.so.1", env=visible("0"), prestart=nvhook(prefix, host))
    (bundle.root / "etc/ld.so.cache").unlink()
    (bundle.root / "etc/ld.so.cache").symlink_to("/proc/version")
    # The first of the loader's default folders.
    assert output(bundle) == "libcuda.so.1 /lib/x86_64-linux-gnu/libcuda.so.1\n"


def test_a_cache_that_is_a_mount(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path) -> None:
    shutil.copy("/etc/ld.so.cache", tmp_path / "cache")
    before = (tmp_path / "cache").read_bytes()
    mount = bind(tmp_path / "cache", "/etc/ld.so.cache")
    script = "resolve libcuda.so.1"
    hooks = reported(nvhook(prefix, host), tmp_path / "report")
    bundle = make_bundle(script, env=visible("0"), prestart=hooks, mounts=[mount])
    assert output(bundle) in [f"libcuda.so.1 {where}/libcuda.so.1\n" for where in ("/lib/x86_64-linux-gnu", MULTIARCH)]
    assert "/etc/ld.so.cache" in (tmp_path / "report").read_text()
    assert (tmp_path / "cache").read_bytes() == before


@pytest.mark.parametrize("path", ["/usr/" + "a/" * 17 + "bin", "/usr/\ud800x"])
def test_a_path_variable_that_costs(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, path: str) -> None:
    env = visible("0", "utility")
    bundle = make_bundle("true", env=env | {"PATH": path}, prestart=nvhook(prefix, host))
    before = tree_of(bundle.root)
    done = bundle.run()
    assert "Traceback" not in done.stderr
    made = sorted(set(tree_of(bundle.root)) - set(before))
    assert not any(name.startswith("usr/a") for name in made)


def test_a_name_that_would_write_lines_of_ours(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    """Warnings name the image's files; a newline or an escape sequence in a name stays within its line."""
    hooks = reported(nvhook(prefix, host), tmp_path / "report")
    bundle = make_bundle("resolve libcuda.so.1", env=visible("0"), prestart=hooks)
    (bundle.root / MULTIARCH.lstrip("/") / "libcuda.so.9\nnvhook: error: forged\n  remedy: \x1b[2Jnone").write_text("x")
    assert output(bundle) == f"libcuda.so.1 {MULTIARCH}/libcuda.so.1\n"
    lines = (tmp_path / "report").read_text().splitlines()
    assert all(line.startswith("nvhook: warning: ") and line.isprintable() for line in lines)
    assert any(r"/libcuda.so.9\nnvhook: error: forged\n  remedy: \x1b[2Jnone of the image" in line for line in lines)


# create-container


def create_container(prefix: Path, *arguments: str) -> dict[str, Any]:
    """The createContainer hook of a CDI file."""
    return hook(prefix / "bin/nvhook-create-container", *arguments)


def test_a_failed_finish_takes_its_mounts_back(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    """A file of the image's is covered with a mount first; then a later link can't be made."""
    library = host.library("libcuda.so.1")
    where = f"{MULTIARCH}/{library.name}"
    report = tmp_path / "report"
    # The last hook does not run when one before it fails, so the table is read by the failing hook's wrapper.
    program = f'"$@"; echo "$?" > {report}; grep -c {MULTIARCH}/libcuda.so.1 /proc/self/mountinfo >> {report}; exit 1'
    failing = create_container(
        prefix, "--link", f"{library.name}::{MULTIARCH}/libcuda.so.1", "--link", "x::/etc/passwd/below"
    )
    wrapped = {"path": "/bin/sh", "args": ["/bin/sh", "-c", program, "sh", failing["path"], *failing["args"][1:]]}
    bundle = make_bundle("true", create_container=[wrapped], mounts=[bind(library, where, "ro")])
    (bundle.root / MULTIARCH.lstrip("/") / "libcuda.so.1").write_text("the image's own")
    done = bundle.run()
    assert "cannot make /etc/passwd" in done.stderr, done.stderr
    assert report.read_text().split() == ["1", "0"]


def test_no_file_of_the_image_is_a_mounts_source(prefix: Path, make_bundle: MakeBundle, tmp_path: Path) -> None:
    """The image has a file where the link belongs, and one of its own where the host's library should be."""
    finish = create_container(prefix, "--link", f"libx.so.9::{MULTIARCH}/libx.so.1")
    bundle = make_bundle("true", create_container=reported([finish], tmp_path / "report"))
    for name in ("libx.so.1", "libx.so.9"):
        (bundle.root / MULTIARCH.lstrip("/") / name).write_text(name)
    bundle.run()
    assert f"no file of the host is at {MULTIARCH}/libx.so.9" in (tmp_path / "report").read_text()
    assert (bundle.root / MULTIARCH.lstrip("/") / "libx.so.1").read_text() == "libx.so.1"


@pytest.mark.parametrize("linked", [False, True])
def test_the_source_of_a_covered_name_is_the_hosts_file(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path, linked: bool
) -> None:
    """As config.json names it, a link too, which the runtime has followed."""
    library = host.library("libcuda.so.1")
    source = library
    if linked:
        source = tmp_path / "link"
        source.symlink_to(library)
    where = f"{MULTIARCH}/{library.name}"
    finish = create_container(prefix, "--link", f"{library.name}::{MULTIARCH}/libcuda.so.1")
    script = f"stat -c %d:%i {MULTIARCH}/libcuda.so.1"
    bundle = make_bundle(script, create_container=[finish], mounts=[bind(source, where, "ro")])
    (bundle.root / MULTIARCH.lstrip("/") / "libcuda.so.1").write_text("the image's own")
    assert output(bundle) == f"{library.stat().st_dev}:{library.stat().st_ino}\n"


@pytest.mark.parametrize("damage", ["machine", "offset"])
def test_an_odd_library_in_a_volume_is_left_out(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path, damage: str
) -> None:
    library = host.library("libcuda.so.1")
    content = bytearray(library.read_bytes())
    if damage == "machine":
        content[18:20] = (8).to_bytes(2, "little")
    else:
        start = int.from_bytes(content[32:40], "little")
        for at in range(start, start + 56 * int.from_bytes(content[56:58], "little"), 56):
            if content[at : at + 4] == (2).to_bytes(4, "little"):
                content[at + 8 : at + 16] = (2**63 - 8).to_bytes(8, "little")
    odd = tmp_path / "odd.so"
    odd.write_bytes(content)
    mounts = [bind(library, f"{MULTIARCH}/{library.name}", "ro"), bind(odd, f"{MULTIARCH}/libodd.so", "ro")]
    link = f"{library.name}::{MULTIARCH}/libcuda.so.1"
    finish = create_container(prefix, "--link", link, "--folder", MULTIARCH)
    bundle = make_bundle("resolve libcuda.so.1", create_container=[finish], mounts=mounts)
    assert output(bundle) == f"libcuda.so.1 {MULTIARCH}/libcuda.so.1\n"


def test_a_link_to_itself_ends(prefix: Path, make_bundle: MakeBundle) -> None:
    finish = create_container(prefix, "--link", f"a::{MULTIARCH}/a")
    assert output(make_bundle(f"readlink {MULTIARCH}/a", create_container=[finish])) == "a\n"


def test_no_mount_namespace(prefix: Path, tmp_path: Path) -> None:
    """Started by hand in the host's namespace: config.json says that there is no other."""
    image = roots.make_root(tmp_path / "image")
    bundle = Bundle(tmp_path / "bundle", image, ["true"], namespaces=("pid",))
    bundle.write()
    before = tree_of(image)
    state = json.dumps({"ociVersion": "1.0.2", "id": "x", "pid": 1, "bundle": str(bundle.folder)})
    command = [str(prefix / "bin/nvhook-create-container"), "--link", f"x::{MULTIARCH}/libcuda.so.1"]
    done = subprocess.run(command, input=state, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "has no mount namespace of its own" in done.stderr
    assert tree_of(image) == before


def test_a_root_that_is_no_mount_point(prefix: Path, tmp_path: Path) -> None:
    """Somebody who may write a part of the root's path has put a folder of the host's there."""
    victim = roots.make_root(tmp_path / "victim")
    bundle = Bundle(tmp_path / "bundle", victim, ["true"])
    bundle.write()
    before = tree_of(victim)
    state = json.dumps({"ociVersion": "1.0.2", "id": "x", "pid": 1, "bundle": str(bundle.folder)})
    command = [str(prefix / "bin/nvhook-create-container"), "--link", f"x::{MULTIARCH}/libcuda.so.1"]
    done = subprocess.run(command, input=state, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is no mount point of its namespace" in done.stderr
    assert tree_of(victim) == before


def test_inverses_are_there_before_ownership_is(tmp_path: Path) -> None:
    """With CAP_CHOWN gone each creation fails half-way; nothing of it stays."""
    program = (
        "import os, sys\n"
        "from hook import namespace, steps\n"
        "from ldcache import root\n"
        "place = namespace.Namespace()\n"
        "place.base = root.open_root(sys.argv[1]); place.ids = (100000, 100000)\n"
        "from ldcache import kernel\n"
        "place.base_mount = kernel.mount_id(place.base)\n"
        "links = [steps.Link(path, 'x', '/x', None) for path in ('/link', '/old', '/d/e/link')]\n"
        "for step in links:\n"
        "    try: step.execute(place)\n"
        "    except Exception as error: print(type(error).__name__)\n"
        "    print(place.undo())\n"
    )
    (tmp_path / "old").symlink_to("before")
    command = [
        "setpriv",
        "--bounding-set",
        "-chown",
        "--inh-caps",
        "-chown",
        sys.executable,
        "-c",
        program,
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["NvhookError", "[]"] * 3, done.stdout + done.stderr
    assert tree_of(tmp_path) == {"old": "-> before"}

# SPDX-License-Identifier: Apache-2.0
"""The .deb and .rpm packages: built, judged by the distributions' own tools, and on Debian 12 and 13 installed by apt,
used, upgraded, removed and purged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hook import install
from tests import releases, roots
from tests.containers import SYSTEM_PATH, Bundle, Hook, hook
from tests.needs import needs_program
from tests.simhost import SimulatedHost
from tests.system import runtimes
from tests.system.prestart import PROC_HOOK, visible

TREE = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"NVHOOK_BUILD_PYTHON": sys.executable, "PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8"}

pytestmark = pytest.mark.long

DEPENDENCIES = (
    *("python3", "python3-cffi-backend", "python3-jsonschema", "python3-tomlkit", "python3-yaml"),
    "runc",
)
NAMES = ("nvhook", "nvhook-nvidia-names")

# What apt and dpkg keep for themselves, and files that every package's installation writes anew.
NOT_OURS = (
    *("var/cache", "var/log", "var/lib/apt", "var/lib/dpkg", "etc/ld.so.cache", "run", "tmp", "root"),
    # What a test's own mounts left.
    *(".outside", "proc", "sys", "dev", "packages", TREE.parts[1]),
)
UNIT_STATE = ("etc/systemd/system/", "var/lib/systemd")


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=ENVIRONMENT, **options
    )  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return str(done.stdout)


# .deb


@pytest.fixture(scope="module")
def debs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both packages, and below `later` those of a later version."""
    for name in ("dpkg-buildpackage", "dh_python3"):
        if shutil.which(name, path=SYSTEM_PATH) is None:
            pytest.skip(f"needs {name}, which is not installed (debhelper, dh-python)")
    folder = tmp_path_factory.mktemp("debs")
    run(TREE / "packaging/build-deb", folder)
    run(TREE / "packaging/build-deb", folder / "later", "9.0")
    return folder


def test_two_debs_are_made(debs: Path) -> None:
    assert sorted(path.name for path in debs.glob("*.deb")) == [
        "nvhook-nvidia-names_0.1.0_all.deb",
        "nvhook_0.1.0_amd64.deb",
    ]


def test_a_second_build_gives_the_same_bytes(debs: Path, tmp_path: Path) -> None:
    run(TREE / "packaging/build-deb", tmp_path)
    for path in debs.glob("*.deb"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_one_package_serves_every_python(debs: Path) -> None:
    """A dependency on one version of Python would end with the distribution's next."""
    depends = run("dpkg-deb", "-f", next(debs.glob("nvhook_*.deb")), "Depends").split(", ")
    assert [name for name in depends if name.startswith(("python3.", "python3 (<<"))] == []
    assert {"python3-cffi-backend-api-max (>= 9729)", "python3-tomlkit"} <= set(x.strip() for x in depends)


@needs_program("lintian")
def test_lintian_finds_nothing(debs: Path) -> None:
    printed = run("lintian", "--fail-on", "error,warning", "--allow-root", *sorted(debs.glob("*.deb")))
    assert [line for line in printed.splitlines() if line[:2] in ("E:", "W:")] == []


def test_every_program_has_a_page(debs: Path) -> None:
    for path in debs.glob("*.deb"):
        names = [line.split()[5] for line in run("dpkg-deb", "-c", path).splitlines()]
        pages = {Path(name).name.removesuffix(".gz").rpartition(".")[0] for name in names if "/share/man/" in name}
        programs = {Path(name).name for name in names if name.startswith("./usr/bin/") and not name.endswith("/")}
        assert programs - pages == set(), path.name


class Machine:
    """A fresh Debian: an overlay over the kept root of a release, which is never changed."""

    def __init__(self, lower: Path, folder: Path, release: str) -> None:
        self.release = release
        self.root = folder / "root"
        # The files of an overlay may not lie on another one, as a container's /tmp can.
        self.layer = folder / "layer"
        self.layer.mkdir()
        run("mount", "-t", "tmpfs", "none", self.layer)
        for name in ("upper", "work"):
            (self.layer / name).mkdir()
        self.root.mkdir()
        options = f"lowerdir={lower},upperdir={self.layer}/upper,workdir={self.layer}/work"
        run("mount", "-t", "overlay", "-o", options, "none", self.root)
        shutil.copy("/etc/resolv.conf", self.root / "etc/resolv.conf")
        (self.root / "packages").mkdir()

    def close(self) -> None:
        for folder in (self.root, self.layer):
            subprocess.run(["umount", "-R", folder], check=False)

    def run(self, *command: str, status: int = 0) -> str:
        """A command in it, with its own /proc and /dev."""
        script = 'mount -t proc proc "$0/proc"; mount --rbind /dev "$0/dev"; exec chroot "$0" "$@"'
        enter = ["unshare", "--mount", "sh", "-euc", script, str(self.root)]
        words = ["/usr/bin/env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND=noninteractive", *command]
        done = subprocess.run(
            [*enter, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == status, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def apt(self, *words: str) -> str:
        return self.run("apt-get", "-q", "-y", "-o", "Acquire::Retries=3", *words)

    def add(self, debs: Path) -> list[str]:
        """Packages' files, by their names in it."""
        names = []
        for path in sorted(debs.glob("*.deb")):
            shutil.copy(path, self.root / "packages" / path.name)
            names.append(f"/packages/{path.name}")
        return names

    def files(self) -> set[str]:
        """Every path, less what the packages' tools keep."""
        found = set()
        for folder, folders, names in os.walk(self.root):
            here = os.path.relpath(folder, self.root)
            folders[:] = [name for name in folders if os.path.normpath(f"{here}/{name}") not in NOT_OURS]
            found |= {os.path.normpath(f"{here}/{name}") for name in (*folders, *names)}
        return {path for path in found if path not in NOT_OURS}

    def modules(self) -> list[str]:
        """Byte code of ours."""
        return [str(path) for path in (self.root / "usr/lib/nvhook").rglob("*.pyc")]


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def machine(request: pytest.FixtureRequest, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    try:
        lower = releases.debian(cache, request.param)
    except RuntimeError as error:
        pytest.skip(str(error))
    made = Machine(lower, tmp_path_factory.mktemp(request.param), request.param)
    try:
        for tries_left in (2, 1, 0):
            try:
                made.apt("update")
                made.apt("install", "--no-install-recommends", *DEPENDENCIES)
                break
            except AssertionError:
                # A mirror that changes meanwhile, or a name server's bad moment.
                if not tries_left:
                    raise
                time.sleep(15)
        yield made
    finally:
        made.close()


def start(machine: Machine, host: SimulatedHost, tmp_path: Path, name: str, program: str) -> str:
    """What a container prints whose prestart hook is an installed program."""
    arguments = ["--host-root", str(host.root)]
    hooks = [
        hook(runtimes.PYTHON, "-I", "-S", str(PROC_HOOK)),
        hook(f"/usr/bin/{program}", *(["prestart"] if program != "nvhook-prestart" else []), *arguments),
    ]
    return started(machine, host, tmp_path, name, ["runc"], "resolve -s libcuda.so.1; nvidia-smi -L", hooks)


def started(
    machine: Machine,
    host: SimulatedHost,
    tmp_path: Path,
    name: str,
    runtime: list[str],
    script: str,
    hooks: list[Hook],
) -> str:
    """What a container prints that asks for the second GPU."""
    image = roots.make_root(tmp_path / f"image-{name}")
    bundle = Bundle(tmp_path / f"bundle-{name}", image, ["/bin/sh", "-c", script], env=visible("1"))
    bundle.prestart = hooks
    bundle.write()
    command = [*runtime, "--root", str(bundle.folder / "state"), "run", "--bundle", str(bundle.folder), bundle.name]
    done = runtimes.entered(machine.root, bundle, command, host.root)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_package_from_its_installation_to_its_purge(
    machine: Machine, debs: Path, host: SimulatedHost, tmp_path: Path
) -> None:
    before = machine.files()

    # Installed: byte-compiled, and nothing written that a package does not own.
    machine.apt("install", "--no-install-recommends", *machine.add(debs))
    assert "Puts an NVIDIA GPU" in machine.run("nvhook", "--help")
    assert len(machine.modules()) > 80
    assert machine.run("dpkg", "-V", *NAMES) == ""
    owned = {line.lstrip("/") for name in NAMES for line in machine.run("dpkg", "-L", name).splitlines()}
    made = f"usr/lib/nvhook/bin/hot.cpython-{'313' if machine.release == 'trixie' else '311'}"
    assert made in machine.files()
    added = {path for path in machine.files() - before if "__pycache__" not in path} - {made}
    # /lib is a link to /usr/lib, which dpkg does not follow; what enables a unit is systemd's helper's.
    added -= owned | {f"usr/{path}" for path in owned if path.startswith("lib/")}
    assert {path for path in added if not path.startswith(UNIT_STATE)} == set()

    # Used: by a hook's name of ours and one of NVIDIA's; the packaged commands work.
    uuid = host.host.gpus[1].uuid
    for name in ("nvhook-prestart", "nvidia-container-runtime-hook"):
        printed = start(machine, host, tmp_path, name, name)
        assert f"(UUID: {uuid})" in printed
        assert "libcuda.so.1 /usr/lib/x86_64-linux-gnu/libcuda.so.1" in printed
    assert "unknown" not in machine.run("nvidia-ctk", "config", "default")

    # Registered: the engine's file names an installed program, by which a container starts.
    machine.run("nvhook", "configure", "docker")
    daemon = machine.root / "etc/docker/daemon.json"
    path = json.loads(daemon.read_text())["runtimes"]["nvidia"]["path"]
    script = "resolve -s libcuda.so.1; ls /dev/nvidia?"
    printed = started(machine, host, tmp_path, "registered", [path, "--host-root", str(host.root)], script, [])
    assert "libcuda.so.1 /usr/lib/x86_64-linux-gnu/libcuda.so.1" in printed and printed.endswith("\n/dev/nvidia1\n")
    machine.run("nvhook", "config", "--in-place")
    assert (machine.root / "etc/nvhook/config.toml").is_file()

    # Upgraded: the configuration stays, and so do starts; a daemon goes on with the new code.
    (machine.root / "run/systemd/system").mkdir(parents=True)
    (machine.root / "usr/bin/systemctl").write_text('#!/bin/sh\necho "$*" >>/run/systemctl\n')
    (machine.root / "usr/bin/systemctl").chmod(0o755)
    asked = machine.root / "run/systemctl"
    machine.apt("install", "--no-install-recommends", *machine.add(debs / "later"))
    assert machine.run("dpkg-query", "-W", "-f", "${Version} ", *NAMES) == "9.0 9.0 "
    assert f"(UUID: {uuid})" in start(machine, host, tmp_path, "upgraded", "nvhook-prestart")
    assert len(machine.modules()) > 80
    assert "try-restart nvhook-cdi-watch.service" in asked.read_text()
    assert "try-restart nvhook-metrics" not in asked.read_text()

    # Removed: what an administrator wrote is kept, and no daemon is left.
    asked.unlink()
    machine.run("nvhook", "configure", "docker", "--remove")
    assert not daemon.exists()
    spec = machine.root / "run/cdi/nvidia.yaml"
    spec.parent.mkdir(parents=True, exist_ok=True)
    spec.write_text(json.dumps({"hooks": ["/usr/bin/nvhook-create-container"]}))
    machine.apt("remove", *NAMES)
    assert not (machine.root / "usr/lib/nvhook").exists()
    assert (machine.root / "etc/nvhook/config.toml").is_file()
    assert not spec.exists()
    stopped = " ".join(line for line in asked.read_text().splitlines() if "stop" in line.split())
    assert {"nvhook-cdi-watch.service", "nvhook-metrics.timer", "nvhook-nodes.service"} <= set(stopped.split())
    (machine.root / "usr/bin/systemctl").unlink()
    shutil.rmtree(machine.root / "run/systemd")

    # Purged: nothing is left.
    machine.apt("purge", *NAMES)
    assert machine.files() - before == set()


def test_nvidias_packages_and_the_names_exclude_each_other(machine: Machine, debs: Path, tmp_path: Path) -> None:
    package = tmp_path / "package/DEBIAN"
    package.mkdir(parents=True)
    fields = {
        "Package": "nvidia-container-toolkit-base",
        "Version": "1.18.0-1",
        "Architecture": "all",
        "Maintainer": "nobody <nobody@packages.invalid>",
        "Description": "stands for NVIDIA's",
    }
    (package / "control").write_text("".join(f"{name}: {value}\n" for name, value in fields.items()))
    run("dpkg-deb", "--build", package.parent, machine.root / "packages/theirs.deb")
    machine.apt("install", "--no-install-recommends", *machine.add(debs))
    refused = machine.run("dpkg", "-i", "/packages/theirs.deb", status=1)
    assert "conflicts with nvidia-container-toolkit-base" in refused or "conflicting packages" in refused
    machine.apt("purge", *NAMES)


# .rpm


@pytest.fixture(scope="module")
def rpms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("rpmbuild", path=SYSTEM_PATH) is None:
        pytest.skip("needs rpmbuild, which is not installed (Debian: rpm)")
    folder = tmp_path_factory.mktemp("rpms")
    run(TREE / "packaging/build-rpm", folder)
    return folder


def test_two_rpms_are_made(rpms: Path) -> None:
    assert sorted(path.name for path in rpms.iterdir()) == [
        "nvhook-0.1.0-1.x86_64.rpm",
        "nvhook-nvidia-names-0.1.0-1.noarch.rpm",
    ]


@needs_program("rpmlint")
def test_rpmlint_finds_nothing(rpms: Path) -> None:
    printed = run("rpmlint", "-c", TREE / "packaging/rpm/rpmlint.toml", *sorted(rpms.iterdir()))
    assert [line for line in printed.splitlines() if ": E: " in line or ": W: " in line] == []


@needs_program("rpm2cpio")
@needs_program("cpio")
def test_an_rpm_unpacked_works_and_its_scriptlets_take_their_byte_code_away(machine: Machine, rpms: Path) -> None:
    """No Fedora or EL is at hand: the files are unpacked into a Debian, and the scriptlets run as rpm would."""
    before = machine.files()
    for path in sorted(rpms.iterdir()):
        run("sh", "-euc", 'rpm2cpio "$0" | cpio -idm --quiet', path, cwd=machine.root)
    unpacked = machine.files()
    for name in (*install.LAUNCHERS, "nvhook", "nvidia-ctk"):
        assert (machine.root / "usr/bin" / name).resolve().is_relative_to(machine.root / "usr/lib/nvhook/bin")

    def scriptlet(tag: str, argument: str) -> None:
        text = run("rpm", "-qp", "--queryformat", f"%{{{tag}}}", rpms / "nvhook-0.1.0-1.x86_64.rpm")
        machine.run("sh", "-ec", text, "sh", argument)

    scriptlet("POSTIN", "1")
    assert len(machine.modules()) > 80
    assert "Puts an NVIDIA GPU" in machine.run("nvhook", "--help")
    # An upgrade's: nothing goes.
    scriptlet("PREUN", "1")
    assert len(machine.modules()) > 80
    scriptlet("PREUN", "0")
    scriptlet("POSTUN", "0")
    assert machine.files() == unpacked
    for name in sorted(unpacked - before, reverse=True):
        place = machine.root / name
        if place.is_symlink() or place.is_file():
            place.unlink()
        else:
            place.rmdir()

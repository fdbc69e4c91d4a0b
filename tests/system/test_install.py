# SPDX-License-Identifier: Apache-2.0
"""From the sources to a hook that starts: sdist, the wheel made from it, a clean environment, `nvhook install`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

TREE = Path(__file__).resolve().parents[2]
NATIVE = ("hook/_cuda.abi3.so", "hook/bin/cuda-check", "hook/bin/launch", "ldcache/_sys.abi3.so")

# Fixed, or an archive carries the time of its making.
ENVIRONMENT = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
# What a command finds around it in a cron job: no Python variable, no folder of ours on PATH.
BARE = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    options.setdefault("stdin", subprocess.DEVNULL)
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive of this tree."""
    folder = tmp_path_factory.mktemp("sdist")
    build = (sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder)
    run(*build, TREE, cwd=folder, env=ENVIRONMENT)
    (made,) = folder.iterdir()
    return made


def build_wheel(sdist: Path, folder: Path) -> Path:
    """The wheel made from a source archive unpacked in `folder`."""
    with tarfile.open(sdist) as archive:
        # Ours, made a moment ago.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # type: ignore[arg-type]
    (source,) = folder.iterdir()
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "wheel")
    run(*build, source, cwd=folder, env=ENVIRONMENT)
    (made,) = (folder / "wheel").iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(sdist, tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean virtual environment with the wheel and what it depends on, as pip resolves it."""
    folder = tmp_path_factory.mktemp("environment") / "clean"
    venv.create(folder, with_pip=False, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin/python", "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-warn-script-location", wheel)
    return folder


@pytest.fixture(scope="module")
def prefix(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel's own `nvhook install` put the hooks."""
    folder = tmp_path_factory.mktemp("prefix") / "usr"
    printed = run(environment / "bin/nvhook", "install", "--prefix", folder, cwd="/", env=BARE).stdout
    assert [Path(line) for line in printed.splitlines()] == [
        folder / "bin/nvhook-prestart",
        folder / "bin/nvhook-create-container",
        folder / "bin/nvhook-runtime",
    ]
    return folder


# The archives


def test_the_sdist_holds_the_sources_and_nothing_built(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tops = {name.partition("/")[0] for name in names}
    files = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"}
    assert tops == files | {"cdi", "docs", "hook", "ldcache", "packaging", "tests"}
    assert {"ldcache/sys.c", "ldcache/sys.h", "packaging/build.py", "packaging/launcher.c"} <= names
    assert names.isdisjoint(NATIVE)
    assert [name for name in names if name.endswith(".pyc")] == []


def test_the_wheel_holds_all_that_runs_and_no_source_of_it(wheel: Path) -> None:
    assert wheel.name.startswith("nvhook-0.1.0-cp310-abi3-linux_")
    with zipfile.ZipFile(wheel) as archive:
        modes = {info.filename: info.external_attr >> 16 & 0o777 for info in archive.infolist()}
    assert {name: oct(modes.get(name, 0)) for name in NATIVE} == dict.fromkeys(NATIVE, "0o755")
    built = {name for name in modes if name.endswith((".c", ".h", "_build.py", ".pyc"))}
    assert built == set()
    assert {name.partition("/")[0] for name in modes} == {"cdi", "hook", "ldcache", "nvhook-0.1.0.dist-info"}
    assert {"hook/py.typed", "cdi/py.typed", "ldcache/py.typed", "ldcache/_sys.pyi"} <= set(modes)
    assert "cdi/schema/cdi.schema.json" in modes
    assert "nvhook-0.1.0.dist-info/licenses/LICENSE" in modes


def test_the_wheel_holds_every_module(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.endswith(".py")}
    modules = {
        path.relative_to(TREE).as_posix()
        for package in ("cdi", "hook", "ldcache")
        for path in (TREE / package).rglob("*.py")
        if not path.name.endswith("_build.py")
    }
    assert names == modules


def test_the_same_sources_make_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    again = build_wheel(sdist, tmp_path)
    assert again.name == wheel.name
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(wheel.read_bytes()).digest()


# The commands


@pytest.mark.parametrize(
    "command",
    [
        ("nvhook", "--help"),
        ("nvhook", "inventory", "--help"),
        ("nvhook", "plan", "--help"),
        ("nvhook", "verify", "--help"),
        ("nvhook", "install", "--help"),
        ("nvhook", "cdi", "--help"),
        ("nvhook", "cdi", "generate", "--help"),
        ("nvhook", "ldcache", "--help"),
        ("cdi", "--help"),
        ("cdi", "generate", "--help"),
        ("ldcache", "--help"),
        ("ldcache", "print", "--help"),
    ],
    ids=" ".join,
)
def test_a_command_starts(environment: Path, command: tuple[str, ...]) -> None:
    name, *arguments = command
    done = run(environment / "bin" / name, *arguments, cwd="/", env=BARE)
    assert done.stdout.lower().startswith("usage: ")
    assert done.stderr == ""


def test_a_command_does_its_work(environment: Path) -> None:
    assert "libc.so.6" in run(environment / "bin/ldcache", "print", cwd="/", env=BARE).stdout


@pytest.mark.parametrize("name", ["nvhook", "cdi", "ldcache"])
def test_a_wrong_use_is_told_by_the_exit_status(environment: Path, name: str) -> None:
    for arguments in ((), ("no-such-verb",)):
        done = subprocess.run(
            [environment / "bin" / name, *arguments], capture_output=True, text=True, check=False, cwd="/", env=BARE
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert "usage: " in done.stderr


def test_the_native_modules_load(environment: Path) -> None:
    program = "from ldcache import _sys, root; from hook import _cuda; print(root.open_root('/') >= 0)"
    assert run(environment / "bin/python", "-I", "-c", program, cwd="/", env=BARE).stdout == "True\n"


# The hooks


def bundle(folder: Path, *env: str) -> str:
    """A bundle whose container has this environment; the state that names it is returned."""
    (folder / "rootfs").mkdir(parents=True)
    config = {"ociVersion": "1.0.2", "root": {"path": "rootfs"}, "process": {"env": list(env)}, "mounts": []}
    (folder / "config.json").write_text(json.dumps(config))
    state = {"ociVersion": "1.0.2", "id": "test", "status": "created", "pid": os.getpid(), "bundle": str(folder)}
    return json.dumps(state)


def test_the_hook_starts_and_leaves_a_container_without_a_request_alone(prefix: Path, tmp_path: Path) -> None:
    for env in ((), ("NVIDIA_VISIBLE_DEVICES=void",)):
        state = bundle(tmp_path / f"bundle{len(env)}", "PATH=/usr/bin", *env)
        done = run(prefix / "bin/nvhook-prestart", stdin=None, input=state, cwd="/", env={})
        assert (done.stdout, done.stderr) == ("", "")


def test_the_hooks_start_without_the_environment_that_installed_them(
    environment: Path, prefix: Path, tmp_path: Path
) -> None:
    away = environment.with_name("away")
    environment.rename(away)
    try:
        state = bundle(tmp_path / "bundle")
        run(prefix / "bin/nvhook-prestart", stdin=None, input=state, cwd="/", env={})
        for name in ("nvhook-poststart", "nvhook-poststop"):
            run(name, executable=prefix / "lib/nvhook/bin/launch", cwd="/", env={})
    finally:
        away.rename(environment)


@pytest.mark.parametrize("name", ["nvhook-prestart", "nvhook-create-container"])
def test_a_hook_without_a_state_fails_in_two_lines(prefix: Path, name: str) -> None:
    done = subprocess.run([prefix / "bin" / name], input="", capture_output=True, text=True, check=False, env={})
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(lines)) == (1, "", 2)
    assert lines[0].startswith("nvhook: error: ")
    assert lines[1].startswith("  remedy: ")


def test_the_installed_copy_is_complete_and_compiled(prefix: Path) -> None:
    library = prefix / "lib/nvhook"
    for package in ("cdi", "hook", "ldcache"):
        for path in (library / package).rglob("*.py"):
            assert list((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc")), f"{path} is not compiled"
    names = {"nvhook-prestart", "nvhook-create-container", "nvhook-runtime"}
    assert {path.name for path in (prefix / "bin").iterdir()} == names
    writable = [path for path in prefix.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o022]
    assert writable == []


def test_installing_again_replaces_the_copy(environment: Path, prefix: Path, tmp_path: Path) -> None:
    other = tmp_path / "usr"
    shutil.copytree(prefix, other, symlinks=True)
    (other / "lib/nvhook/hook/removed_since.py").touch()
    run(environment / "bin/nvhook", "install", "--prefix", other, cwd="/", env=BARE)
    assert not (other / "lib/nvhook/hook/removed_since.py").exists()
    assert [path.name for path in (other / "lib").iterdir()] == ["nvhook"]
    run(other / "bin/nvhook-prestart", stdin=None, input=bundle(tmp_path / "bundle"), cwd="/", env={})

# SPDX-License-Identifier: Apache-2.0
"""The static launcher: whatever environment and working directory it is started in, none of their code runs."""

from __future__ import annotations

import ast
import ctypes
import os
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hook import install
from tests.containers import find_program

TREE = Path(__file__).resolve().parents[2]
SOURCE = TREE / "packaging/launcher.c"
PLANTED = TREE / "tests/system/planted.c"

# Prints what it was started with; nothing is imported that a planted module could stand in for.
ENTRY = """
import sys, posix
sys.stdout.write(repr({
    "argv": sys.argv,
    "environ": {key.decode(): value.decode() for key, value in posix.environ.items()},
    "path": sys.path,
    "isolated": sys.flags.isolated,
    "no_site": sys.flags.no_site,
    "dont_write_bytecode": sys.flags.dont_write_bytecode,
    "cwd": posix.getcwd(),
    "origin": sys.modules["encodings"].__file__,
}))
"""

PT_INTERP = 3
IN_ACCESS, IN_OPEN, IN_NONBLOCK = 0x1, 0x20, 0o4000


@pytest.fixture(scope="module", params=["musl-gcc", "cc"])
def launcher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A launcher as the build makes it, with one compiler; no path is written into it yet."""
    compiler = request.param
    if find_program(compiler) is None:
        pytest.skip(f"needs {compiler}, which is not installed")
    tree = tmp_path_factory.mktemp(compiler)
    (tree / "packaging").mkdir()
    for name in ("packaging/build.py", "packaging/launcher.c"):
        shutil.copy(TREE / name, tree / name)
    program = f"""
import importlib.util, pathlib
spec = importlib.util.spec_from_file_location("build", {str(tree / "packaging/build.py")!r})
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
build.build(pathlib.Path({str(tree)!r}), ["hook/bin/launch"])
"""
    (tree / "hook").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "CC_STATIC": compiler},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return tree / "hook/bin/launch"


@pytest.fixture
def installed(launcher: Path, tmp_path: Path) -> Path:
    """A copy that knows the interpreter and an entry script, under a hook's name."""
    folder = tmp_path / "installed"
    folder.mkdir()
    (folder / "entry").write_text(ENTRY)
    shutil.copy(launcher, folder / "nvhook-probe")
    marks = {"@PYTHON@": install.interpreter(), "@ENTRY@": str(folder / "entry")}
    install.write_marks(folder / "nvhook-probe", marks)
    return folder / "nvhook-probe"


def start(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What the entry script printed."""
    assert (done.returncode, done.stderr) == (0, "")
    value: dict[str, Any] = ast.literal_eval(done.stdout)
    return value


# What it is


def segment_types(path: Path) -> list[int]:
    """p_type of each program header of a 64-bit ELF file of this machine's byte order."""
    content = path.read_bytes()
    assert content[:5] == b"\x7fELF\x02"
    (offset,) = struct.unpack_from("=Q", content, 32)
    size, count = struct.unpack_from("=HH", content, 54)
    return [struct.unpack_from("=I", content, offset + i * size)[0] for i in range(count)]


def test_no_loader_stands_before_it(launcher: Path) -> None:
    assert PT_INTERP not in segment_types(launcher)
    assert PT_INTERP in segment_types(Path(install.interpreter()))


def test_it_stays_small() -> None:
    assert len(SOURCE.read_text().splitlines()) < 300


def test_the_build_made_one() -> None:
    assert PT_INTERP not in segment_types(TREE / "hook/bin/launch")


# What it passes on


def test_the_environment_is_ours(installed: Path, tmp_path: Path) -> None:
    outside = {
        "PATH": "/nowhere",
        "HOME": "/nowhere",
        "LANG": "xx_XX",
        "LC_ALL": "POSIX",
        "XDG_RUNTIME_DIR": "/run/user/7",
    }
    outside |= {"XDG_RUNTIME_DIRECTORY": "/nowhere", "PYTHONWARNINGS": "error", "SECRET": "x"}
    seen = report(start(installed, env=outside, cwd=tmp_path))
    assert seen["environ"] == {
        "LC_ALL": "C.UTF-8",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "XDG_RUNTIME_DIR": "/run/user/7",
    }
    assert (seen["isolated"], seen["no_site"], seen["dont_write_bytecode"]) == (1, 1, 1)
    assert seen["cwd"] == str(tmp_path)


def test_an_empty_environment(installed: Path) -> None:
    assert set(report(start(installed, env={}))["environ"]) == {"LC_ALL", "PATH"}


def test_only_the_standard_library_is_on_the_path(installed: Path, tmp_path: Path) -> None:
    base = Path(install.interpreter()).parent.parent
    for folder in report(start(installed, cwd=tmp_path))["path"]:
        assert Path(folder).is_relative_to(base)
        assert "packages" not in folder


def test_arguments_pass_through(installed: Path) -> None:
    arguments = ["--host-root", "/x y", "", "-c", "ä", "--", "-I"]
    assert report(start(installed, *arguments))["argv"] == [str(installed.parent / "entry"), "probe", *arguments]


def test_the_name_is_the_verb(installed: Path) -> None:
    for name in ("nvhook-prestart", "nvhook-create-container", "nvidia-cdi-hook", "nvidia-container-toolkit"):
        link = installed.with_name(name)
        link.symlink_to(installed)
        assert report(start(link))["argv"][1:] == [name.removeprefix("nvhook-")]
    # argv[0] is what a runtime passes as args[0], with or without a folder.
    assert report(start("nvhook-poststop", executable=installed))["argv"][1:] == ["poststop"]


@pytest.mark.parametrize("name", ["nvidia-container-runtime-hook", "nvidia-container-toolkit", "nvidia-cdi-hook"])
def test_nvidias_names_are_verbs(installed: Path, name: str) -> None:
    seen = report(start(name, "prestart", executable=installed, env={"LD_PRELOAD": "/nowhere"}))
    assert seen["argv"][1:] == [name, "prestart"]
    assert "LD_PRELOAD" not in seen["environ"]


def test_a_persons_command_keeps_the_persons_environment(installed: Path) -> None:
    """But not where a CDI file of NVIDIA's older releases names it, in a container's environment."""
    program = installed.parent / "ctk"
    program.write_text('#!/bin/sh\necho "$NVIDIA_CTK_DEBUG" "$@"\n')
    program.chmod(0o755)
    env = {"NVIDIA_CTK_DEBUG": "kept"}
    assert start("nvidia-ctk", "cdi", "list", executable=installed, env=env).stdout == "kept cdi list\n"
    for words in (["hook", "chmod"], ["--quiet", "hook"]):
        seen = report(start("nvidia-ctk", *words, executable=installed, env=env))
        assert seen["argv"][1:] == ["nvidia-ctk", *words]
        assert "NVIDIA_CTK_DEBUG" not in seen["environ"]
    program.unlink()
    assert "cannot start" in refusal(start("nvidia-ctk", "cdi", executable=installed))


def test_standard_input_and_the_exit_status_pass_through(installed: Path) -> None:
    (installed.parent / "entry").write_text("import sys\nsys.exit(len(sys.stdin.read()))")
    assert start(installed, stdin=None, input="abc").returncode == 3


# When it refuses


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The first line of a failure, which has a remedy in its second."""
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(lines)) == (1, "", 2)
    assert lines[0].startswith("nvhook: error: ")
    assert lines[1].startswith("  remedy: ")
    return lines[0]


NAMES = ("nvhook-prestart", "nvidia-ctk", "nvhook-runtime", "nvidia-container-runtime.cdi")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("paths", [("@PYTHON@", "@ENTRY@"), ("bin/python", "bin/entry"), ("bin/python", "/entry")])
def test_a_copy_without_paths_refuses(launcher: Path, tmp_path: Path, name: str, paths: tuple[str, str]) -> None:
    """Nothing is looked up in the working directory, where a program of that name lies."""
    copy = tmp_path / "launch"
    shutil.copy(launcher, copy)
    if paths[0] != "@PYTHON@":
        install.write_marks(copy, {"@PYTHON@": paths[0], "@ENTRY@": paths[1]})
    (tmp_path / "bin").mkdir()
    for planted in (*paths, "ctk", "bin/ctk"):
        program = tmp_path / planted
        if program.is_relative_to(tmp_path):
            program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
            program.chmod(0o755)
    for verb in ("create", "state"):
        assert "not installed" in refusal(start(name, verb, executable=copy, cwd=tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("mark", ["@PYTHON@", "@ENTRY@"])
def test_a_copy_with_one_path_refuses(launcher: Path, tmp_path: Path, mark: str) -> None:
    copy = tmp_path / "launch"
    shutil.copy(launcher, copy)
    install.write_marks(copy, {mark: install.interpreter()})
    assert "not installed" in refusal(start("nvhook-prestart", executable=copy))


@pytest.mark.parametrize("name", ["launch", "prestart", "/usr/bin/runc", "nvhook", "xnvhook-prestart", "nvhook-/x"])
def test_a_name_that_is_no_hooks(installed: Path, name: str) -> None:
    assert "started under a name that is no hook" in refusal(start(name, executable=installed))


def test_more_arguments_than_any_hook_has(installed: Path) -> None:
    assert len(report(start(installed, *["x"] * 1_023))["argv"]) == 1_025
    assert "more than 1024 arguments" in refusal(start(installed, *["x"] * 1_024))


def test_an_interpreter_that_is_gone(launcher: Path, tmp_path: Path) -> None:
    copy = tmp_path / "nvhook-prestart"
    shutil.copy(launcher, copy)
    install.write_marks(copy, {"@PYTHON@": f"{tmp_path}/python3.99", "@ENTRY@": "/entry"})
    done = start(copy)
    assert refusal(done) == f"nvhook: error: cannot start {tmp_path}/python3.99"
    assert "nvhook install" in done.stderr
    Path(tmp_path, "python3.99").touch()
    assert "permissions" in start(copy).stderr


# Planted code


class Trap(NamedTuple):
    """A variable that points at planted code, and an ordinary program that it works on."""

    variable: str
    value: str
    victim: tuple[str, ...]


PYTHON = install.interpreter()
TRAPS = (
    Trap("LD_PRELOAD", "{planted}/planted.so", (PYTHON, "-c", "pass")),
    Trap("LD_AUDIT", "{planted}/planted.so", (PYTHON, "-c", "pass")),
    Trap("LD_LIBRARY_PATH", "{planted}", ("{planted}/../victim",)),
    Trap("PYTHONPATH", "{planted}", (PYTHON, "-c", "pass")),
    Trap("PYTHONHOME", "{planted}", (PYTHON, "-c", "pass")),
    Trap("PYTHONSTARTUP", "{planted}/sitecustomize.py", (PYTHON, "-S", "-i")),
    Trap("GCONV_PATH", "{planted}", ("iconv", "-f", "PLANTED", "-t", "UTF-8")),
    Trap("PWD", "{planted}", (PYTHON, "-S", "-c", "import json")),
)


def plant(folder: Path) -> None:
    """Code in every form that a loader, glibc or Python takes, all of which leaves `ran` beside the folder."""
    mark = folder.parent / "ran"
    folder.mkdir()
    define = f'-DMARK="{mark}"'
    command = ["cc", "-shared", "-fPIC", define, str(PLANTED)]
    subprocess.run([*command, "-o", str(folder / "planted.so")], check=True)
    subprocess.run([*command, "-Wl,-soname,libm.so.6", "-o", str(folder / "libm.so.6")], check=True)
    # PYTHONPATH: imported at start; the working directory: shadows the standard library.
    python = f"import posix; posix.close(posix.open({str(mark)!r}, posix.O_CREAT))\n"
    for name in ("sitecustomize", "usercustomize", "json", "posixpath", "errno", "struct"):
        (folder / f"{name}.py").write_text(python)
    # PYTHONHOME: a whole standard library, of which the first import is enough.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for library in ("lib", "lib64"):
        (folder / library / version / "encodings").mkdir(parents=True)
        (folder / library / version / "encodings/__init__.py").write_text(python)
    # A character set whose converter is our library.
    (folder / "gconv-modules").write_text("module PLANTED// INTERNAL planted 1\nmodule INTERNAL PLANTED// planted 1\n")
    # Where LOCPATH finds the locale of the launcher's own environment.
    for name in ("C.UTF-8", "C.utf8"):
        (folder / name).mkdir()
        (folder / name / "LC_CTYPE").write_bytes(b"\0" * 64)
    victim = folder.parent / "victim.c"
    victim.write_text("int main(void) { return 0; }")
    command = ["cc", "-Wl,--no-as-needed", str(victim), "-lm", "-o", str(folder.parent / "victim")]
    subprocess.run(command, check=True)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted") / "folder"
    plant(folder)
    return folder


@pytest.fixture
def mark(planted: Path) -> Iterator[Path]:
    """The file that planted code leaves behind."""
    path = planted.parent / "ran"
    path.unlink(missing_ok=True)
    yield path
    path.unlink(missing_ok=True)


class Watch:
    """Whether any file in a tree of folders was opened, by inotify."""

    def __init__(self, top: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = libc.inotify_init1(IN_NONBLOCK | os.O_CLOEXEC)
        assert self.fd >= 0
        for folder in [folder for folder, _, _ in os.walk(top)]:
            assert libc.inotify_add_watch(self.fd, os.fsencode(folder), IN_OPEN | IN_ACCESS) >= 0

    def opened(self) -> bool:
        try:
            return len(os.read(self.fd, 65_536)) > 0
        except BlockingIOError:
            return False
        finally:
            os.close(self.fd)


def aim(trap: Trap, planted: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], trap.variable: trap.value.format(planted=planted)}


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.variable)
def test_planted_code_runs_in_an_ordinary_program(trap: Trap, planted: Path, mark: Path) -> None:
    """Each trap works: without this the next tests could not fail."""
    victim = [word.format(planted=planted) for word in trap.victim]
    start(*victim, env=aim(trap, planted), cwd=planted)
    assert mark.exists()


def test_planted_locales_are_read_by_an_ordinary_program(planted: Path) -> None:
    watch = Watch(planted)
    environment = {"LOCPATH": str(planted), "LC_ALL": "C.UTF-8"}
    start(PYTHON, "-I", "-S", "-c", "pass", env=environment, cwd=planted)
    assert watch.opened()


def test_a_dynamic_launcher_would_run_planted_code(planted: Path, mark: Path, tmp_path: Path) -> None:
    """The same source, linked the ordinary way: LD_PRELOAD comes before its first line."""
    subprocess.run(["cc", str(SOURCE), "-o", str(tmp_path / "launch")], check=True)
    assert PT_INTERP in segment_types(tmp_path / "launch")
    start("nvhook-prestart", executable=tmp_path / "launch", env=aim(TRAPS[0], planted))
    assert mark.exists()


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.variable)
def test_planted_code_does_not_run(installed: Path, trap: Trap, planted: Path, mark: Path) -> None:
    watch = Watch(planted)
    seen = report(start(installed, env=aim(trap, planted), cwd=planted))
    assert not mark.exists()
    assert not watch.opened()
    assert trap.variable not in seen["environ"]


def test_all_traps_at_once(installed: Path, planted: Path, mark: Path) -> None:
    environment = {"LOCPATH": str(planted), "LC_ALL": "C.UTF-8", "LANGUAGE": "xx"}
    environment |= {"GLIBC_TUNABLES": "glibc.malloc.check=3", "PYTHONINSPECT": "1", "PYTHONPLATLIBDIR": str(planted)}
    for trap in TRAPS:
        environment |= aim(trap, planted)
    watch = Watch(planted)
    seen = report(start(installed, env=environment, cwd=planted))
    assert not mark.exists()
    assert not watch.opened()
    assert set(seen["environ"]) == {"LC_ALL", "PATH"}
    assert not Path(seen["origin"]).is_relative_to(planted)


def test_the_installed_launcher_may_be_executed_by_all(installed: Path) -> None:
    assert stat.S_IMODE(installed.stat().st_mode) == 0o755

# SPDX-License-Identifier: Apache-2.0
"""What `nvhook install` makes, and what finds it: nothing that others than root can change runs as root."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hook import install
from ldcache.errors import NvhookError

TREE = Path(__file__).resolve().parents[2]


def run_install(prefix: Path, umask: int) -> None:
    """`nvhook install` by a process with that umask."""
    program = f"import os, sys; os.umask({umask}); from hook.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "install", "--prefix", str(prefix)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(TREE)})


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_modes_do_not_depend_on_the_umask_or_the_sources(tmp_path: Path, umask: int) -> None:
    """Folders above the prefix are made too."""
    top = tmp_path / "made"
    run_install(top / "on/the/way", umask)
    for path in (top, *top.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if not path.is_symlink():
            assert mode in (0o755, 0o644), path
            assert mode == 0o755 or not path.is_dir(), path


def test_what_others_can_write(tmp_path: Path) -> None:
    """In a sticky folder they can't rename what is root's; a file's sticky bit means nothing."""
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    for path, mode, expected in (
        (file, 0o755, False),
        (file, 0o775, True),
        (file, 0o1777, True),
        (folder, 0o700, False),
        (folder, 0o1777, False),
        (folder, 0o777, True),
    ):
        path.chmod(mode)
        assert install.others_can_write(path) == expected, oct(mode)
    folder.chmod(0o755)
    os.chown(folder, 65534, 65534)
    assert install.others_can_write(folder)


def test_a_standard_library_that_others_can_write_is_refused(tmp_path: Path) -> None:
    """The interpreter itself is root's."""
    home = tmp_path / "home"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    source = Path(os.__file__).parent
    (home / "lib").mkdir(parents=True)
    shutil.copytree(source, home / "lib" / version, ignore=shutil.ignore_patterns("site-packages", "test", "config-*"))
    (home / "lib" / version / "os.py").chmod(0o666)
    places = [str(TREE), *(path for path in sys.path if path.endswith("site-packages"))]
    env = {"PYTHONPATH": os.pathsep.join(places), "PYTHONHOME": str(home)}
    command = [os.path.realpath(sys.executable), "-c", "from hook import install; install.interpreter()"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert f"others than root can write {home}/lib/{version}/os.py" in done.stderr


def test_an_interpreter_that_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    python = folder / "python3"
    shutil.copy(os.path.realpath(sys.executable), python)
    program = "import sys; from hook import install; print(install.interpreter())"
    home = os.path.realpath(sys.base_prefix)
    env = {"PYTHONPATH": os.pathsep.join([str(TREE), *sys.path[1:]]), "PYTHONHOME": home}
    done = subprocess.run([python, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert f"others than root can write {folder}" in done.stderr


def test_nvidias_names_are_made_where_they_are_wanted(tmp_path: Path) -> None:
    install.install(tmp_path)
    assert sorted(path.name for path in (tmp_path / "bin").iterdir()) == sorted(install.LAUNCHERS)
    made = install.install(tmp_path, nvidia_names=True)
    assert {path.name for path in made} == {*install.LAUNCHERS, *install.NVIDIA_LAUNCHERS}
    assert {path.resolve() for path in made} == {tmp_path / "lib/nvhook/bin/launch"}


@pytest.mark.parametrize("name", ["nvhook", ".nvhook.new", ".nvhook.old"])
def test_a_link_in_the_way_is_replaced_and_not_followed(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").touch()
    library = tmp_path / "prefix/lib"
    library.mkdir(parents=True)
    (library / name).symlink_to(victim)
    for _ in range(2):
        install.install(tmp_path / "prefix")
    assert [path.name for path in victim.iterdir()] == ["kept"]
    assert not (library / "nvhook").is_symlink()


@pytest.mark.parametrize("name", ["nvhook", ".nvhook.new", ".nvhook.old"])
def test_a_file_in_the_way_is_replaced(tmp_path: Path, name: str) -> None:
    library = tmp_path / "prefix/lib"
    library.mkdir(parents=True)
    (library / name).touch()
    for _ in range(2):
        install.install(tmp_path / "prefix")
    assert (library / "nvhook/bin/launch").is_file()
    assert not (library / ".nvhook.new").exists()


def test_there_is_no_moment_without_a_copy(tmp_path: Path) -> None:
    """The old and the new change places; only where one is missing is it a rename."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    assert not install.exchange(one, other)
    other.mkdir()
    (one / "new").touch()
    assert install.exchange(one, other)
    assert (other / "new").exists() and not (one / "new").exists()


def copy_tree(folder: Path) -> None:
    """The packages as a checkout has them."""
    for package in install.PACKAGES:
        shutil.copytree(TREE / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))


def test_a_part_that_cannot_be_copied_is_named(tmp_path: Path) -> None:
    copy_tree(tmp_path / "tree")
    os.mkfifo(tmp_path / "tree/cdi/pipe.py")
    command = [sys.executable, "-m", "hook", "install", "--prefix", str(tmp_path / "prefix")]
    env = os.environ | {"PYTHONPATH": str(tmp_path / "tree")}
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=False)
    assert done.stderr.startswith(f"nvhook: error: cannot copy {tmp_path}/tree/cdi/pipe.py to ")
    assert list((tmp_path / "prefix/lib").iterdir()) == []


def test_a_prefix_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NvhookError, match=f"cannot write {tmp_path}/file"):
        install.install(tmp_path / "file")


def find(library: Path) -> list[Path]:
    """The launchers that the nvhook in a folder finds: for a CDI file, and for `nvhook verify`."""
    program = (
        "from cdi import cli; from hook import verify\n"
        "print(cli.__file__, cli.find_hook(), verify.installed('nvhook-prestart'))"
    )
    # Not from here, or the working directory's nvhook would be the one.
    env = os.environ | {"PYTHONPATH": str(library)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=True)
    file, *found = done.stdout.split()
    assert file == f"{library}/cdi/cli.py"
    return [Path(path) for path in found]


@pytest.mark.parametrize("place", ["x/nvhook", "lib/nvhook"])
def test_a_folder_above_a_checkout_is_not_the_prefix(tmp_path: Path, place: str) -> None:
    """`/tmp/x/nvhook` is a checkout: then `/tmp/bin` may be anybody's."""
    checkout = tmp_path / place
    copy_tree(checkout)
    planted = tmp_path / "bin"
    planted.mkdir()
    for name in install.LAUNCHERS:
        (planted / name).write_text("#!/bin/sh\n")
        (planted / name).chmod(0o755)
    assert not any(path.is_relative_to(planted) for path in find(checkout))


def test_an_installed_copy_finds_its_own(prefix: Path) -> None:
    names = ("nvhook-create-container", "nvhook-prestart")
    assert find(prefix / "lib/nvhook") == [prefix / "bin" / name for name in names]


def test_streams_that_are_closed(prefix: Path) -> None:
    """The status counts then; a traceback would have nowhere to go."""
    poststop = str(prefix / "bin/nvhook-poststop")
    launcher = str(prefix / "lib/nvhook/bin/launch")
    for redirections, status in (("2>&-", 0), (">&-", 0), (">&- 2>&-", 0)):
        command = f'exec -a "$1" "$2" {redirections} <&-'
        done = subprocess.run(["bash", "-c", command, "bash", poststop, launcher], check=False)
        assert done.returncode == status, redirections
    prestart = str(prefix / "bin/nvhook-prestart")
    done = subprocess.run(["sh", "-c", '"$1" >&- 2>&- </dev/null', "sh", prestart], check=False)
    assert done.returncode == 1


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", ">&- 2>&- <&-"])
def test_a_status_does_not_depend_on_who_can_read_the_text(prefix: Path, redirection: str) -> None:
    """2 is a usage error; a traceback would make it 1."""
    command = f'"$1" bogus {redirection}'
    done = subprocess.run(["sh", "-c", command, "sh", prefix / "bin/nvhook-prestart"], check=False)
    assert done.returncode == 2


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_a_warning_that_nobody_reads_fails_no_hook(prefix: Path, tmp_path: Path, redirection: str) -> None:
    """Not even at the end, when what could not be written is still there; 120 is Python's own word for that."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from hook import create_container, start\n"
        "start.open_streams(); create_container.warn('text'); start.say('text'); raise SystemExit(7)"
    )
    command = f'"$1" -c "$2" "$3" {redirection}'
    words = ["sh", "-c", command, "sh", sys.executable, program, str(prefix / "lib/nvhook")]
    assert subprocess.run(words, check=False).returncode in (7, 120)


def test_verify_reads_a_mount_table_with_names_that_are_no_text(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    program = (
        "import os, subprocess, sys; from pathlib import Path; from hook import verify\n"
        "for name in (b'/\\xff', '/\\u2028x'.encode(), b'/a\\x0bb'):\n"
        "    place = os.fsencode(sys.argv[1]) + name\n"
        "    os.mkdir(place)\n"
        "    subprocess.run(['mount', '-t', 'tmpfs', 'none', place], check=True)\n"
        "verify._remove(Path(sys.argv[2]))"
    )
    private = ["unshare", "--mount", "--propagation", "private"]
    env = os.environ | {"PYTHONPATH": str(TREE)}
    command = [*private, sys.executable, "-c", program, str(tmp_path), str(bundle)]
    subprocess.run(command, env=env, check=True)
    assert not bundle.exists()


def test_verify_removes_nothing_through_a_mount(tmp_path: Path) -> None:
    """A blank in the path is written as \\040 in the mount table."""
    bundle = tmp_path / "a b"
    (bundle / "rootfs").mkdir(parents=True)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    program = (
        "import subprocess, sys; from pathlib import Path; from hook import verify\n"
        "subprocess.run(['mount', '--bind', sys.argv[2], sys.argv[1] + '/rootfs'], check=True)\n"
        "verify._remove(Path(sys.argv[1]))"
    )
    private = ["unshare", "--mount", "--propagation", "private"]
    command = [*private, sys.executable, "-c", program, str(bundle), str(precious)]
    env = os.environ | {"PYTHONPATH": str(TREE)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert "is still mounted" in done.stderr
    assert (precious / "file").exists()

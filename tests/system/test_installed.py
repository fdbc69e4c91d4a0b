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
    prefix = tmp_path / "prefix"
    run_install(prefix, umask)
    for path in (prefix, *prefix.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if not path.is_symlink():
            assert mode in (0o755, 0o644), path
            assert mode == 0o755 or not path.is_dir(), path


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


def test_a_prefix_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NvhookError, match=f"cannot write {tmp_path}/file"):
        install.install(tmp_path / "file")


def test_a_folder_above_a_checkout_is_not_the_prefix(tmp_path: Path) -> None:
    """`/tmp/x/nvhook` is a checkout: then `/tmp/bin` may be anybody's."""
    checkout = tmp_path / "x/nvhook"
    for package in install.PACKAGES:
        shutil.copytree(TREE / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__"))
    planted = tmp_path / "bin"
    planted.mkdir()
    for name in install.LAUNCHERS:
        (planted / name).write_text("#!/bin/sh\n")
        (planted / name).chmod(0o755)
    program = (
        "from cdi import cli; from hook import verify\n"
        "print(cli.find_hook()); print(verify.installed('nvhook-prestart'))"
    )
    env = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert str(planted) not in done.stdout


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

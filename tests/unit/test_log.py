# SPDX-License-Identifier: Apache-2.0
"""The log's lines, and the files that it does not write."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from cdi import logline
from hook import log
from ldcache import root


def lines(tmp_path: Path, level: str, *said: tuple[str, str], container: str = "c1") -> list[str]:
    """What stands in a file of this level."""
    path = tmp_path / "log"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    journal = log.Log("prestart", container)
    journal.add(fd, level)
    for one, text in said:
        journal.line(one, text)
    os.close(fd)
    return path.read_text().splitlines()


def test_a_line(tmp_path: Path) -> None:
    (line,) = lines(tmp_path, "info", ("info", "all is well"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info nvhook\[prestart\] c1: all is well", line)


@pytest.mark.parametrize(("level", "count"), [("error", 1), ("warning", 2), ("info", 3), ("debug", 4)])
def test_levels(tmp_path: Path, level: str, count: int) -> None:
    assert len(lines(tmp_path, level, *[(one, "x") for one in logline.LEVELS])) == count


def test_what_a_container_chose_stays_on_its_line(tmp_path: Path) -> None:
    """Neither a second line nor a terminal's control sequence comes out of it."""
    (line,) = lines(tmp_path, "info", ("error", "A=1\n2026 error forged\x1b[2J\udc80"), container="a\nb")
    assert line.endswith(r"nvhook[prestart] a\nb: A=1\n2026 error forged\x1b[2J\udc80")
    (tmp_path / "log").unlink()
    (line,) = lines(tmp_path, "info", ("error", "x" * 100_000))
    assert len(line) < logline.TEXT_MAX + 200


def test_a_full_disk_is_no_failure() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    journal = log.Log("prestart", "c1")
    journal.add(fd, "debug")
    journal.line("error", "x")
    os.close(fd)


@pytest.fixture
def host(tmp_path: Path) -> int:
    (tmp_path / "var/log").mkdir(parents=True)
    return root.open_root(str(tmp_path))


def test_a_file_is_made_and_appended_to(host: int, tmp_path: Path) -> None:
    for _ in range(2):
        fd = log.open_file(host, "/var/log/nvhook.log")
        os.write(fd, b"x\n")
        assert not os.get_inheritable(fd)
        os.close(fd)
    file = tmp_path / "var/log/nvhook.log"
    assert file.read_text() == "x\nx\n"
    assert file.stat().st_mode & 0o137 == 0


@pytest.mark.parametrize("kind", ["link", "hard link", "fifo", "folder", "open folder", "no folder"])
def test_what_is_not_written(host: int, tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    file = tmp_path / "var/log/nvhook.log"
    if kind == "link":
        file.symlink_to("/victim")
    elif kind == "hard link":
        file.hardlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "open folder":
        file.parent.chmod(0o1777)
    else:
        file.parent.rmdir()
    with pytest.raises(OSError) as caught:
        log.open_file(host, "/var/log/nvhook.log")
    assert caught.value.strerror
    assert victim.read_text() == "untouched"

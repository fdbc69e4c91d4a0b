# SPDX-License-Identifier: Apache-2.0
"""ld.so.conf of an image: ldconfig's reading of it, inside the root, whatever it holds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ldcache import imageconf, root

OURS = "/etc/ld.so.conf.d/00-nvhook.conf"


def read(top: Path, **files: str) -> imageconf.Conf:
    """Read a root with these files, named with `_` for `/` below etc."""
    folder = top / "etc/ld.so.conf.d"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (top / "etc/ld.so.conf" if name == "main" else folder / f"{name}.conf").write_text(text)
    fd = root.open_root(str(top))
    return imageconf.read(fd, OURS)


def test_debians(tmp_path: Path) -> None:
    made = read(
        tmp_path,
        main="include /etc/ld.so.conf.d/*.conf\n",
        libc="# libc default configuration\n/usr/local/lib\n",
        x86="# Multiarch support\n/lib/x86_64-linux-gnu\n/usr/lib/x86_64-linux-gnu\n",
    )
    assert made.folders == ["/usr/local/lib", "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu"]
    assert made.before == 0


def test_lines(tmp_path: Path) -> None:
    text = "  /a/ # comment\n/b=libc6\nhwcap 0 nosegneg\nrelative\n/a\n\t/with blank/\n//c\n"
    made = read(tmp_path, main=text)
    assert made.folders == ["/a", "/b", "/with blank", "//c"]
    assert made.before == -1


def test_includes_stand_where_they_are(tmp_path: Path) -> None:
    made = read(tmp_path, main="/first\ninclude ld.so.conf.d/*.conf\n/last\n", b="/b\n", a="/a\ninclude c.txt\n")
    (tmp_path / "etc/ld.so.conf.d/c.txt").write_text("/c\n")
    made = read(tmp_path)
    assert made.folders == ["/first", "/a", "/c", "/b", "/last"]
    assert made.before == 1


@pytest.mark.parametrize(
    ("name", "before"), [("00-a", 1), ("00-nvhook", 0), ("zz", 0)], ids=["ahead", "our own", "behind"]
)
def test_the_place_of_our_own_file(tmp_path: Path, name: str, before: int) -> None:
    made = read(tmp_path, main="include /etc/ld.so.conf.d/*.conf\n", **{name: "/x\n"})
    assert made.before == before
    assert made.folders == ([] if name == "00-nvhook" else ["/x"])


def test_links_stay_inside(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.conf").write_text("/outside\n")
    top = tmp_path / "root"
    made = read(top, main=f"include {outside}/*.conf\ninclude /etc/link/*.conf\ninclude /etc/../../outside/x.conf\n")
    (top / "etc/link").symlink_to(outside)
    made = read(top)
    assert made.folders == []


def test_a_circle_ends(tmp_path: Path) -> None:
    assert read(tmp_path, main="include /etc/ld.so.conf\n/a\n").folders == ["/a"]


def test_what_can_not_be_read_says_nothing(tmp_path: Path) -> None:
    made = read(tmp_path, main="include /etc/missing /etc/ld.so.conf.d /etc/fifo\n/a\n")
    assert made.folders == ["/a"]
    (tmp_path / "etc/ld.so.conf").unlink()
    (tmp_path / "etc/ld.so.conf").mkdir()
    assert read(tmp_path).folders == []


def test_bounds(tmp_path: Path) -> None:
    many = "".join(f"/folder-{number}\n" for number in range(3000))
    assert len(read(tmp_path, main=many).folders) == imageconf.FOLDERS_MAX
    wide = {f"f{number}": f"include /etc/ld.so.conf.d/*.conf\n/x{number}\n" for number in range(40)}
    assert len(read(tmp_path, main="include /etc/ld.so.conf.d/*.conf\n", **wide).folders) <= 40


HOSTILE = {
    "includes of a full folder": 6000 * "include /names/*x\n",
    "patterns on one line": "include " + 20_000 * "/names/*x ",
    "a pattern that goes back and forth": 200 * ("include /names/" + 60 * "*a" + "b\n"),
    "a set without an end": 200 * ("include /names/*[" + 250 * "a" + "\n"),
    "folders in folders": 500 * ("include " + 200 * "/*" + "\n"),
    "a pattern of no length known": "include /names/" + 200_000 * "*" + "\n",
    "a long way down": "include " + 100_000 * "/a" + "/*\n",
    "the same folder, and again": "".join(f"/folder-{number % 255}\n" for number in range(20_000)),
}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a folder of many names, and folders without end."""
    top = tmp_path_factory.mktemp("full")
    (top / "names").mkdir()
    for number in range(4000):
        (top / f"names/{249 * 'a'}{number:05}").touch()
    for folder in ("", "names/"):
        (top / f"{folder}deep").symlink_to(".")
    return top


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_made_to_take_time_does_not(full: Path, name: str) -> None:
    """Seconds of the processor's, of which a start of a container has few; without the bounds some take minutes."""
    began = time.process_time()
    read(full, main=HOSTILE[name])
    assert time.process_time() - began < 3


def test_texts_count_together(tmp_path: Path) -> None:
    half = "#" * (imageconf.TEXT_MAX // 2) + "\n"
    files = {name: f"{half}/{name}\n" for name in ("a", "b", "c")}
    made = read(tmp_path, main="include /etc/ld.so.conf.d/*.conf\n/last\n", **files)
    assert made.folders == ["/a", "/last"]


def test_what_wants_to_take_long(tmp_path: Path) -> None:
    """Patterns against long names, a thousand listings, a folder named again and again: a start waits for it."""
    names = tmp_path / "etc/n"
    names.mkdir(parents=True)
    for number in range(2000):
        (names / f"{number:04}{'a' * 200}").touch()
    slow = "include /etc/n/*" + "a" * 100 + "b\n"
    many = "".join(f"/folder-{number}\n" for number in range(1000))
    texts = {"patterns": slow * 1000, "listings": "include /etc/n/*\n" * 20000, "again": many + "/folder-999\n" * 60000}
    for name, text in texts.items():
        begin = time.process_time()
        read(tmp_path, main=text)
        assert time.process_time() - begin < 2, name

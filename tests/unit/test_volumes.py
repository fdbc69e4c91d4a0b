# SPDX-License-Identifier: Apache-2.0
"""Paths as the runtime will resolve them, in an image and its volumes, and where that is made to take long."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hook import volumes
from ldcache.errors import NvhookError


@pytest.fixture
def base(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_PATH)
    yield fd
    os.close(fd)


def test_links_are_followed_also_to_what_is_not_there_yet(base: int, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("/b/./c//d/")
    (tmp_path / "x").symlink_to("../a/../e")
    assert volumes.Volumes(base).real("/a/f/g") == "/b/c/d/f/g"
    assert volumes.Volumes(base).real("/x/f") == "/b/c/e/f"
    assert volumes.Volumes(base).real("/../") == ""


def chain(top: Path, text: str) -> None:
    for number in range(39):
        (top / f"l{number}").symlink_to(f"/l{number + 1}{text}")


LONG = "/a" * (volumes.PARTS_MAX + 1)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        pytest.param("/v" + "/a" * 40_000, "", id="a volume's destination"),
        pytest.param(LONG, "", id="parts"),
        pytest.param("/l0", "/a" * 2040, id="a chain of links"),
        pytest.param("/l0", "/." * 2040, id="links with parts that are none"),
        pytest.param("/l0", "/" * 4080, id="slashes"),
        pytest.param("/" + "/".join(["a" * 200] * 30), "", id="bytes"),
        pytest.param("/loop", "", id="a circle"),
    ],
)
def test_what_would_take_long_is_refused(base: int, tmp_path: Path, path: str, text: str) -> None:
    """The parts are counted: a chain alone took 46 seconds, a destination 28."""
    chain(tmp_path, text)
    (tmp_path / "loop").symlink_to("loop")
    begin = time.process_time()
    with pytest.raises(NvhookError, match="is too long, or has too many links") as caught:
        volumes.Volumes(base).real(path)
    assert time.process_time() - begin < 1
    assert len(caught.value.what) < 300


def mount(destination: str, kind: str = "bind", source: str = "/dev/null", *options: str) -> dict[str, Any]:
    return {"destination": destination, "type": kind, "source": source, "options": list(options)}


def mounted(base: int, *mounts: dict[str, Any], shared: bool = False) -> volumes.Volumes:
    made = volumes.Volumes(base)
    made.add(list(mounts), "/bundle", shared)
    return made


def on(made: volumes.Volumes, path: str) -> str:
    """The destination of the mount that a path will be on."""
    volume = made.holding(made.real(path))
    return "" if volume is None else volume.destination


def test_the_last_mount_counts(base: int) -> None:
    made = mounted(base, mount("/a/b"), mount("/a/b/c"), mount("/x", "tmpfs"), mount("/x/y"))
    assert [on(made, path) for path in ("/a", "/a/b", "/a/b/c/d", "/a/bc", "/x/z", "/x/y/z")] == [
        *("", "/a/b", "/a/b/c", "", "/x", "/x/y")
    ]
    made.add([mount("/a", "tmpfs"), mount("/x/y/..")], "/bundle", False)
    assert [on(made, path) for path in ("/a/b/c/d", "/x/y/z")] == ["/a", "/x/y/.."]
    made.add([mount("/")], "/bundle", False)
    assert [on(made, path) for path in ("/", "/a/b", "/x")] == ["/", "/", "/"]


@pytest.mark.parametrize(
    ("mounts", "is_foreign"),
    [
        ([mount("/a", "bind")], True),
        ([mount("/a", "none", "/dev/null", "rbind")], True),
        ([mount("/a", "tmpfs", "/dev/null", "bind")], True),
        ([mount("/a", "overlay")], True),
        ([mount("/a", "tmpfs")], False),
        ([mount("/a", "tmpfs"), mount("/a/b", "devpts")], False),
        # Where the volume hands mounts on, the tmpfs is the host's too.
        ([mount("/a"), mount("/a/b", "tmpfs")], True),
    ],
)
def test_whose_a_mount_is(base: int, mounts: list[dict[str, Any]], is_foreign: bool) -> None:
    volume = mounted(base, *mounts).holding("/a/b")
    assert volume is not None and volume.foreign == is_foreign


@pytest.mark.parametrize(
    ("options", "shared", "leaks"),
    [
        ((), False, False),
        ((), True, True),
        (("rshared",), False, True),
        (("rprivate", "shared"), False, True),
        (("rslave",), True, False),
        (("shared", "private"), True, False),
    ],
)
def test_what_hands_mounts_on(base: int, options: tuple[str, ...], shared: bool, leaks: bool) -> None:
    volume = mounted(base, mount("/a", "bind", "/dev/null", *options), shared=shared).holding("/a")
    assert volume is not None and volume.leaks == leaks


def test_links_where_a_volume_will_be_are_the_volumes(base: int, tmp_path: Path) -> None:
    image, volume = tmp_path / "image", tmp_path / "volume"
    for folder in (image / "v", volume / "a"):
        folder.mkdir(parents=True)
    (image / "v/a").symlink_to("/image")
    (image / "v/l").symlink_to("/image")
    (volume / "l").symlink_to("a/../../there")
    fd = os.open(image, os.O_PATH)
    for kind, real in (("bind", ["/v/a", "/there"]), ("tmpfs", ["/v/a", "/v/l"])):
        made = mounted(fd, mount("/v", kind, str(volume)))
        assert [made.real(path) for path in ("/v/a", "/v/l")] == real
    # As podman has it: filled with what the image has.
    made = mounted(fd, mount("/v", "tmpfs", "tmpfs", "tmpcopyup"))
    assert made.real("/v/a") == "/image"
    # A source's name may be relative, to the bundle.
    made = volumes.Volumes(fd)
    made.add([mount("/v", "bind", "volume")], str(tmp_path), False)
    assert made.real("/v/l") == "/there"
    os.close(fd)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("proc", "/k/self/task/x"),
        ("proc", "/k/1/cwd/x"),
        ("proc", "/k/a/../../x"),
        ("sysfs", "/k/devices/a/subsystem/../../../x"),
        ("overlay", "/k/a"),
    ],
)
def test_what_can_not_be_told(base: int, kind: str, path: str) -> None:
    made = mounted(base, mount("/k", kind, kind))
    with pytest.raises(OSError):
        made.real(path)
    made.add([mount(path)], "/bundle", False)
    assert made.unclear == path


def test_the_hosts_proc_as_a_volume(base: int) -> None:
    """Its links mean another process to the runtime than to us."""
    made = mounted(base, mount("/k", "bind", "/proc"), mount("/k/cpuinfo"))
    assert made.unclear == ""
    made.add([mount("/k/self")], "/bundle", False)
    assert made.unclear == "/k/self"


def test_what_is_written_is_not_led_through(base: int, tmp_path: Path) -> None:
    """A link of ours takes the place of the image's, so that where a mount leads is not known from the image."""
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr/lib.so").symlink_to("/elsewhere")
    (tmp_path / "a").symlink_to("usr/lib.so")
    made = volumes.Volumes(base)
    made.written = {"/usr/lib.so"}
    made.add([mount("/usr/lib.so"), mount("/a"), mount("/elsewhere"), mount("/usr/lib")], "/bundle", False)
    assert made.met == ["/usr/lib.so", "/a"]

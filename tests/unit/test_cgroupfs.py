# SPDX-License-Identifier: Apache-2.0
"""Where a process's device rules are, by the texts of proc."""

from __future__ import annotations

import os

import pytest

from hook import cgroupfs
from ldcache.errors import NvhookError

V1 = """\
30 23 0:26 / /sys/fs/cgroup ro,nosuid,nodev,noexec shared:9 - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:10 - cgroup2 cgroup2 rw
32 30 0:28 / /sys/fs/cgroup/systemd rw,nosuid shared:11 - cgroup cgroup rw,xattr,name=systemd
33 30 0:29 / /sys/fs/cgroup/devices rw,nosuid,nodev,noexec,relatime shared:12 - cgroup cgroup rw,devices
"""
V2 = """\
22 28 0:21 / /proc rw,nosuid - proc proc rw
30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate
"""
HYBRID = "12:devices:/docker/abc\n1:name=systemd:/docker/abc\n0::/system.slice/docker.service\n"


def place(memberships: str, mountinfo: str) -> tuple[int, str, str] | None:
    """`locate`, in a form that can be compared."""
    found = cgroupfs.locate(memberships, mountinfo)
    return None if found is None else (found.version, found.mount, found.folder)


def test_hybrid_is_version_1() -> None:
    assert place(HYBRID, V1) == (1, "/sys/fs/cgroup/devices", "/sys/fs/cgroup/devices/docker/abc")


def test_controllers_mounted_together() -> None:
    mountinfo = V1.replace("/devices rw", "/cpu,devices rw").replace("rw,devices", "rw,cpu,devices")
    found = place("4:cpu,devices:/x\n0::/\n", mountinfo)
    assert found == (1, "/sys/fs/cgroup/cpu,devices", "/sys/fs/cgroup/cpu,devices/x")


def test_version_2() -> None:
    path = "/system.slice/docker-abc.scope"
    assert place(f"0::{path}\n", V2) == (2, "/sys/fs/cgroup", f"/sys/fs/cgroup{path}")
    assert place("0::/\n", V2) == (2, "/sys/fs/cgroup", "/sys/fs/cgroup")


def test_version_2_on_the_usual_place_decides() -> None:
    """A kernel that has version 1's controllers too, in a mount namespace that has version 2 only, or hides it."""
    assert place("5:devices:/\n0::/abc\n", V2) == (2, "/sys/fs/cgroup", "/sys/fs/cgroup/abc")
    over = V1 + "40 30 0:30 / /sys/fs/cgroup rw - cgroup2 none rw\n"
    assert place("5:devices:/\n0::/abc\n", over) == (2, "/sys/fs/cgroup", "/sys/fs/cgroup/abc")


def test_a_colon_in_a_path() -> None:
    assert place("0::/machine:1/a:b\n", V2) == (2, "/sys/fs/cgroup", "/sys/fs/cgroup/machine:1/a:b")


def test_a_mount_of_a_part() -> None:
    """An engine in a container without a cgroup namespace: the mount shows the outer container's cgroup only."""
    mountinfo = V2.replace("0:26 / ", "0:26 /docker/abc ")
    assert place("0::/docker/abc/inner\n", mountinfo) == (2, "/sys/fs/cgroup", "/sys/fs/cgroup/inner")
    assert place("0::/docker/abc\n", mountinfo) == (2, "/sys/fs/cgroup", "/sys/fs/cgroup")
    assert place("0::/docker/abcd\n", mountinfo) is None


def test_the_later_of_two_mounts() -> None:
    twice = V1 + "50 23 0:29 /docker /mnt rw - cgroup cgroup rw,devices\n"
    assert place("5:devices:/docker/abc\n", twice) == (1, "/mnt", "/mnt/abc")
    assert place("5:devices:/other\n", twice) == (1, "/sys/fs/cgroup/devices", "/sys/fs/cgroup/devices/other")


def test_a_blank_in_a_path() -> None:
    mountinfo = V2.replace("/sys/fs/cgroup", "/a\\040b\\134c")
    assert place("0::/x y\n", mountinfo) == (2, "/a b\\c", "/a b\\c/x y")


def test_not_mounted() -> None:
    assert place("0::/x\n", "22 28 0:21 / /proc rw,nosuid - proc proc rw\n") is None
    assert place("3:cpu:/x\n", V2) is None


@pytest.mark.parametrize(("memberships", "mountinfo"), [("0::/../x\n", V2), ("5:devices:/..\n0::/\n", V1)])
def test_outside_of_our_cgroup_namespace(memberships: str, mountinfo: str) -> None:
    with pytest.raises(NvhookError, match=r"/\.\.\S* is outside of the cgroup namespace"):
        cgroupfs.locate(memberships, mountinfo)


@pytest.mark.parametrize(
    ("folder", "scope", "crun"),
    [
        ("/sys/fs/cgroup/system.slice/docker-abc.scope", True, False),
        ("/sys/fs/cgroup/machine.slice/libpod-abc.scope/container", True, True),
        ("/sys/fs/cgroup/user.slice/session-1.scope/abc", False, False),
        ("/sys/fs/cgroup/container", False, False),
        ("/sys/fs/cgroup/docker/abc", False, False),
    ],
)
def test_scopes(folder: str, scope: bool, crun: bool) -> None:
    found = cgroupfs.Place(2, "/sys/fs/cgroup", folder)
    assert (found.in_scope(), found.in_crun_scope()) == (scope, crun)


def test_a_process_that_ended() -> None:
    with pytest.raises(NvhookError, match=r"cannot read /proc/4194305/cgroup"):
        cgroupfs.find(4194305)


def test_a_cgroup_that_the_process_is_not_in(tmp_path: os.PathLike[str]) -> None:
    folder = os.fspath(tmp_path)
    with open(f"{folder}/cgroup.procs", "w", encoding="ascii") as file:
        file.write("12\n345\n")
    os.close(cgroupfs.open_own(folder, 345))
    with pytest.raises(NvhookError, match=r"process 34, the container's init, is not in the cgroup"):
        cgroupfs.open_own(folder, 34)

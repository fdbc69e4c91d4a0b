# SPDX-License-Identifier: Apache-2.0
"""Arguments of the CDI files' hooks, and the state that comes with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cdi import finish
from hook import cdihook, create_container, mounts, state
from ldcache.errors import NvhookError
from tests import inventories
from tests.needs import needs_root

TREE = Path(__file__).resolve().parents[2]


def test_the_generators_words_are_read_whole() -> None:
    """What cdi.finish writes for an inventory, read back."""
    found = inventories.inventory()
    found["driver"]["cuda"] = "13.0"
    (entry,) = finish.hook(found, "/usr/bin/nvhook-create-container", finish.PARTS)
    parts = create_container.read_parts(entry["args"][1:])
    assert parts.unknown == []
    assert (parts.driver, parts.cuda, parts.requirements) == (inventories.VERSION, "13.0", "enforce")
    assert (parts.mask, parts.compat, parts.sonames) == (True, True, False)
    assert parts.gpus == {0: ("0000:06:00.0", "9.0", "Nvidia"), 1: ("0000:07:00.0", "9.0", "Nvidia")}
    assert [(target, link) for link, target in parts.links] == finish.links(found)
    assert parts.folders == list(dict.fromkeys(item["folder"] for item in found["libraries"]))


@pytest.mark.parametrize(
    "words",
    [
        ["--link", "no-separator"],
        ["--link", "x::relative"],
        ["--folder", "relative"],
        ["--gpu", "x=0000:06:00.0"],
        ["--gpu", "0="],
        ["--gpu", "0=../../sys"],
        ["--gpu", "123456=0000:06:00.0"],
        ["--gpu", "²=0000:06:00.0"],
        ["--requirements", "sometimes"],
        ["--proc-mask", "some"],
        ["--host-root", "relative"],
        ["--time-travel"],
        ["stray"],
    ],
)
def test_what_is_not_known_is_kept_apart(words: list[str]) -> None:
    parts = create_container.read_parts([*words, "--driver", "580.1"])
    assert parts.unknown == [" ".join(words)]
    assert parts.driver == "580.1"
    assert (parts.links, parts.folders, parts.gpus, parts.mask, parts.host_root) == ([], [], {}, False, "/")


@pytest.mark.parametrize("word", ["--debug", "-d", "--debug=true", "--quiet", "-quiet"])
def test_switches_of_nvidias_command(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cdihook.options("chmod", [word, "--mode", "755", "-path=/a,/b", "--path", "/c"]) == {
        "--mode": ["755"],
        "--path": ["/a", "/b", "/c"],
    }
    assert capsys.readouterr().err == ""


def test_what_the_other_hooks_were_told() -> None:
    container = state.Container("/bundle")
    container.create_hooks = [
        ["/x/nvidia-ctk", "hook", "enable-cuda-compat", "-host-driver-version", "580.1"],
        ["nvidia-cdi-hook", "update-ldcache"],
        ["other", "update-ldcache"],
        [],
    ]
    assert cdihook.peers(container) == [
        ["enable-cuda-compat", "-host-driver-version", "580.1"],
        ["update-ldcache"],
    ]
    assert cdihook.peer_values(container) == {"--host-driver-version": ["580.1"]}
    container.create_hooks = container.create_hooks[1:]
    assert cdihook.peer_values(container) == {}


# The state of a createContainer hook


def told(tmp_path: Path, **members: Any) -> int:
    """A descriptor of a file with the state."""
    path = tmp_path / "state"
    path.write_text(json.dumps({"ociVersion": "1.0", "id": "x", "pid": 0} | members))
    return os.open(path, os.O_RDONLY)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    hooks = {"createContainer": [{"path": "/x", "args": ["nvidia-cdi-hook", "noop"]}, {"path": "/y"}]}
    (folder / "config.json").write_text(json.dumps({"root": {"path": "rootfs"}, "hooks": hooks}))
    return folder


@pytest.mark.parametrize("members", [{}, {"root": None}, {"root": "rootfs"}, {"root": 7}, {"root": "{}/rootfs/"}])
def test_a_bundle_that_can_be_read_counts(tmp_path: Path, bundle: Path, members: dict[str, Any]) -> None:
    members = {key: value.format(bundle) if isinstance(value, str) else value for key, value in members.items()}
    container = state.read_created(told(tmp_path, bundle=str(bundle), **members))
    assert (container.root_path, container.known) == (f"{bundle}/rootfs", True)
    assert container.create_hooks == [["nvidia-cdi-hook", "noop"], []]


@pytest.mark.parametrize("named", ["/nowhere", "", "relative", None])
def test_a_root_that_crun_tells(tmp_path: Path, named: str | None) -> None:
    """Nothing of config.json is made up."""
    container = state.read_created(told(tmp_path, bundle=named, root="/some/root/"))
    assert (container.root_path, container.known, container.masked_paths) == ("/some/root", False, [])
    with pytest.raises(NvhookError):
        state.read_created(told(tmp_path, bundle=named, root="relative"))
    with pytest.raises(NvhookError):
        state.read_created(told(tmp_path, bundle=named))


def test_a_bundle_of_another_root(tmp_path: Path, bundle: Path) -> None:
    """crun has named another folder as the bundle: its own word on the root counts."""
    container = state.read_created(told(tmp_path, bundle=str(bundle), root="/other"))
    assert (container.root_path, container.known) == ("/other", False)


SEPARATE = "import sys; sys.path.insert(0, sys.argv[1]); from hook import mounts; print(mounts.is_separate())"


@pytest.mark.parametrize(
    ("wrapper", "separate"),
    [
        ([], False),
        (["unshare", "--pid", "--fork"], False),
        pytest.param(["unshare", "--mount"], True, marks=needs_root),
        (["unshare", "--user", "--mount"], True),
    ],
)
def test_whose_mount_namespace_it_is(wrapper: list[str], separate: bool) -> None:
    """Ours, and one of a container's own, below a process that is in ours. Nothing but a look at /proc tells."""
    command = [*wrapper, sys.executable, "-c", SEPARATE, str(TREE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if wrapper and done.returncode != 0 and done.stderr.startswith("unshare: "):
        pytest.skip(f"needs leave to make namespaces: {done.stderr.strip()}")
    assert done.stdout.strip() == str(separate), done.stderr


def test_what_is_mounted_inside() -> None:
    text = "\n".join(
        [
            "1 0 8:1 / / rw - ext4 none rw",
            r"2 1 0:5 / /c/my\040root rw - tmpfs none rw",
            r"3 2 0:6 / /c/my\040root/a\011b rw - proc none rw",
            r"4 2 0:6 / /c/my\040root/a\134040 rw - proc none rw",
            r"5 1 0:6 / /c/my\040rooted/x rw - proc none rw",
            "",
        ]
    )
    assert mounts.MountTable(text, "/c/my root").inside() == ["/a\tb", "/a\\040"]

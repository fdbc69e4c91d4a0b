# SPDX-License-Identifier: Apache-2.0
"""The command lines of runc and crun, as the engines write them and as people might."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hook import arguments
from ldcache.errors import NvhookError

LAUNCHER = Path(__file__).resolve().parents[2] / "packaging/launcher.c"

# (who writes it, the words, verb, bundle, log, id)
CASES = [
    (
        "containerd",
        "--root /run/r --log /b/log.json --log-format json --systemd-cgroup create --bundle /b --pid-file /p abc",
        ("create", "/b", "/b/log.json", "abc"),
    ),
    (
        "conmon",
        "--cgroup-manager=cgroupfs --log=/l create --bundle /b --pid-file /p --no-pivot abc",
        "create /b /l abc",
    ),
    ("one dash", "-log /l -root /r create -bundle /b abc", "create /b /l abc"),
    ("behind the id", "create abc --bundle /b", "create /b - abc"),
    ("short", "create -b /b abc", "create /b - abc"),
    ("short, with =", "create -b=/b abc", "create /b - abc"),
    ("short, attached", "create -b/b abc", "create /b - abc"),
    ("the last one counts", "create --bundle /a --bundle=/b abc", "create /b - abc"),
    ("no bundle", "run abc", "run - - abc"),
    ("a container named create", "start create", "start - - -"),
    ("a container named run, made", "create run", "create - - run"),
    ("a log named create", "--log create state abc", "state - create -"),
    ("a root named create", "--root create --debug delete abc", "delete - - -"),
    ("a bundle named create", "create --bundle create create", "create create - create"),
    ("a pid file named --bundle", "create --pid-file --bundle abc", "create - - abc"),
    ("crun's level", "--log-level debug create abc", "create - - abc"),
    ("a switch", "--systemd-cgroup=true create abc", "create - - abc"),
    ("an unknown switch", "--newer create abc", "create - - abc"),
    ("an unknown option", "--newer value create abc", "create - - abc"),
    ("an unknown option with =", "--newer=create state abc", "state - - -"),
    ("the end of options", "create -- abc", "create - - abc"),
    ("no verb", "--version", "- - - -"),
    ("nothing", "", "- - - -"),
    ("a command with options", "exec --env A=create abc create --bundle /x", "exec - - -"),
]


@pytest.mark.parametrize(("words", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_command_line(words: str, expected: str | tuple[str, ...]) -> None:
    wanted = expected.split() if isinstance(expected, str) else list(expected)
    made = arguments.parse(words.split())
    found = [made.verb, made.bundle, made.log, made.identity]
    assert [value or "-" for value in found] == wanted
    assert made.words == words.split()
    assert made.host_root == "/"


@pytest.mark.parametrize("words", ["--host-root /h --log /l create abc", "--log /l --host-root=/h create abc"])
def test_our_own_option_does_not_reach_the_runtime(words: str) -> None:
    made = arguments.parse(words.split())
    assert (made.host_root, made.words) == ("/h", ["--log", "/l", "create", "abc"])


@pytest.mark.parametrize("words", ["--host-root", "--host-root create", "create --bundle", "create -b"])
def test_a_value_that_is_missing(words: str) -> None:
    with pytest.raises(NvhookError):
        arguments.parse(words.split())


def test_other_missing_values_are_the_runtimes_business() -> None:
    assert arguments.parse(["create", "abc", "--pid-file"]).identity == "abc"
    assert arguments.parse(["--log"]).verb == ""


def test_the_launcher_knows_the_same_options() -> None:
    """Two tellers of the verb that differ would put a GPU into no container."""
    text = LAUNCHER.read_text()
    for name, ours in (("valued", arguments.VALUED), ("plain", arguments.PLAIN)):
        listed = re.search(rf"{name}\[\] = {{([^}}]*)}}", text)
        assert listed is not None
        assert re.findall(r'"([^"]*)"', listed.group(1)) == list(ours)


@pytest.mark.parametrize("words", ["create --help", "run -h", "create abc --help", "--root /r create --bundle=/b -h"])
def test_who_asks_for_help_makes_no_container(words: str) -> None:
    given = arguments.parse(words.split())
    assert not given.edits() and given.words == words.split()
    assert arguments.parse(["create", "--bundle", "--help", "abc"]).edits()
    assert arguments.parse(["create", "--", "--help"]).edits()

# SPDX-License-Identifier: Apache-2.0
"""Device rules in real containers: runc on both versions of cgroups, crun of a newer Debian on version 2."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.containers import CGROUP, DEVICE_RULES, Bundle, Hook, cgroup_versions, hook, on_cgroup
from tests.needs import needs_path, needs_program
from tests.system import runtimes

DRIVER = Path("/proc/driver/nvidia/version")
pytestmark = [
    needs_program("runc"),
    pytest.mark.skipif(
        DRIVER.exists(), reason="a loaded driver answers for its nodes itself; test_prestart runs there"
    ),
]

JIT_HARDEN = Path("/proc/sys/net/core/bpf_jit_harden")

TREE = Path(__file__).resolve().parents[2]
HOOK = Path(__file__).with_name("ruleshook.py")
SOURCE = Path(__file__).with_name("opens.c")

NODES = "(195, 0), (195, 255), (510, 0)"
# Ours, another GPU's, and devices of which some runtime or list says something.
DEVICES = (
    *("c:195:0", "c:195:255", "c:510:0", "c:195:1"),
    *("c:1:3", "c:1:5", "c:1:7", "c:1:8", "c:1:9", "c:1:11", "c:5:0", "c:5:1", "c:5:2", "c:136:0"),
    *("c:10:200", "c:10:229", "b:7:0", "b:195:0"),
)
OURS = ("c:195:0 ", "c:195:255 ", "c:510:0 ")

EVERYTHING = {"allow": True, "access": "rwm"}
NOTHING = DEVICE_RULES[0]


def rule(kind: str, numbers: str, access: str, allow: bool = True) -> dict[str, Any]:
    """A member of linux.resources.devices; `*` stands for a number that is absent."""
    major, minor = numbers.split(":")
    made = {"allow": allow, "type": kind, "access": access}
    return made | {name: int(text) for name, text in (("major", major), ("minor", minor)) if text != "*"}


# What docker 20.10 writes for a container without options.
DOCKER = [
    NOTHING,
    *(rule("c", numbers, "rwm") for numbers in ("1:5", "1:3", "1:9", "1:8", "5:0", "5:1")),
    rule("c", "10:229", "rwm", False),
]
LISTS: dict[str, list[dict[str, Any]]] = {
    "no rule": [],
    "nothing": [NOTHING],
    "docker": DOCKER,
    "privileged": [EVERYTHING],
    "resets": [rule("c", "195:1", "rwm"), EVERYTHING, rule("c", "10:229", "rw"), NOTHING, rule("b", "7:0", "rwm")],
    "wildcards": [
        NOTHING,
        rule("b", "*:*", "r"),
        rule("c", "1:*", "rw"),
        rule("b", "7:*", "w"),
        rule("c", "*:229", "r"),
    ],
    "letters apart": [NOTHING, rule("c", "195:0", "r"), rule("c", "195:0", "w"), rule("c", "195:255", "r")],
    "one of ours": [NOTHING, rule("c", "195:0", "rwm"), rule("c", "1:3", "r", False)],
    "exceptions": [
        EVERYTHING,
        rule("c", "195:0", "w", False),
        rule("c", "1:11", "rw", False),
        rule("b", "7:0", "r", False),
    ],
}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one program."""
    folder = tmp_path_factory.mktemp("opens") / "image"
    folder.mkdir()
    flags = ["-std=gnu11", "-Os", "-Wall", "-Wextra", "-Werror", "-static"]
    subprocess.run(["gcc", *flags, "-o", folder / "opens", SOURCE], check=True)
    return folder


@pytest.fixture(params=cgroup_versions())
def cgroup(request: pytest.FixtureRequest) -> str:
    """Each version of cgroups."""
    version: str = request.param
    return version


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """A test leaves no cgroup."""
    yield
    # Others' cgroups come and go while we look, which os.walk doesn't mind.
    names = [name for _, folders, _ in os.walk(CGROUP) for name in folders]
    assert [name for name in names if name.startswith(f"nvhook-test-{os.getpid()}-")] == []


class Ran:
    """A container that ended: what its program could open, and what the hook saw."""

    def __init__(self, done: subprocess.CompletedProcess[str], seen: Path) -> None:
        assert done.returncode == 0, done.stdout + done.stderr
        self.lines = done.stdout.splitlines()
        self.seen: dict[str, Any] = json.loads(seen.read_text())

    def others(self) -> list[str]:
        """Everything but our nodes."""
        return [line for line in self.lines if not line.startswith(OURS) or line.split()[1] == "m:"]

    def ours(self) -> set[str]:
        """What opening our nodes said, in any way."""
        return {line.split()[-1] for line in self.lines if line.startswith(OURS) and line.split()[1] != "m:"}

    def way(self, start: str) -> str:
        """The outcome of one way of opening."""
        [line] = [line for line in self.lines if line.startswith(f"{start}: ")]
        return line.split()[-1]


Run = Callable[..., Ran]


@pytest.fixture
def run(image: Path, tmp_path: Path) -> Run:
    """run("statements", rules, version, **Bundle's): a container whose prestart hook runs the statements."""
    numbers = iter(range(1000))

    def run_one(statements: str, rules: list[dict[str, Any]], version: str, **others: Any) -> Ran:
        number = next(numbers)
        seen = tmp_path / f"seen-{number}"
        wrapper: list[str] = others.pop("wrapper", [])
        made = prestart(wrapper, sys.executable, seen, statements)
        program = ["/opens", *DEVICES]
        folder = tmp_path / f"bundle-{number}"
        bundle = Bundle(folder, image, program, prestart=[made], device_rules=rules, cgroup=version, **others)
        return Ran(bundle.run(), seen)

    return run_one


def prestart(wrapper: list[str], python: str, seen: Path, statements: str) -> Hook:
    """The hook entry."""
    command = [*wrapper, python, "-I", str(HOOK), str(TREE), str(seen), statements]
    return hook(command[0], *command[1:])


def remove_cgroup(name: str) -> None:
    """Remove a cgroup that the runtime leaves, being above the container's own."""
    for path in (CGROUP / name, *CGROUP.glob(f"*/{name}")):
        if path.is_dir():
            path.rmdir()


@pytest.mark.parametrize("name", LISTS)
def test_only_our_nodes_open_after_it(run: Run, cgroup: str, name: str) -> None:
    """Whatever list config.json has: our nodes open in every way, all others as before, in every way."""
    before = run("", LISTS[name], cgroup)
    after = run(f"allow({NODES})", LISTS[name], cgroup)
    assert after.ours() == {"ENXIO"}, after.seen
    assert after.others() == before.others()
    for usual in (
        "/dev/null r",
        "/dev/null rw",
        "/dev/zero r",
        "/dev/urandom r",
        "/dev/ptmx rw",
        "pty echo",
        "c:195:1 m",
    ):
        assert after.way(usual) == "ok"
    privileged = name == "privileged"
    assert after.way("c:195:1 rw") == ("ENXIO" if privileged or name == "exceptions" else "EPERM")
    assert after.seen["change"].endswith(": nothing to do") == privileged
    assert after.seen["warnings"] == []
    assert (before.ours() == {"ENXIO"}) == privileged


@pytest.mark.parametrize("name", ["nothing", "letters apart", "exceptions"])
def test_undo(run: Run, cgroup: str, name: str) -> None:
    statements = f"""
seen["before"] = in_force()
made = allow({NODES})
seen["after"] = in_force()
made.undo()
seen["undone"] = in_force()
made.undo()
seen["twice"] = in_force()
made.close()
"""
    before = run("", LISTS[name], cgroup)
    undone = run(statements, LISTS[name], cgroup)
    seen = undone.seen
    assert seen["before"] == seen["undone"] == seen["twice"]
    # Of a list that allows by default, version 1 doesn't show the exceptions.
    assert seen["before"] != seen["after"] or (cgroup, name) == ("v1", "exceptions")
    assert undone.lines == before.lines


def test_undo_without_apply(run: Run, cgroup: str) -> None:
    statements = f"made = device_rules(); made.undo(); made.prepare([{NODES}]); made.undo(); made.close()"
    assert run(statements, [NOTHING], cgroup).ours() == {"EPERM"}


def test_a_second_run_changes_nothing(run: Run, cgroup: str) -> None:
    statements = f"allow({NODES}); seen['first'] = in_force(); allow((510, 0), {NODES}); seen['second'] = in_force()"
    ran = run(statements, [NOTHING], cgroup)
    assert ran.ours() == {"ENXIO"}
    assert ran.seen["first"] == ran.seen["second"]
    assert ran.seen["change"].endswith(": nothing to do")


def test_a_second_run_for_other_nodes(run: Run, cgroup: str) -> None:
    """Version 1 keeps a list, to which more can be added. On version 2 there is no telling what the first one did."""
    statements = f"allow({NODES}); seen['first'] = in_force(); allow((195, 1))"
    ran = run(statements, [NOTHING], cgroup)
    assert ran.ours() == {"ENXIO"}
    if cgroup == "v1":
        assert ran.way("c:195:1 rw") == "ENXIO"
    else:
        assert ran.way("c:195:1 rw") == "EPERM"
        assert ran.seen["error"].startswith("an earlier run of nvhook allowed other devices in /sys/fs/cgroup/nvhook-")


def test_a_default_node_in_linux_devices(run: Run, cgroup: str) -> None:
    """runc takes a default rule off its list for it; the filter is recognised all the same."""
    zero = {"path": "/dev/zero", "type": "c", "major": 1, "minor": 5, "fileMode": 0o666, "uid": 0, "gid": 0}
    before = run("", [NOTHING], cgroup, linux={"devices": [zero]})
    after = run(f"allow({NODES})", [NOTHING], cgroup, linux={"devices": [zero]})
    assert after.ours() == {"ENXIO"}
    assert after.others() == before.others()
    assert after.way("/dev/zero r") == "EPERM"


def test_a_scope_gets_one_warning(run: Run, cgroup: str) -> None:
    name = f"nvhook-test-{os.getpid()}-scope"
    ran = run(f"allow({NODES})", [NOTHING], cgroup, cgroups_path=f"/{name}.scope")
    [warning] = ran.seen["warnings"]
    assert re.fullmatch(rf"/sys/fs/cgroup/\S*{name}\.scope is a systemd scope: a daemon-reload .*", warning)
    assert "\n" not in warning and "CDI" in warning
    again = run(f"allow({NODES})", [EVERYTHING], cgroup, cgroups_path=f"/{name}.scope")
    assert again.seen["warnings"] == []


def refused(statements: str) -> str:
    """The statements, then a failing attempt that must change nothing."""
    return f"""
{statements}
seen["before"] = in_force()
try:
    allow({NODES})
finally:
    seen["after"] = in_force()
"""


BESIDE = 'attach(folder(), stranger(), "sd_devices")'
INSTEAD = f"old = programs(folder())[0].fd; {BESIDE}; bpf.detach(cgroupfs.open_folder(folder()), old)"


@pytest.mark.parametrize("statements", [BESIDE, INSTEAD])
def test_a_foreign_program_is_left_alone(run: Run, statements: str) -> None:
    ran = run(refused(statements), [NOTHING], "v2")
    assert ran.seen["before"] == ran.seen["after"]
    name = r"the device filter 'sd_devices' \(program \d+\) of /sys/fs/cgroup/nvhook-test-\S+ may forbid"
    assert re.match(name, ran.seen["error"])
    assert "CDI" in ran.seen["remedy"]
    assert ran.ours() == ({"EPERM"} if statements == BESIDE else {"ENXIO"})


def test_a_list_that_the_runtime_was_not_started_with(run: Run) -> None:
    """The filter tells by its tag that it isn't what config.json asks for."""
    ran = run(refused("linux['resources']['devices'].append({'allow': True, 'access': 'r'})"), [NOTHING], "v2")
    assert ran.seen["before"] == ran.seen["after"]
    assert "it is not the runtime's own for this config.json" in ran.seen["error"]
    assert ran.ours() == {"EPERM"}


@pytest.fixture
def inner() -> Iterator[str]:
    """A cgroupsPath one level down; the level above is ours to remove."""
    name = f"nvhook-test-{os.getpid()}-outer"
    yield f"/{name}/nvhook-test-{os.getpid()}-inner"
    remove_cgroup(name)


def test_a_program_above_that_may_forbid(run: Run, inner: str) -> None:
    statements = "attach(parent(), stranger(), 'sd_devices')"
    ran = run(refused(statements), [NOTHING], "v2", cgroups_path=inner)
    assert ran.seen["before"] == ran.seen["after"]
    assert re.match(
        r"the device filter 'sd_devices' \(program \d+\) of /sys/fs/cgroup/nvhook-test-\d+-outer may forbid",
        ran.seen["error"],
    )
    assert ran.ours() == {"EPERM"}


@pytest.mark.parametrize("number", [0, 1])
def test_a_program_above_that_allows_everything(run: Run, inner: str, number: int) -> None:
    """An engine in a privileged container: the outer runtime's filter is above the inner container's cgroup."""
    statements = f"attach(parent(), list(devicefilter.open_filters())[{number}], '')\nallow({NODES})"
    ran = run(statements, [NOTHING], "v2", cgroups_path=inner)
    assert ran.ours() == {"ENXIO"}, ran.seen
    assert ran.way("c:195:1 rw") == "EPERM"


# Attaches a filter to the cgroup $1, enters it and becomes the rest of its arguments.
OUTER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from hook import bpf, devicefilter
os.mkdir(sys.argv[2])
made = devicefilter.Filter("", devicefilter.MOVE, [devicefilter.Rule(devicefilter.CHAR, 195, 255, 6, False)], True)
program = made.program() if sys.argv[3] == "forbids" else made.extended([(195, 255)])
bpf.attach(os.open(sys.argv[2], os.O_RDONLY), bpf.load(program, "outer"))
with open(sys.argv[2] + "/cgroup.procs", "w") as file:
    file.write("0")
os.execv(sys.argv[4], sys.argv[4:])
"""


@pytest.mark.parametrize("filter_above", ["allows", "forbids"])
def test_an_engine_in_a_container(image: Path, tmp_path: Path, inner: str, filter_above: str) -> None:
    """The outer container's filter decides for runtime, hook and inner container: what we may open, it allows."""
    seen = tmp_path / "seen"
    made = prestart([], sys.executable, seen, f"allow({NODES})")
    program = ["/opens", *DEVICES]
    bundle = Bundle(tmp_path / "bundle", image, program, prestart=[made], cgroup="v2", cgroups_path=inner)
    bundle.write()
    enter = [sys.executable, "-I", "-c", OUTER, str(TREE), f"{CGROUP}{os.path.dirname(inner)}", filter_above]
    command = [*enter, *bundle.command(), "run", "--bundle", str(bundle.folder), bundle.name]
    done = subprocess.run(on_cgroup("v2", command), capture_output=True, text=True, check=False)
    bundle.delete()
    ran = Ran(done, seen)
    if filter_above == "allows":
        assert ran.ours() == {"ENXIO"}, ran.seen
    else:
        assert ran.ours() == {"EPERM"}
        assert "'outer'" in ran.seen["error"] and "-outer may forbid the GPU's devices" in ran.seen["error"]


def test_the_filter_of_the_scope_around(run: Run) -> None:
    """crun from 1.23 has systemd attach its filter to the scope, and the container in a cgroup inside of it."""
    scope = f"nvhook-test-{os.getpid()}-crun.scope"
    statements = f"""
[runtime] = programs(folder())
bpf.attach(cgroupfs.open_folder(parent()), runtime.fd)
bpf.detach(cgroupfs.open_folder(folder()), runtime.fd)
made = allow({NODES})
seen["inside"], seen["scope"] = len(programs(folder())), len(programs(parent()))
"""
    try:
        ran = run(statements, [NOTHING], "v2", cgroups_path=f"/{scope}/container")
    finally:
        remove_cgroup(scope)
    assert ran.ours() == {"ENXIO"}, ran.seen
    assert (ran.seen["inside"], ran.seen["scope"]) == (0, 1)
    assert len(ran.seen["warnings"]) == 1


def test_no_program_means_nothing_to_do(run: Run) -> None:
    statements = f"bpf.detach(cgroupfs.open_folder(folder()), programs(folder())[0].fd); allow({NODES})"
    ran = run(f"{statements}; seen['after'] = in_force()", [NOTHING], "v2")
    assert ran.seen["after"] == []
    assert ran.seen["change"].endswith(": nothing to do")
    assert ran.ours() == {"ENXIO"}


@pytest.fixture
def hardened() -> Iterator[None]:
    """The kernel shows programs' code to nobody, and blinds what its compiler makes of them."""
    before = JIT_HARDEN.read_text()
    try:
        JIT_HARDEN.write_text("2")
    except OSError as error:
        pytest.skip(f"cannot write {JIT_HARDEN}: {error.strerror}")
    yield
    JIT_HARDEN.write_text(before)


DETACHED = "bpf.detach(cgroupfs.open_folder(folder()), programs(folder())[0].fd)"
ALLOW_ALL = f"attach(folder(), list(devicefilter.open_filters())[0], ''); {DETACHED}"


@needs_path(str(JIT_HARDEN))
@pytest.mark.usefixtures("hardened")
@pytest.mark.parametrize(
    ("statements", "opens", "done"),
    [
        ("", "ENXIO", "c 195:0 rw"),
        (refused(BESIDE), "EPERM", "may forbid"),
        (DETACHED, "ENXIO", "nothing to do"),
        (ALLOW_ALL, "ENXIO", "nothing to do"),
    ],
    ids=["the runtime's", "a foreign one", "none", "allow all"],
)
def test_hardened(run: Run, statements: str, opens: str, done: str) -> None:
    """Nothing is read back from the kernel, so each of these goes as it does without, default nodes included."""
    before = run("", [NOTHING], "v2")
    ran = run(statements if statements.startswith("\n") else f"{statements}\nallow({NODES})", [NOTHING], "v2")
    assert JIT_HARDEN.read_text() == "2\n"
    assert ran.ours() == {opens}, ran.seen
    assert done in ran.seen.get("change", "") + ran.seen.get("error", "")
    if done != "nothing to do":
        assert ran.others() == before.others()
    for usual in ("/dev/null r", "/dev/null rw", "/dev/zero r", "/dev/urandom r", "/dev/ptmx rw", "pty echo"):
        assert before.way(usual) == ran.way(usual) == "ok"


def test_the_filter_changes_while_we_look(run: Run) -> None:
    """The runtime replaces its program by one like it between `prepare` and `apply`: we start over."""
    statements = f"""
made = device_rules()
made.prepare([{NODES}])
[old] = programs(folder())
[same] = [one for one in devicefilter.filters(linux["resources"]["devices"], []) if bpf.tag(one.program()) == old.tag]
bpf.replace(cgroupfs.open_folder(folder()), old.fd, bpf.load(same.program(), ""))
made.apply()
seen["after"] = len(programs(folder()))
made.undo()
seen["tag"] = programs(folder())[0].tag == old.tag
made.apply()
"""
    ran = run(statements, [NOTHING], "v2")
    assert ran.seen == {"after": 1, "tag": True}
    assert ran.ours() == {"ENXIO"}


def test_a_kernel_that_cannot_replace(run: Run) -> None:
    """Two steps instead, as before Linux 5.6: afterwards ours is the only one."""
    statements = f"""
[old] = programs(folder())
[made] = [one for one in devicefilter.filters(linux["resources"]["devices"], []) if bpf.tag(one.program()) == old.tag]
new = bpf.load(made.extended([{NODES}]))
bpf.add_then_drop(cgroupfs.open_folder(folder()), old.fd, new)
seen["after"] = [program.name for program in programs(folder())]
"""
    ran = run(statements, [NOTHING], "v2")
    assert ran.seen == {"after": ["nvhook"]}
    assert ran.ours() == {"ENXIO"}


def test_without_the_capabilities(run: Run, cgroup: str) -> None:
    """A runtime that has lost what device rules need: one line that says so, and nothing changed."""
    drop = "-sys_admin,-bpf,-net_admin"
    wrapper = ["/usr/bin/setpriv", "--bounding-set", drop, "--inh-caps", drop]
    ran = run(f"allow({NODES})", [NOTHING], cgroup, wrapper=wrapper)
    assert re.match(r"cannot (see to the device filter of|allow c 195:0 rw in) /sys/fs/cgroup/", ran.seen["error"])
    assert "CAP_SYS_ADMIN" in ran.seen["remedy"]
    assert ran.ours() == {"EPERM"}


@pytest.mark.skipif("v1" not in cgroup_versions(), reason="needs version 1's devices controller")
def test_a_parent_that_forbids(run: Run, inner: str) -> None:
    statements = f"write(parent() + '/devices.deny', 'c 195:* rw')\nallow({NODES})"
    ran = run(statements, [NOTHING], "v1", cgroups_path=inner)
    assert re.match(r"cannot allow c 195:0 rw in \S+: Operation not permitted: the parent cgroup", ran.seen["error"])
    assert ran.ours() == {"EPERM"}


@pytest.mark.skipif("v1" not in cgroup_versions(), reason="needs version 1's devices controller")
def test_a_wildcard_denied_knows_no_exception(run: Run) -> None:
    rules = [EVERYTHING, rule("c", "195:*", "rw", False)]
    ran = run(f"allow({NODES})", rules, "v1")
    assert "a rule denies more devices than c 195:0" in ran.seen["error"]
    assert ran.way("c:195:0 rw") == "EPERM"


@pytest.mark.skipif("v1" not in cgroup_versions(), reason="needs version 1's devices controller")
def test_a_cgroup_that_is_the_runtimes_too() -> None:
    """Without a cgroup of its own a container has its runtime's rules, which are not ours to change."""
    folder = CGROUP / f"devices/nvhook-test-{os.getpid()}-shared"
    script = f"mkdir {folder} && echo 0 > {folder}/cgroup.procs && echo a > {folder}/devices.deny"
    program = "import os; from hook import cgroup; cgroup.DeviceRules(os.getpid(), []).prepare([(195, 0)])"
    command = ["sh", "-c", f'{script} && exec "$0" -c "$1"', sys.executable, program]
    try:
        done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False)
    finally:
        folder.rmdir()
    assert f"the container shares the cgroup {folder} with its runtime" in done.stderr


def test_in_a_user_namespace_there_is_nothing_to_do() -> None:
    program = "from hook import cgroup; made = cgroup.DeviceRules(1, []); made.prepare([(195, 0)]); made.apply()"
    program += "; made.undo(); made.close(); print(made.describe())"
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", program]
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "no device cgroup is in force\n"), done.stderr


@pytest.mark.long
@pytest.mark.parametrize("runtime", ["crun", "runc"])
@pytest.mark.parametrize("name", LISTS)
def test_runtimes_of_debian_13(image: Path, tmp_path: Path, cache: Path, runtime: str, name: str) -> None:
    root = debian(cache)
    ran = []
    for number, statements in enumerate(("", f"allow({NODES})")):
        made = prestart([], runtimes.PYTHON, tmp_path / f"seen-{number}", statements)
        bundle = Bundle(
            tmp_path / f"bundle-{number}", image, ["/opens", *DEVICES], prestart=[made], device_rules=LISTS[name]
        )
        ran.append(Ran(runtimes.run(root, bundle, runtime), tmp_path / f"seen-{number}"))
    before, after = ran
    assert after.ours() == {"ENXIO"}, after.seen
    assert after.others() == before.others()
    # crun attaches no filter where config.json has no rule.
    quiet = name == "privileged" or (runtime, name) == ("crun", "no rule")
    assert after.seen["change"].endswith(": nothing to do") == quiet


def debian(cache: Path) -> Path:
    """The other Debian's root, or the reason why there is none."""
    try:
        return runtimes.debian(cache)
    except RuntimeError as error:
        pytest.skip(str(error))

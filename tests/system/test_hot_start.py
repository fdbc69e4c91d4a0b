# SPDX-License-Identifier: Apache-2.0
"""What a real container start has loaded when it is done, functions' own imports included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hook import install
from tests.containers import Hook, hook
from tests.hotlist import BUILT_IN, COMPILED, OURS
from tests.needs import needs_program
from tests.simhost import SimulatedHost
from tests.system.conftest import MakeBundle

pytestmark = needs_program("runc")

PROC_HOOK = Path(__file__).parents[1] / "simhost/prochook.py"

# The installed entry, but for its end: it writes down what was loaded. The file is opened first, since the hook
# ends in the container's mount namespace.
ENTRY = """
import os
import subprocess
import sys
before = set(sys.modules)
report = open({report!r}, "w")
sys.path[:0] = [{library!r}]
from hook.start import dispatch
status = dispatch(sys.argv[1:])
report.write(" ".join(sorted(set(sys.modules) - before)))
report.close()
sys.exit(status)
"""


def recording(folder: Path, prefix: Path, verb: str, *arguments: str) -> tuple[Hook, Path]:
    """A hook that does what the launcher's does and leaves its modules in a file."""
    report, entry = folder / f"{verb}.modules", folder / f"{verb}.entry"
    entry.write_text(ENTRY.format(report=str(report), library=str(prefix / "lib/nvhook")))
    return hook(install.interpreter(), "-I", "-S", "-B", str(entry), verb, *arguments), report


@pytest.mark.parametrize("devices", ["all", "void"])
def test_prestart_loads_the_list_and_no_more(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path, devices: str
) -> None:
    proc = hook(sys.executable, "-I", "-S", str(PROC_HOOK))
    # The first start may renew the inventory, and reads what that said; the second finds it fresh.
    for number in range(2):
        recorder, report = recording(tmp_path, prefix, "prestart", "--host-root", str(host.root))
        bundle = make_bundle("true", env={"NVIDIA_VISIBLE_DEVICES": devices}, prestart=[proc, recorder])
        done = bundle.run()
        assert done.returncode == 0, done.stdout + done.stderr
        assert set(report.read_text().split()) - OURS - COMPILED - BUILT_IN == set(), number


def test_create_container_loads_the_list_and_no_more(prefix: Path, make_bundle: MakeBundle, tmp_path: Path) -> None:
    link = "libm.so.6::/usr/lib/x86_64-linux-gnu/libplanted.so"
    recorder, report = recording(tmp_path, prefix, "create-container", "--link", link, "--folder", "/opt/image/lib")
    script = "readlink /usr/lib/x86_64-linux-gnu/libplanted.so"
    done = make_bundle(script, create_container=[recorder]).run()
    assert (done.returncode, done.stdout) == (0, "libm.so.6\n"), done.stdout + done.stderr
    assert set(report.read_text().split()) - OURS - COMPILED - BUILT_IN == set()


# The runtime never comes back: what it would have become is where it ends here.
RUNTIME = """
import posix, sys
before = set(sys.modules)
sys.path[:0] = [{library!r}]
def end(path, words, environment):
    with open({report!r}, "w") as report:
        report.write(" ".join(sorted(set(sys.modules) - before)))
    posix._exit(0)
posix.execve = end
from hook.start import dispatch
sys.exit(dispatch(sys.argv[1:]))
"""


@pytest.mark.parametrize("devices", ["all", "void"])
def test_the_runtime_loads_the_list_and_no_more(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path, devices: str
) -> None:
    report, entry = tmp_path / "modules", tmp_path / "entry"
    entry.write_text(RUNTIME.format(report=str(report), library=str(prefix / "lib/nvhook")))
    # The first start renews the inventory and chooses a runtime.
    for number in range(2):
        bundle = make_bundle("true", env={"NVIDIA_VISIBLE_DEVICES": devices})
        bundle.write()
        environment = os.memfd_create("environment", 0)
        words = ["runtime", "nvhook-runtime", f"{environment}:0", "--host-root", str(host.root)]
        words += ["create", "--bundle", str(bundle.folder), bundle.name]
        command = [install.interpreter(), "-I", "-S", "-B", str(entry), *words]
        done = subprocess.run(command, pass_fds=[environment], capture_output=True, text=True, check=False)
        os.close(environment)
        assert done.returncode == 0, done.stderr
        loaded = set(report.read_text().split())
        assert loaded - OURS - COMPILED - BUILT_IN == set(), number
        # Neither what names in CDI files need, nor what only a live container has.
        assert not loaded & {"cdi.registry", "hook.cgroup", "hook.bpf"}
        assert ("hook.shim" in loaded) == (devices == "all")

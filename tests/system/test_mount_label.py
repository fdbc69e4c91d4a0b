# SPDX-License-Identifier: Apache-2.0
"""linux.mountLabel: the SELinux context of the file systems that nvhook makes for a container.

runc refuses a configuration with a label where SELinux is off, so the parts are driven here one by one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hook import namespace, state
from tests.needs import needs_program

TREE = Path(__file__).resolve().parents[2]
LABEL = "system_u:object_r:container_file_t:s0:c1,c2"

PROGRAM = """
import posix, sys
sys.path.insert(0, sys.argv[1])
from hook import namespace, state
from ldcache import kernel
container = state.bundle_container(sys.argv[2])
container.pid = int(sys.argv[3])
place = namespace.Namespace()
place.open(container)
made = place.tmpfs((("mode", "0755"),), 0)
posix.mkdir("folder", dir_fd=made)
print(kernel.filesystem_type(made) == kernel.TMPFS_MAGIC, place.warnings)
"""


@needs_program("strace")
@pytest.mark.skipif(namespace.has_selinux(), reason="SELinux is on here, and may have no such context")
def test_a_new_file_system_is_asked_for_with_the_label(tmp_path: Path) -> None:
    """Where SELinux is off the kernel refuses the option, which is no error and no warning."""
    config = {"root": {"path": "rootfs"}, "linux": {"mountLabel": LABEL}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    log = tmp_path / "log"
    sleeper = subprocess.Popen(["unshare", "--mount", "sleep", "60"])
    try:
        while not Path(f"/proc/{sleeper.pid}/comm").read_text().startswith("sleep"):
            pass
        command = ["strace", "-s", "200", "-o", str(log), "-e", "trace=fsconfig", sys.executable, "-c", PROGRAM]
        words = [*command, str(TREE), str(tmp_path), str(sleeper.pid)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert done.stdout == "True []\n", done.stderr
    calls = log.read_text().splitlines()
    assert sum(f'"context", "{LABEL}"' in call for call in calls) == 1
    assert sum("FSCONFIG_CMD_CREATE" in call and call.endswith("= 0") for call in calls) == 1


def test_the_label_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"root": {"path": "r"}, "linux": {"mountLabel": null}}')
    assert state.bundle_container(str(tmp_path)).mount_label == ""


def test_all_that_is_mounted_in_a_container_goes_through_it() -> None:
    """The other file system that is made here is the cgroup look-up's own."""
    callers = {path.name for path in (TREE / "hook").glob("*.py") if "kernel.tmpfs(" in path.read_text()}
    assert callers == {"cgroupfs.py", "namespace.py"}

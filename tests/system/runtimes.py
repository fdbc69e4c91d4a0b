# SPDX-License-Identifier: Apache-2.0
"""Low-level runtimes of a newer Debian: real crun and runc, in a root of their own on this machine's kernel.

crun of Debian 12 dies here (it insists on raising RLIMIT_MEMLOCK) and refuses hybrid cgroups; that of Debian 13
works on cgroup version 2. Its root is made once by debootstrap and kept in the tests' cache folder.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests import releases
from tests.containers import Bundle, Hook, hook

TREE = Path(__file__).resolve().parents[2]
RELEASE = "trixie"
# Debian's interpreter, for hooks: what this machine's own is linked against isn't in that root.
PYTHON = "/usr/bin/python3"

# A mount namespace whose root is the other Debian, with version 2 of cgroups, and what the caller names ($1, by
# the same names) of this machine. pivot_root, because runtimes remount the root, which must be a mount for that.
ENTER = """
set -e
mount --bind "$0" "$0"
for folder in /proc /sys /dev $1; do
  mkdir -p "$0$folder"
  mount --rbind "$folder" "$0$folder"
done
cd "$0"
mkdir -p .outside
pivot_root . .outside
umount -R /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
umount -l /.outside
shift
exec "$@"
"""


def debian(cache: Path) -> Path:
    """The root of Debian 13 with its runtimes. Raises RuntimeError where it can't be made."""
    return releases.debian(cache, RELEASE)


def run(debian_root: Path, bundle: Bundle, program: str) -> subprocess.CompletedProcess[str]:
    """Like Bundle.run, with Debian 13's `program` on cgroup version 2. Bundle and image are at their usual paths."""
    bundle.write()
    state = bundle.folder / "state"
    runtime = [program, "--root", str(state)]
    try:
        return entered(debian_root, bundle, [*runtime, "run", "--bundle", str(bundle.folder), bundle.name])
    finally:
        entered(debian_root, bundle, [*runtime, "delete", "--force", bundle.name])
        shutil.rmtree(state, ignore_errors=True)


def entered(debian_root: Path, bundle: Bundle, command: list[str], *others: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in that root, which sees this tree, the bundle's and the image's folders, and `others`."""
    places = {TREE, bundle.folder.parent, bundle.root.parent, *others}
    folders = " ".join(sorted(map(str, places)))
    enter = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, str(debian_root), folders]
    return subprocess.run(
        [*enter, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60
    )


def in_debian_13(verb: str, *arguments: str) -> Hook:
    """A hook of this tree, started by that Debian's own interpreter, which has the module for cffi."""
    program = f"import sys; sys.path.insert(0, {str(TREE)!r})\n"
    program += f"from hook import {verb} as it; sys.exit(it.main(sys.argv[1:]))"
    return hook(PYTHON, "-I", "-B", "-c", program, *arguments)

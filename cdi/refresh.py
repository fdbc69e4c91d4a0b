# SPDX-License-Identifier: Apache-2.0
"""One look of `cdi watch`: makes the spec file anew if the host is another, and takes it away with the driver.

Cold. The spec is made by `cdi generate` in a child with a deadline, so a driver that hangs holds up nobody, and the
daemon has neither NVML nor a node of the driver's open (either would keep the module from being unloaded).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cdi import check, generate, reader, registry, spec
from cdi.host import fingerprint, store
from ldcache import root
from ldcache.errors import NvhookError

DEADLINE = 120.0
CHILD = "import sys; sys.path[:0] = sys.argv.pop(1).split('\\n'); from cdi.__main__ import main; sys.exit(main())"
# Parts of a fingerprint that send no event, or none that is sure to come; and `ours`: everybody's files in /tmp would
# wake us.
SILENT = ("nvhook", "until", "text", "names", "majors", "mig", "ours")
TOLD_MAX = 64

Say = Callable[[str, str], None]


class Refresh:
    """Keeps `output` what `cdi generate WORDS` would write. `say` is told a level and a line.

    `words` are options of `cdi generate`, without --output and --format; `options` what they mean for discovery.
    Raises NvhookError where the host root is no folder.
    """

    def __init__(self, output: Path, words: list[str], options: store.Options, say: Say) -> None:
        self.output = output
        self.words = words
        self.options = options
        self.say = say
        self.root_fd = root.open_host(options.host_root)
        # The last of them: a daemon lives long, and some lines have a number in them that is another each time.
        self._told: deque[str] = deque(maxlen=TOLD_MAX)
        # What the file was when it was right; nothing is known of it before the first look.
        self._seen: tuple[int, ...] | None = None

    def close(self) -> None:
        """Give the host's root back."""
        os.close(self.root_fd)

    def kept(self) -> dict[str, Any] | None:
        """The inventory that is kept, if any."""
        folder = store.find_folder(self.root_fd, self.options.host_root)
        if folder is None:
            return None
        try:
            return store.load(folder)
        finally:
            os.close(folder)

    def reason(self, silent_only: bool = False) -> str | None:
        """Why the file has to be looked at again; None while all is as it was. Less than a millisecond."""
        if self._seen is None or self._status() != self._seen:
            return f"{self.output} is another file"
        inventory = self.kept()
        if inventory is None:
            return "no inventory is kept"
        if not silent_only:
            return store.stale(self.root_fd, inventory, self.options)
        try:
            items = [item for item in inventory["fingerprint"] if item[0] in SILENT or item[1].startswith("/sys/")]
            return fingerprint.changed(self.root_fd, items)
        except (KeyError, TypeError, ValueError, IndexError):
            return "the inventory's form"

    def _status(self) -> tuple[int, ...] | None:
        try:
            status = self.output.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def folders(self) -> set[str]:
        """Where a change may make the file stale: of each file that the inventory knows, and the file's own."""
        found = {"/dev", "/etc/nvhook", "/etc/nvidia-container-runtime"}
        for item in (self.kept() or {}).get("fingerprint") or []:
            if item[0] in ("file", "link", "node", "entry") and not item[1].startswith(("/proc/", "/sys/")):
                found.add(item[1].rpartition("/")[0] or "/")
        top = self.options.host_root.rstrip("/")
        return {str(self.output.parent), *(top + path for path in found)}

    def run(self) -> bool:
        """Make the file what it should be. False where that has to be tried again. Raises nothing but for bugs."""
        # The inventory is renewed on the way: it alone would say that all is well, had the file not been written.
        self._seen = None
        if not fingerprint.text(self.root_fd, fingerprint.VERSION_FILE):
            return self._driver_is_gone()
        try:
            made = self._generate()
            return self._put(made)
        except NvhookError as error:
            self._tell("error", f"{error.what}; remedy: {error.remedy}")
            return False

    def _driver_is_gone(self) -> bool:
        """Take our file away; nobody else's."""
        old = self._old()
        if old is not None and check.maker(old) == "nvhook":
            try:
                self.output.unlink()
            except OSError as error:
                self._tell("error", f"no driver is loaded, and {self.output} cannot be removed: {error.strerror}")
                return False
            self._tell("warning", f"no driver is loaded: {self.output} is removed")
        else:
            self._tell("info", "no driver is loaded")
        return False

    def _old(self) -> dict[str, Any] | None:
        try:
            checked = check.load(str(self.output))
        except (OSError, ValueError):
            return None
        return None if checked.problems() else checked.spec

    def _generate(self) -> dict[str, Any]:
        """The spec of now. Raises NvhookError."""
        places = "\n".join(place for place in sys.path if place.startswith("/"))
        words = [sys.executable, "-I", "-S", "-B", "-c", CHILD, places, "generate", *self.words, "--format", "json"]
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
        environment |= {name: os.environ[name] for name in ("XDG_RUNTIME_DIR",) if name in os.environ}
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            printed, said = child.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            raise NvhookError("`cdi generate` took too long", "see what the driver does: dmesg, nvidia-smi") from None
        for line in said.splitlines():
            if line.startswith("nvhook: warning: "):
                self._tell("warning", line.partition("warning: ")[2])
        if child.returncode != 0:
            what = next((line for line in said.splitlines() if "error: " in line), "error: `cdi generate` failed")
            remedy = next(
                (line for line in said.splitlines() if line.startswith("  remedy: ")), "remedy: run it by hand"
            )
            raise NvhookError(what.partition("error: ")[2], remedy.partition("remedy: ")[2])
        made: dict[str, Any] = json.loads(printed)
        return made

    def _put(self, made: dict[str, Any]) -> bool:
        """Write the new spec, unless it says the same, or lacks what is still there. Raises NvhookError."""
        old = self._old()
        if old == reader.parse(json.dumps(made)):
            self._right()
            return True
        if old is not None and check.maker(old) != "nvhook":
            self._tell("warning", f"{self.output} is replaced; it was made by {check.maker(old)}")
        lost = lost_names(self.root_fd, old, made) if old is not None else []
        if lost:
            names = ", ".join(lost[:3])
            self._tell("warning", f"{self.output} stays: the new one would lack {names}, whose nodes are still there")
            return False
        for name in generate.refuse_conflict(self.output, made):
            self._tell("warning", f"{name} in the same folder is no spec that can be read")
        spec.write(self.output, spec.serialise(made, "json"))
        self._right()
        self.say("info", f"{self.output} is written: {', '.join(spec.device_names(made))}")
        if old is not None:
            for line in poorer(old, made):
                self.say("warning", f"{self.output} has no more {line}")
        return True

    def _tell(self, level: str, line: str) -> None:
        """Say a line, once while it is the case: what is tried again each minute would fill a log."""
        if line not in self._told:
            self._told.append(line)
            self.say(level, line)

    def _right(self) -> None:
        self._seen = self._status()
        self._told.clear()


def _device_nodes(value: dict[str, Any]) -> dict[str, set[str]]:
    """The nodes of each device, and under "" those of all, by their paths on the host."""

    def paths(edits: dict[str, Any] | None) -> set[str]:
        return {node.get("hostPath") or node["path"] for node in (edits or {}).get("deviceNodes", [])}

    found = {device["name"]: paths(device.get("containerEdits")) for device in value["devices"]}
    return found | {"": paths(value.get("containerEdits"))}


def lost_names(root_fd: int, old: dict[str, Any], made: dict[str, Any]) -> list[str]:
    """Devices of the old spec that the new one lacks although all their nodes are there: a UUID that NVML did not
    tell this time, a folder that could not be read. A device of another kind is no loss of this file's maker."""
    if old["kind"] != made["kind"] or check.driver_version(old) != check.driver_version(made):
        return []
    new = _device_nodes(made)
    gone = {name: nodes for name, nodes in _device_nodes(old).items() if name not in new}
    every = set().union(*new.values())
    # A node that no device has any more is not offered for a reason: its GPU is sick, or excluded.
    return [name for name, nodes in gone.items() if nodes and nodes <= every and all(map(_there(root_fd), nodes))]


def _there(root_fd: int) -> Callable[[str], bool]:
    def there(path: str) -> bool:
        try:
            root.stat(root_fd, path, follow=False)
        except OSError:
            return False
        return True

    return there


def poorer(old: dict[str, Any], made: dict[str, Any]) -> list[str]:
    """What the new spec lacks, in words: a spec gets poorer only aloud."""
    before, after = _device_nodes(old), _device_nodes(made)
    lines = [f"device {name}" for name in before if name not in after]
    lines += [path for path in sorted(before[""] - after[""])]
    if check.driver_version(old) == check.driver_version(made):
        mounts = [
            {mount["containerPath"] for mount in (one.get("containerEdits") or {}).get("mounts", [])}
            for one in (old, made)
        ]
        lines += sorted(mounts[0] - mounts[1])
    return lines


def clean(output: Path) -> None:
    """Remove what a killed process left of its writing, which no engine reads."""
    for path in output.parent.glob(f".{output.name}.*.tmp"):
        try:
            path.unlink()
        except OSError:
            # No file, or a read-only place; the next write will say so.
            continue


def default_output(host_root: str) -> Path:
    """NVIDIA's own name, in the folder for what is made at run time."""
    return Path(f"{host_root.rstrip('/')}{registry.FOLDERS[-1]}/nvidia.yaml")

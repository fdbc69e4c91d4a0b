# SPDX-License-Identifier: Apache-2.0
"""What a container sees of its GPUs and of the others: the script that looks, and what it must have found."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hook import install
from tests import roots
from tests.containers import Bundle
from tests.device.appliers import Way
from tests.device.machines import LISTED, Gpu, Machine

COLUMNS = ("nvidia-smi", "CUDA", "nodes", "proc")
OK, WRONG, ABSENT = "ok", "WRONG", "-"
MEETING = "/meeting"

# For busybox's sh. One line a fact: its name, then what was seen. An open file is closed at once, so nothing is read.
LOOK = """
look() {
  if [ ! -e "$1" ]; then echo "node $2 absent"
  elif said=$( { : <"$1"; } 2>&1 ); then echo "node $2 opened"
  else echo "node $2 ${said##*: }"
  fi
}
nvidia-smi -L | sed "s/^/smi /"
cuda=$(/cuda-check --json) || echo "failed cuda-check"
echo cuda $cuda
for minor in $CHOSEN; do look /dev/nvidia$minor "$minor chosen"; done
for minor in $OTHERS; do
  look /dev/nvidia$minor "$minor there"
  mknod -m 666 /dev/other$minor c 195 $minor && look /dev/other$minor "$minor made"
done
ls /proc/driver/nvidia/gpus | sed "s/^/gpu /"
sed "s/^/params /" /proc/driver/nvidia/params
"""
# Two containers at once: neither looks before the other is there, nor ends before the other has looked.
MEET = f"""
meet() {{ touch {MEETING}/$1.$ME; until [ -e {MEETING}/$1.$OTHER ]; do sleep 0.05; done; }}
meet come
{LOOK}
meet seen
echo met
"""
MEET_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Row:
    """One container: how it was started, what was asked for, one verdict a column, and what was wrong."""

    way: str
    asked: str
    verdicts: dict[str, str]
    misses: list[str]


class Containers:
    """Containers of one machine, with the CUDA program in them."""

    def __init__(self, machine: Machine, folder: Path, rules: list[dict[str, Any]] | None = None) -> None:
        self.machine = machine
        self.folder = folder
        # What runc is told of devices beside what each way adds; None: as docker and containerd write it.
        self.rules = rules
        self.image = roots.make_root(folder / "image")
        shutil.copy(install.origin("hook").parent / "bin/cuda-check", self.image / "cuda-check")
        self.count = 0

    def bundle(self, way: Way, devices: list[str], chosen: list[Gpu], script: str = LOOK, **env: str) -> Bundle:
        """A container that asks for these devices, which are those GPUs."""
        self.count += 1
        root = self.folder / f"root-{self.count}"
        subprocess.run(["cp", "-a", "--reflink=auto", str(self.image), str(root)], check=True)
        fields = way.bundle(devices)
        others = [str(gpu.minor) for gpu in self.machine.gpus if gpu not in chosen]
        facts = {"CHOSEN": " ".join(str(gpu.minor) for gpu in chosen), "OTHERS": " ".join(others)}
        fields["env"] = fields.get("env", {}) | facts | env
        if self.rules is not None:
            fields["device_rules"] = list(self.rules)
        return Bundle(self.folder / f"bundle-{self.count}", root, ["/bin/sh", "-c", script], **fields)

    def one(self, way: Way, asked: str, devices: list[str], chosen: list[Gpu]) -> Row:
        """A container by itself."""
        bundle = self.bundle(way, devices, chosen)
        try:
            done = bundle.run(way.runtime, timeout=MEET_SECONDS)
        finally:
            shutil.rmtree(bundle.root)
        return judge(self.machine, way, asked, chosen, done)

    def pair(self, way: Way, first: Gpu, second: Gpu) -> list[Row]:
        """Two containers at once, a GPU each."""
        meeting = self.folder / f"meeting-{self.count}"
        meeting.mkdir()
        mount = {"destination": MEETING, "source": str(meeting), "type": "bind", "options": ["rbind", "rw"]}
        running = []
        for me, other in ((first, second), (second, first)):
            names = {"ME": str(me.index), "OTHER": str(other.index)}
            bundle = self.bundle(way, [str(me.index)], [me], MEET, **names)
            bundle.mounts.append(mount)
            bundle.write()
            command = [*bundle.command(way.runtime), "run", "--bundle", str(bundle.folder), bundle.name]
            pipe = subprocess.PIPE
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
            running.append((me, other, bundle, child))
        return [self._ended(way, *one) for one in running]

    def _ended(self, way: Way, me: Gpu, other: Gpu, bundle: Bundle, child: subprocess.Popen[str]) -> Row:
        try:
            out, err = child.communicate(timeout=MEET_SECONDS)
        except subprocess.TimeoutExpired:
            bundle.delete(way.runtime)
            out, err = child.communicate()
        finally:
            bundle.delete(way.runtime)
            shutil.rmtree(bundle.root)
        done = subprocess.CompletedProcess(child.args, child.returncode, out, err)
        row = judge(self.machine, way, f"{me.index} beside {other.index}", [me], done)
        if "met" not in out.splitlines():
            row.misses.append("it was not there at the same time as the other")
        return row


def judge(machine: Machine, way: Way, asked: str, chosen: list[Gpu], done: subprocess.CompletedProcess[str]) -> Row:
    """What a container printed, compared with what it had to."""
    seen: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, rest = line.partition(" ")
        seen.setdefault(name, []).append(rest)
    if done.returncode or "cuda" not in seen:
        said = done.stderr.strip() or "it printed nothing"
        return Row(way.name, asked, dict.fromkeys(COLUMNS, ABSENT), [f"exit status {done.returncode}: {said}"])
    found = {
        "nvidia-smi": _smi(chosen, seen.get("smi", [])),
        "CUDA": _cuda(chosen, seen["cuda"][0]) + seen.get("failed", []),
        "nodes": _nodes(machine, chosen, seen.get("node", [])),
        "proc": _proc(machine, way, chosen, seen),
    }
    verdicts = {name: WRONG if misses else OK for name, misses in found.items()}
    if verdicts["proc"] == OK and not _masked(seen):
        verdicts["proc"] = ABSENT
    return Row(way.name, asked, verdicts, [f"{name}: {miss}" for name, misses in found.items() for miss in misses])


def _smi(chosen: list[Gpu], lines: list[str]) -> list[str]:
    """Exactly the GPUs asked for, counted from 0 in the order of the host's."""
    listed = [(index, uuid) for index, _, uuid in LISTED.findall("\n".join(lines))]
    wanted = [(str(i), gpu.uuid) for i, gpu in enumerate(sorted(chosen, key=lambda gpu: gpu.index))]
    return [] if listed == wanted and len(lines) == len(wanted) else [f"it lists {lines}, asked for were {wanted}"]


def _cuda(chosen: list[Gpu], text: str) -> list[str]:
    """The kernels ran on each GPU asked for, and there is no other."""
    try:
        report = json.loads(text)
    except ValueError:
        return [f"cuda-check printed {text!r}"]
    misses = [str(failure) for part in (report, *report["devices"]) for failure in part["failures"]]
    uuids = [device["uuid"] for device in report["devices"]]
    wanted = [gpu.uuid for gpu in sorted(chosen, key=lambda gpu: gpu.index)]
    if uuids != wanted:
        misses.append(f"it shows {uuids}, asked for were {wanted}")
    return misses


def _nodes(machine: Machine, chosen: list[Gpu], lines: list[str]) -> list[str]:
    """The chosen ones open; the others are not there, and one that the container makes may not be opened.

    A missing device rule is EPERM. On the simulated host what is allowed ends with ENXIO, for no driver is there.
    """
    opens = "opened" if machine.real else "No such device or address"
    wanted = [f"{gpu.minor} chosen {opens}" for gpu in chosen]
    for gpu in machine.gpus:
        if gpu not in chosen:
            wanted += [f"{gpu.minor} there absent", f"{gpu.minor} made Operation not permitted"]
    return [f"{line!r} was to be" for line in wanted if line not in lines] + [
        f"{line!r} was" for line in lines if line not in wanted
    ]


def _masked(seen: dict[str, list[str]]) -> bool:
    return "ModifyDeviceFiles: 0" in seen.get("params", [])


def _proc(machine: Machine, way: Way, chosen: list[Gpu], seen: dict[str, list[str]]) -> list[str]:
    """Where the mask is, just the chosen ones; and it is where it has to be."""
    shown, wanted = sorted(seen.get("gpu", [])), sorted(gpu.bus_id for gpu in chosen)
    masked = machine.masks and _masked(seen)
    misses = [] if shown == wanted or not masked else [f"it shows {shown}, asked for were {wanted}"]
    if machine.masks and masked != way.masks:
        misses.append("the mask is missing" if way.masks else "there is a mask where none was to be")
    return misses

# SPDX-License-Identifier: Apache-2.0
"""What ./demo shows: a runc container with nvhook as its prestart hook, and evidence from inside it.

Each piece of evidence is one line, `evidence: NAME host=… container=…`. With an NVIDIA driver on this machine
that driver is used and CUDA kernels run; without one, the simulated host of tests/simhost.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hook import install, planner
from tests import roots, simhost
from tests.containers import Bundle, Hook, hook

DRIVER = Path("/proc/driver/nvidia/version")
PROC_HOOK = Path(__file__).with_name("simhost") / "prochook.py"

# Runs in the container with busybox's sh. One line a fact: its name, then what was seen.
INSIDE = """\
for node in $NODES; do stat -c "node %n %t:%T" "$node"; done
stat -L -c "libcuda %d:%i" "$LIBRARIES/libcuda.so.1"
echo "real $(readlink -f "$LIBRARIES/libcuda.so.1")"
resolve -s libcuda.so.1 | sed "s/^/loader /"
resolve libimage.so.1 | sed "s/^/image /"
command -v nvidia-smi | sed "s/^/smi-path /"
nvidia-smi -L | sed "s/^/smi /"
if [ -x /cuda-check ]; then /cuda-check | sed "s/^/cuda /"; fi
"""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact, as the host has it and as the container saw it."""

    name: str
    host: str
    container: str
    good: bool

    def __str__(self) -> str:
        verdict = "" if self.good else "  <- WRONG"
        return f"evidence: {self.name} host={self.host} container={self.container}{verdict}"


@dataclass(frozen=True, slots=True)
class Machine:
    """The host that the container gets its GPU from: this machine, or a simulated one below `root`."""

    root: Path
    hooks: list[Hook]
    real: bool

    def path(self, name: str) -> Path:
        """Where a file of the host is on this machine."""
        return self.root / name.lstrip("/")


def machine(folder: Path) -> Machine:
    """This machine if it has a driver, else a simulated host below `folder`."""
    if DRIVER.exists():
        print(f"demo: using this machine's NVIDIA driver: {DRIVER.read_text().splitlines()[0]}")
        return Machine(Path("/"), [], True)
    print("demo: no NVIDIA driver on this machine; using the simulated host: real files and nodes, no GPU behind them")
    simulated = simhost.build(folder / "host", simhost.Host(gpus=simhost.gpus(2)))
    # Without a driver there is no /proc/driver/nvidia in any proc; the container's gets a stand-in.
    return Machine(simulated.root, [hook(sys.executable, "-I", "-S", str(PROC_HOOK))], False)


def run(folder: Path) -> list[Evidence]:
    """Start the container and collect the evidence. Raises SystemExit if it does not start."""
    host = machine(folder)
    launchers = install.install(folder / "prefix")
    image = roots.make_root(folder / "image")
    if host.real:
        shutil.copy(install.origin("hook").parent / "bin/cuda-check", image / "cuda-check")
    bundle = make_bundle(folder / "bundle", image, host, launchers[0])
    bundle.write()
    plan = planner.plan(str(bundle.folder), str(host.root))
    nodes = [node["path"] for node in plan["edits"]["deviceNodes"]]
    library = next(m for m in plan["edits"]["mounts"] if "/libcuda.so." in m["containerPath"])
    bundle.env |= {"NODES": " ".join(nodes), "LIBRARIES": library["containerPath"].rpartition("/")[0]}
    print(f"demo: runc starts a container whose prestart hook is {launchers[0].name}")
    began = time.monotonic()
    done = bundle.run(timeout=300)
    print(f"demo: the container ran for {time.monotonic() - began:.2f} s")
    if done.returncode != 0:
        sys.stdout.write(done.stdout)
        raise SystemExit(f"demo: the container failed with exit status {done.returncode}:\n{done.stderr}")
    return list(evidence(host, plan, library["hostPath"], parse(done.stdout)))


def make_bundle(folder: Path, image: Path, host: Machine, launcher: Path) -> Bundle:
    """The container: two hooks at most, and the script that looks around."""
    arguments = [] if host.real else ["--host-root", str(host.root)]
    capabilities = "compute,utility"
    return Bundle(
        folder,
        image,
        ["/bin/sh", "-c", INSIDE],
        env={"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": capabilities},
        prestart=[*host.hooks, hook(launcher, *arguments)],
    )


def parse(text: str) -> dict[str, list[str]]:
    """The container's lines by their first word."""
    seen: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        seen.setdefault(name, []).append(rest)
    return seen


def evidence(host: Machine, plan: dict[str, Any], libcuda: str, seen: dict[str, list[str]]) -> list[Evidence]:
    """Facts of both sides, compared."""

    def first(name: str) -> str:
        return seen.get(name, ["nothing"])[0]

    status = host.path(libcuda).stat()
    identity = f"{status.st_dev}:{status.st_ino}"
    version = loaded_version(host)
    inside_version = first("real").partition(".so.")[2]
    loader_path, _, loader_identity = first("loader").removeprefix("libcuda.so.1 ").partition(" ")
    image = first("image").removeprefix("libimage.so.1 ")
    made = [
        nodes_evidence(plan, seen),
        Evidence("libcuda", identity, first("libcuda"), first("libcuda") == identity),
        Evidence("libcuda-version", version, inside_version, inside_version == version),
        Evidence("loader", identity, f"{loader_path} {loader_identity}", loader_identity == identity),
        Evidence("image-library", "none", image, image.startswith(roots.IMAGE_FOLDER)),
        smi_evidence(host, seen),
    ]
    if host.real:
        made += cuda_evidence(seen.get("cuda", []))
    return made


def loaded_version(host: Machine) -> str:
    """The loaded kernel module's version, as sysfs has it."""
    return host.path("/sys/module/nvidia/version").read_text().strip()


def nodes_evidence(plan: dict[str, Any], seen: dict[str, list[str]]) -> Evidence:
    """Each planned node with its device numbers; stat prints those in hexadecimal."""
    there = {}
    for line in seen.get("node", []):
        path, _, numbers = line.partition(" ")
        there[path] = ":".join(str(int(number, 16)) for number in numbers.split(":"))
    wanted = {node["path"]: f"{node['major']}:{node['minor']}" for node in plan["edits"]["deviceNodes"]}

    def text(nodes: dict[str, str]) -> str:
        return ",".join(f"{path.rpartition('/')[2]}={numbers}" for path, numbers in nodes.items()) or "nothing"

    return Evidence("nodes", text(wanted), text(there), there == wanted)


def smi_evidence(host: Machine, seen: dict[str, list[str]]) -> Evidence:
    """nvidia-smi by its bare name lists the GPUs that /proc/driver/nvidia has."""
    count = len(list(host.path("/proc/driver/nvidia/gpus").iterdir()))
    listed = [line for line in seen.get("smi", []) if line.startswith("GPU ")]
    path = seen.get("smi-path", ["nothing"])[0]
    return Evidence("nvidia-smi", f"{count}-GPUs", f"{path} {'; '.join(listed)}", len(listed) == count)


def cuda_evidence(lines: list[str]) -> list[Evidence]:
    """What the CUDA program printed in the container."""

    def found(wanted: Callable[[str], bool]) -> str:
        return next((line.strip() for line in lines if wanted(line)), "nothing")

    vector = found(lambda line: "elements right" in line)
    hello = found(lambda line: "Hello from GPU thread 0!" in line)
    return [
        Evidence("vector-kernel", "every element", vector, "right" in vector),
        Evidence("hello", "none", hello, "Hello from GPU thread 0!" in hello),
    ]


def main() -> int:
    """0 if every piece of evidence is as it should be."""
    folder = Path(tempfile.mkdtemp(prefix="nvhook-demo-"))
    try:
        made = run(folder)
        for item in made:
            print(item)
    finally:
        shutil.rmtree(folder)
    wrong = [item.name for item in made if not item.good]
    print(f"demo: wrong: {', '.join(wrong)}" if wrong else f"demo: all {len(made)} pieces of evidence are right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

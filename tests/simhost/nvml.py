# SPDX-License-Identifier: Apache-2.0
"""What the simulated NVML (nvml.c) reads and writes: a folder `simulated-nvml` beside the library.

nvml.json describes it for people, nvml.conf says the same in lines that sscanf can read, and `calls` is
what was called. All three are written in place: the time stamps of the library's folder, which an
inventory's fingerprint holds, stay.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from tests.simhost.host import Gpu, Host, Nvml

FOLDER = "simulated-nvml"


class Call(NamedTuple):
    """One call: the process that made it, the function, NVML's index of the GPU or -1."""

    pid: int
    name: str
    gpu: int


def write(folder: Path, host: Host, nvml: Nvml) -> None:
    """Sets what the library beside `folder` answers from its next nvmlInit on."""
    folder.mkdir(parents=True, exist_ok=True)
    version = nvml.version or host.version
    description = {
        "driver": version,
        "cuda": host.cuda,
        "gpus": [asdict(gpu) for gpu in host.nvml_order],
        **asdict(nvml),
    }
    (folder / "nvml.json").write_text(json.dumps(description, indent=2) + "\n")
    lines = [f"driver {version}", f"nvml {host.cuda_version // 1000}.{version}", f"cuda {host.cuda_version}"]
    for index, gpu in enumerate(host.nvml_order):
        lines.append(_gpu_line(gpu))
        lines += [f"mig {index} {device.gi} {device.ci} {device.uuid} {device.profile}" for device in gpu.mig_devices]
    for fault in nvml.faults:
        index = -1 if fault.gpu is None else fault.gpu
        lines.append(f"fault {fault.call} {index} {fault.delay_ms} {fault.result} {fault.action}")
    lines.append(f"record {int(nvml.record)}")
    (folder / "nvml.conf").write_text("\n".join(lines) + "\n")
    (folder / "calls").touch(mode=0o666)


def read_calls(folder: Path) -> tuple[Call, ...]:
    rows = (line.split() for line in (folder / "calls").read_text().splitlines())
    return tuple(Call(int(pid), name, int(gpu)) for pid, name, gpu in rows)


def _gpu_line(gpu: Gpu) -> str:
    major, minor = gpu.compute
    pci = f"{gpu.device_id:04x}10de 0 {gpu.brand} {gpu.architecture}"
    return f"gpu {gpu.bus_id} {gpu.uuid} {gpu.minor} {pci} {major} {minor} {gpu.mig} {gpu.numa_node} {gpu.name}"

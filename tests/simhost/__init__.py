# SPDX-License-Identifier: Apache-2.0
"""A simulated host: a whole NVIDIA driver below a folder, to be used as `--host-root`.

    host = build(tmp_path / "host", Host(gpus=gpus(8), layout="lib64", i386=True))
    slow, lost = Fault("nvmlInit", delay_ms=2000), Fault("nvmlDeviceGetHandle", gpu=3, result=15)
    host.set_nvml(Nvml(faults=(slow, lost)))

`build_h200` makes the one real host of tests/data/h200. From a shell: `python -m tests.simhost DIRECTORY`.
"""

from tests.simhost.h200 import build_h200
from tests.simhost.host import Fault, Gpu, Host, Library, Mig, Nvml, divided, gpus
from tests.simhost.nvml import Call
from tests.simhost.simulated import SimulatedHost, build

__all__ = [
    "Call",
    "Fault",
    "Gpu",
    "Host",
    "Library",
    "Mig",
    "Nvml",
    "SimulatedHost",
    "build",
    "build_h200",
    "divided",
    "gpus",
]

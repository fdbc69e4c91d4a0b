# SPDX-License-Identifier: Apache-2.0
"""Requests from end to end: config.json and the host's configuration in, `nvhook plan` and real containers out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hook import planner
from ldcache.errors import NvhookError
from tests.needs import needs_program, needs_root
from tests.simhost import Gpu, Host, SimulatedHost, build, elfwriter, gpus
from tests.system.conftest import MakeBundle
from tests.system.prestart import nvhook, output, reported, visible

pytestmark = needs_root

# The kernel does not tell their UUIDs: whatever is known of them, NVML was asked.
UNKNOWN = tuple(Gpu(one.bus_id, one.minor, one.uuid, known=False) for one in gpus(2))


@pytest.fixture
def machine(tmp_path: Path) -> SimulatedHost:
    """A host of its own, to be configured."""
    return build(tmp_path / "machine", Host(gpus=UNKNOWN, graphics=False))


def configure(machine: SimulatedHost, text: str) -> None:
    machine.path("/etc/nvhook").mkdir(parents=True, exist_ok=True)
    machine.path("/etc/nvhook/config.toml").write_text(text)


def plan(
    make_bundle: MakeBundle, machine: SimulatedHost, env: dict[str, str], mounts: tuple[str, ...] = (), **changes: Any
) -> dict[str, Any]:
    """The plan for a container with these mounts of /dev/null, and `changes` in config.json."""
    null = [{"source": "/dev/null", "destination": place, "type": "bind", "options": ["bind"]} for place in mounts]
    bundle = make_bundle("true", env=env, mounts=null)
    (bundle.folder / "config.json").write_text(json.dumps(bundle.config() | changes))
    return planner.plan(str(bundle.folder), str(machine.root))


def nodes(made: dict[str, Any]) -> list[str]:
    return [node["path"] for node in made["edits"].get("deviceNodes", []) if node["path"][-1].isdigit()]


def test_the_decision_names_each_source(make_bundle: MakeBundle, machine: SimulatedHost) -> None:
    configure(machine, "accept-nvidia-visible-devices-as-volume-mounts = true")
    mounts = ("/var/run/nvidia-container-devices/1",)
    made = plan(make_bundle, machine, visible("all"), mounts, annotations={"cdi.k8s.io/a": "nvidia.com/gpu=0"})
    assert nodes(made) == ["/dev/nvidia1"]
    assert made["request"]["devices"] == ["1"]
    assert made["decision"]["configuration"] == "/etc/nvhook/config.toml"
    assert (made["decision"]["privileged"], made["decision"]["legacy_image"]) == (False, False)
    found = [(source["source"], source["used"]) for source in made["decision"]["sources"]]
    assert found == [("annotation", False), ("volume mount", True), ("environment", False)]


def test_the_decision_for_no_gpu(make_bundle: MakeBundle, machine: SimulatedHost) -> None:
    made = plan(make_bundle, machine, visible("void"))
    assert (made["request"], made["steps"]) == (None, [])
    # Nothing was asked for under any configuration, so nobody looked at the host.
    assert not machine.path("/run/nvhook").exists()
    configure(machine, "accept-nvidia-visible-devices-envvar-when-unprivileged = false")
    made = plan(make_bundle, machine, visible("all"))
    assert made["request"] is None and "unprivileged container" in made["finish"]["warnings"][0]
    process = {"env": ["NVIDIA_VISIBLE_DEVICES=0"], "capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}
    assert nodes(plan(make_bundle, machine, {}, process=process)) == ["/dev/nvidia0"]


def test_swarm_resources(make_bundle: MakeBundle, machine: SimulatedHost) -> None:
    assert plan(make_bundle, machine, {"DOCKER_RESOURCE_GPU": "1"})["request"] is None
    configure(machine, 'swarm-resource = "DOCKER_RESOURCE_GPU"')
    assert nodes(plan(make_bundle, machine, {"DOCKER_RESOURCE_GPU": "1"})) == ["/dev/nvidia1"]
    assert plan(make_bundle, machine, {"OTHER": "1"})["request"] is None


def test_requirements_are_in_the_plan(make_bundle: MakeBundle, machine: SimulatedHost) -> None:
    env = visible("all") | {"NVIDIA_REQUIRE_CUDA": "cuda>=12.4", "NVIDIA_REQUIRE_DRIVER": "driver>=470"}
    made = plan(make_bundle, machine, env)
    assert [(entry["name"], entry["satisfied"]) for entry in made["requirements"]] == [
        ("NVIDIA_REQUIRE_CUDA", True),
        ("NVIDIA_REQUIRE_DRIVER", True),
    ]
    assert made["compatibility"] == {
        "image_cuda": "12.4",
        "driver_cuda": "13.0",
        "kind": "native",
        "driver_needed": 550,
    }
    assert machine.nvml_calls() == ()


def test_nvml_is_asked_for_what_a_requirement_needs(make_bundle: MakeBundle, machine: SimulatedHost) -> None:
    env = visible("all") | {"NVIDIA_REQUIRE_CUDA": "cuda>=99 arch>=9.0,brand=nvidia"}
    assert plan(make_bundle, machine, env)["requirements"][0]["satisfied"]
    calls = len(machine.nvml_calls())
    assert calls > 0
    # And once: the next start finds it in the inventory.
    with pytest.raises(NvhookError, match=r"of GPU 0: arch>=10 \(arch is 9.0\)"):
        plan(make_bundle, machine, visible("all") | {"NVIDIA_REQUIRE_ARCH": "arch>=10"})
    assert len(machine.nvml_calls()) == calls


def test_nvml_that_does_not_tell(make_bundle: MakeBundle, machine: SimulatedHost) -> None:
    machine.library("libnvidia-ml.so.1").write_bytes(b"no library")
    env = visible("all", "compute") | {"NVIDIA_REQUIRE_ARCH": "arch>=9.0"}
    with pytest.raises(NvhookError, match="NVML does not tell the GPUs' arch"):
        plan(make_bundle, machine, env)
    assert nodes(plan(make_bundle, machine, env | {"NVIDIA_DISABLE_REQUIRE": "1"})) == ["/dev/nvidia0", "/dev/nvidia1"]


def test_requirements_by_configuration(make_bundle: MakeBundle, machine: SimulatedHost) -> None:
    env = visible("0") | {"NVIDIA_REQUIRE_CUDA": "cuda>=99.0"}
    with pytest.raises(NvhookError) as caught:
        plan(make_bundle, machine, env)
    assert caught.value.what == "NVIDIA_REQUIRE_CUDA is not met by the driver of GPU 0: cuda>=99.0 (cuda is 13.0)"
    configure(machine, '[compat]\nrequirements = "warn"')
    made = plan(make_bundle, machine, env)
    assert caught.value.what in made["finish"]["warnings"]
    assert not made["requirements"][0]["satisfied"]
    configure(machine, "disable-require = true")
    assert plan(make_bundle, machine, env)["requirements"] == []


@needs_program("runc")
def test_the_hook_says_what_the_plan_says(
    prefix: Path, machine: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path, cgroup: str
) -> None:
    report = tmp_path / "report"
    hooks = reported(nvhook(prefix, machine), report)
    env = {"NVIDIA_VISIBLE_DEVICES": "1", "NVIDIA_REQUIRE_CUDA": "driver>=470", "CUDA_VERSION": "13.5.1"}
    lines = output(make_bundle("ls /dev", env=env, prestart=hooks, cgroup=cgroup)).split()
    assert "nvidia1" in lines and "nvidia0" not in lines
    assert (
        "warning: the image is built for CUDA 13.5, driver 580.159.04 brings 13.0: minor-version" in report.read_text()
    )
    env["NVIDIA_REQUIRE_CUDA"] = "cuda>=13.5"
    done = make_bundle("true", env=env, prestart=nvhook(prefix, machine), cgroup=cgroup).run()
    assert done.returncode != 0
    assert "NVIDIA_REQUIRE_CUDA is not met by the driver of GPU 0" not in done.stderr
    assert "NVIDIA_REQUIRE_CUDA is not met by the driver of GPU 1: cuda>=13.5 (cuda is 13.0)" in done.stderr


@needs_program("runc")
def test_a_refused_request_starts_without_a_gpu(
    prefix: Path, machine: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    configure(machine, "accept-nvidia-visible-devices-envvar-when-unprivileged = false")
    report = tmp_path / "report"
    bundle = make_bundle("ls /dev", env=visible("all"), prestart=reported(nvhook(prefix, machine), report))
    assert "nvidia" not in output(bundle)
    assert "devices asked for by the environment of an unprivileged container: all: ignored" in report.read_text()


def test_no_cgroups(make_bundle: MakeBundle, machine: SimulatedHost) -> None:
    rules = [step for step in plan(make_bundle, machine, visible("0"))["steps"] if "rule" in step or "cgroup" in step]
    assert len(rules) == 1
    configure(machine, "[prestart]\nno-cgroups = true")
    assert rules[0] not in plan(make_bundle, machine, visible("0"))["steps"]


def test_no_devbind(prefix: Path, machine: SimulatedHost, make_bundle: MakeBundle) -> None:
    """No node, and everything else, the rules included."""
    script = "ls /dev; find /usr -name 'libcuda.so.*'; ls /proc/driver/nvidia/gpus"
    before = output(make_bundle(script, env=visible("0"), prestart=nvhook(prefix, machine))).split()
    assert "nvidia0" in before
    steps = plan(make_bundle, machine, visible("0"))["steps"]
    configure(machine, "[prestart]\nno-devbind = true")
    after = output(make_bundle(script, env=visible("0"), prestart=nvhook(prefix, machine))).split()
    assert [line for line in before if not line.startswith("nvidia")] == after
    left = plan(make_bundle, machine, visible("0"))["steps"]
    assert [step for step in steps if step not in left] and [step for step in steps if "rule" in step][0] in left


def test_forward_compatibility_by_configuration(make_bundle: MakeBundle, machine: SimulatedHost) -> None:
    made: dict[bool, Any] = {}
    for allowed in (True, False):
        configure(machine, f"[compat]\nforward-compatibility = {str(allowed).lower()}")
        bundle = make_bundle("true", env=visible("0") | {"CUDA_VERSION": "14.1", "NVIDIA_REQUIRE_CUDA": "driver>=470"})
        folder = bundle.root / "usr/local/cuda/compat"
        folder.mkdir(parents=True)
        note = json.dumps({"format": 1, "CUDA version": "14.1", "driver": [580], "device": []}).encode()
        library = elfwriter.shared_object("libcuda.so.1")
        library = elfwriter.with_note(library, ".note.cuda.fwd_compatibility", b"NVIDIA Corporation", note)
        (folder / "libcuda.so.620.10").write_bytes(library)
        (bundle.folder / "config.json").write_text(json.dumps(bundle.config()))
        made[allowed] = planner.plan(str(bundle.folder), str(machine.root))
    assert made[True]["finish"]["forward_compatibility"]["used"] is True
    assert made[True]["compatibility"]["kind"] == "forward"
    assert made[False]["finish"]["forward_compatibility"] is None
    assert made[False]["compatibility"]["kind"] == "none"
    assert any("neither" in warning for warning in made[False]["finish"]["warnings"])

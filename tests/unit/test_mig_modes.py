# SPDX-License-Identifier: Apache-2.0
"""GPUs in MIG mode, and MIG devices that draw: what a CDI file offers, by the kernel and by NVML."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdi import cli, generate, reader, spec
from cdi.host import inventory, mig, overview, store
from cdi.host.store import Options
from ldcache import root
from ldcache.errors import NvhookError
from tests.needs import needs_root
from tests.simhost import Fault, Host, Nvml, SimulatedHost, build, divided, gpus

HOOK = "/usr/bin/nvhook-create-container"
WHOLE, CARD = gpus(2)
# In MIG mode, as NVML says, and nothing in it.
EMPTY = Host(gpus=(WHOLE, replace(CARD, mig=1)), graphics=False)

pytestmark = needs_root


def look(host: SimulatedHost, nvml: str) -> dict[str, Any]:
    return inventory.gather(Options(str(host.root), nvml=nvml))


def modes(found: dict[str, Any]) -> list[bool | None]:
    return [gpu["mig_mode"] for gpu in found["gpus"]]


def paths(made: dict[str, Any]) -> dict[str, list[str]]:
    """Each device of a spec and its nodes."""
    return {one["name"]: [node["path"] for node in one["containerEdits"]["deviceNodes"]] for one in made["devices"]}


def test_a_gpu_in_mig_mode_is_not_offered_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = build(tmp_path, EMPTY)
    words = ["generate", "--host-root", str(host.root), "--hook-path", HOOK]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert spec.device_names(reader.parse(out)) == ["0", WHOLE.uuid, "all"]
    assert "/dev/nvidia1" not in out
    left_out = f"GPU 1 ({CARD.bus_id}) is left out: it is in MIG mode and has no MIG device"
    assert left_out in err
    assert cli.main([*words, "--strict"]) == 1
    assert left_out in capsys.readouterr().err


def test_a_host_with_nothing_else(tmp_path: Path) -> None:
    host = build(tmp_path, replace(EMPTY, gpus=(replace(CARD, mig=1),)))
    with pytest.raises(NvhookError, match="in MIG mode and has no MIG device"):
        generate.make(look(host, "health"), HOOK)


def test_the_kernel_shows_the_mode_by_an_instance(tmp_path: Path) -> None:
    """A GPU instance without a compute instance is no MIG device; NVML need not be asked."""
    host = build(tmp_path, replace(EMPTY, gpus=(WHOLE, divided(CARD, (1, 0)))))
    shutil.rmtree(host.path("/proc/driver/nvidia/capabilities/gpu1/mig/gi1/ci0"))
    found = look(host, "never")
    assert modes(found) == [None, True] and found["mig"] == [] and host.nvml_calls() == ()
    assert spec.device_names(generate.make(found, HOOK)) == ["0", WHOLE.uuid, "all"]
    assert f"in MIG mode without a MIG device: {CARD.bus_id}" in overview.table(found)


@pytest.mark.parametrize(("mode", "told"), [(-1, False), (0, False), (1, True)])
def test_what_nvml_tells(tmp_path: Path, mode: int, told: bool) -> None:
    """-1: a GPU that has no such mode."""
    host = build(tmp_path, replace(EMPTY, gpus=(replace(CARD, mig=mode),)))
    assert modes(look(host, "health")) == [told]


def test_a_mode_that_nvml_cannot_tell(tmp_path: Path) -> None:
    host = build(tmp_path, replace(EMPTY, nvml=Nvml(faults=(Fault("nvmlDeviceGetMigMode", result=999),))))
    found = look(host, "health")
    assert modes(found) == [None, None] and found["faults"] == []


def test_the_last_word_is_kept_and_asked_for_again(tmp_path: Path) -> None:
    """A look without NVML keeps what it said; before somebody is refused for it, NVML is asked about that GPU."""
    host = build(tmp_path, EMPTY)
    fd = root.open_host(str(host.root))
    inventory.current(Options(str(host.root), nvml="health"))
    kept = inventory.look(Options(str(host.root), nvml="never"), store.inventory(fd, str(host.root)))
    assert modes(kept) == [False, True] and not store.settled(kept)
    host.clear_nvml_calls()
    assert modes(store.renew(fd, str(host.root), nvml=True)) == [False, True]
    assert {call.gpu for call in host.nvml_calls()} == {-1, 1}
    host.host = Host(gpus=(WHOLE, CARD), graphics=False)
    host.set_nvml(Nvml())
    now = store.renew(fd, str(host.root), nvml=True)
    assert modes(now) == [False, False] and store.settled(now)


def test_drm_nodes_are_for_profiles_that_draw(tmp_path: Path) -> None:
    card = divided(CARD, (1, 0), (2, 0))
    drawing = replace(card.mig_devices[1], profile="1g.24gb+gfx")
    card = replace(card, mig_devices=(card.mig_devices[0], drawing))
    host = build(tmp_path, Host(gpus=(WHOLE, card), modules=("nvidia", "nvidia_uvm", "nvidia_drm")))
    found = look(host, "health")
    assert [entry["profile"] for entry in found["mig"]] == ["1g.18gb", "1g.24gb+gfx"]
    nodes = paths(generate.make(found, HOOK))
    drm = {name: [path for path in mine if "/dri/" in path] for name, mine in nodes.items()}
    assert drm["1:0"] == drm[card.mig_devices[0].uuid] == []
    assert drm["1:1"] == drm[drawing.uuid] == ["/dev/dri/card1", "/dev/dri/renderD129"]
    assert drm["0"] == ["/dev/dri/card0", "/dev/dri/renderD128"]
    kept = inventory.look(Options(str(host.root), nvml="never"), found)
    assert [entry["profile"] for entry in kept["mig"]] == ["1g.18gb", "1g.24gb+gfx"]
    assert "1g.24gb+gfx" in overview.table(kept)
    # Nobody told the profiles: then nothing is known to draw.
    assert not any("/dri/" in path for path in paths(generate.make(look(host, "never"), HOOK))["1:1"])


def test_a_mig_device_whose_name_nvml_does_not_tell(tmp_path: Path) -> None:
    fault = Fault("nvmlDeviceGetName", result=3)
    host = build(tmp_path, Host(gpus=(divided(CARD, (1, 0)),), graphics=False, nvml=Nvml(faults=(fault,))))
    (entry,) = look(host, "health")["mig"]
    assert entry["uuid"] is not None and entry["profile"] is None


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "1g.5gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", "1c.3g.40gb"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb+me", "1g.10gb+me"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 4g.96gb+gfx", "4g.96gb+gfx"),
        ("NVIDIA B200 MIG 2g.45gb+me.all", "2g.45gb+me.all"),
        ("NVIDIA H200", None),
        ("NVIDIA X MIG 1g.5gb\n", None),
        ("", None),
    ],
)
def test_profiles_in_names(name: str, profile: str | None) -> None:
    assert mig.profile(name) == profile

# SPDX-License-Identifier: Apache-2.0
"""A property: the nodes in a plan are the nodes that were asked for, on any number of GPUs, with and without MIG; and
the capability files that stay visible are those of the MIG devices that were asked for."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cdi.host import settings as configuration
from hook import layout, request, selection
from hook.state import Container
from tests import inventories

TARGET = layout.Target("/usr/lib64", "/usr/lib32", "/usr/bin")
ROLES = {"compute": ("uvm", "uvm-tools"), "video": ("uvm", "uvm-tools"), "graphics": ("modeset",)}


def forms(draw: st.DrawFn, gpu: dict[str, Any]) -> str:
    """One of the ways to name a GPU."""
    uuid = str(gpu["uuid"])
    return str(draw(st.sampled_from([str(gpu["index"]), uuid, uuid.lower(), uuid[:13], gpu["bus_id"]])))


def mig_forms(draw: st.DrawFn, gpu: dict[str, Any], entry: dict[str, Any]) -> str:
    """One of the ways to name a MIG device."""
    long = f"MIG-{gpu['uuid']}/{entry['gi']}/{entry['ci']}"
    return str(draw(st.sampled_from([f"{gpu['index']}:{entry['index']}", entry["uuid"], entry["uuid"][:13], long])))


def mig_layout(draw: st.DrawFn, gpu: dict[str, Any]) -> list[dict[str, Any]]:
    """The MIG devices of a GPU: some instances, some of them with several compute instances, in any order."""
    numbers = st.tuples(st.integers(0, 6), st.integers(0, 3))
    pairs = draw(st.lists(numbers, max_size=7, unique=True)) if draw(st.booleans()) else []
    profiles = st.sampled_from(["1g.12gb", "1g.24gb+gfx", None])
    made = [inventories.mig_device(gpu, index, gi, ci) for index, (gi, ci) in enumerate(pairs)]
    return [entry | {"profile": draw(profiles)} for entry in made]


Case = tuple[dict[str, Any], dict[str, str], set[str], set[str]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """An inventory, an environment, the paths of the nodes that it asks for, and of what stays visible in /proc."""
    count = draw(st.integers(0, 16))
    minors = draw(st.permutations(range(count)))
    inventory = inventories.inventory(0)
    inventory["gpus"] = [inventories.gpu(index, minor) for index, minor in enumerate(minors)]
    for gpu in inventory["gpus"]:
        inventory["nodes"].append(inventories.node(gpu["node"], 195, gpu["minor"], "gpu", gpu["bus_id"]))
        render = f"/dev/dri/renderD{128 + gpu['minor']}"
        inventory["nodes"].append(inventories.node(render, 226, 128 + gpu["minor"], "drm", gpu["bus_id"]))
    inventories.with_everything(inventory)
    inventory["mig"] = [entry for gpu in inventory["gpus"] for entry in mig_layout(draw, gpu)]
    capabilities = draw(st.sets(st.sampled_from(["utility", "compute", "video", "graphics"]), min_size=1))

    expected = {"/dev/nvidiactl"}
    named = [node for node in inventory["nodes"] if node["role"] in {r for c in capabilities for r in ROLES.get(c, ())}]
    expected |= {node["path"] for node in named}
    ids: list[str] = []
    asked: list[dict[str, Any]] = []
    chosen: set[str] = set()
    kind = draw(st.sampled_from(["all", "none", "some"])) if count else "none"
    if kind == "all":
        ids = ["all"]
        chosen = {gpu["bus_id"] for gpu in inventory["gpus"]}
        asked = list(inventory["mig"])
    elif kind == "none":
        ids = ["none"]
    else:
        for gpu in draw(st.lists(st.sampled_from(inventory["gpus"]), min_size=1, max_size=20)):
            entries = [entry for entry in inventory["mig"] if entry["gpu"] == gpu["bus_id"]]
            chosen.add(gpu["bus_id"])
            with_mig: bool = draw(st.booleans())
            # Whole, a divided GPU is for who only looks on.
            if entries and (with_mig or capabilities != {"utility"}):
                entry = draw(st.sampled_from(entries))
                ids.append(mig_forms(draw, gpu, entry))
                asked.append(entry)
            else:
                ids.append(forms(draw, gpu))
    drawing = {entry["gpu"] for entry in asked if entry["profile"] == "1g.24gb+gfx"}
    drawing |= chosen - {entry["gpu"] for entry in inventory["mig"]}
    of_role = {"gpu": chosen, "drm": drawing if "graphics" in capabilities else set()}
    per_gpu = [node for node in inventory["nodes"] if node["gpu"] in of_role.get(node["role"], ())]
    expected |= {node["path"] for node in per_gpu}

    env = {"NVIDIA_VISIBLE_DEVICES": ",".join(ids), "NVIDIA_DRIVER_CAPABILITIES": ",".join(sorted(capabilities))}
    access = {path for entry in asked for path in entry["access"]}
    if kind != "some" or not asked:
        for name in draw(st.sets(st.sampled_from(["config", "monitor"]))):
            env[f"NVIDIA_MIG_{name.upper()}_DEVICES"] = "all"
            access = {"/proc/driver/nvidia/capabilities"}
            expected.add(f"/dev/nvidia-caps/nvidia-cap{1 if name == 'config' else 2}")
            asked = [entry for entry in inventory["mig"] if entry["gpu"] in chosen]
    expected |= {node["path"] for entry in asked for node in entry["nodes"]}
    channels = draw(st.sets(st.sampled_from([0, 1, 2, 8, 9, 10, 11])))
    if channels:
        env["NVIDIA_IMEX_CHANNELS"] = ",".join(map(str, channels))
        expected |= {f"/dev/nvidia-caps-imex-channels/channel{number}" for number in channels}
    for variable, name in request.GATES.items():
        if draw(st.booleans()):
            env[variable] = "enabled"
            expected |= {node["path"] for node in inventory["gates"][name]["nodes"]}
    return inventory, env, expected, access


@settings(max_examples=3000, deadline=None)
@given(cases())
def test_the_plan_has_the_nodes_that_were_asked_for(case: Case) -> None:
    inventory, env, expected, access = case
    container = Container("/bundle")
    container.env = env
    container.privileged = True
    wanted = request.decide(container, configuration.DEFAULTS).request
    assert wanted is not None
    chosen = selection.select(inventory, wanted)
    plan = layout.layout(chosen, TARGET)
    found = [node["path"] for node in plan.nodes]
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert len(chosen.access) == len(set(chosen.access))
    assert set(chosen.access) == access

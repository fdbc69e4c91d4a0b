# SPDX-License-Identifier: Apache-2.0
"""A property: the nodes in a plan are the nodes that were asked for, on any number of GPUs, with and without MIG."""

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


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, str], set[str]]:
    """An inventory, an environment, and the paths of the nodes that it asks for."""
    count = draw(st.integers(0, 16))
    minors = draw(st.permutations(range(count)))
    inventory = inventories.inventory(0)
    inventory["gpus"] = [inventories.gpu(index, minor) for index, minor in enumerate(minors)]
    for gpu in inventory["gpus"]:
        inventory["nodes"].append(inventories.node(gpu["node"], 195, gpu["minor"], "gpu", gpu["bus_id"]))
        render = f"/dev/dri/renderD{128 + gpu['minor']}"
        inventory["nodes"].append(inventories.node(render, 226, 128 + gpu["minor"], "drm", gpu["bus_id"]))
    divided = [index for index in range(count) if draw(st.booleans())]
    inventories.with_everything(inventory, tuple(divided))
    capabilities = draw(st.sets(st.sampled_from(["utility", "compute", "video", "graphics"]), min_size=1))

    expected = {"/dev/nvidiactl"}
    named = [node for node in inventory["nodes"] if node["role"] in {r for c in capabilities for r in ROLES.get(c, ())}]
    expected |= {node["path"] for node in named}
    ids: list[str] = []
    chosen: set[str] = set()
    kind = draw(st.sampled_from(["all", "none", "some"])) if count else "none"
    if kind == "all":
        ids = ["all"]
        chosen = {gpu["bus_id"] for gpu in inventory["gpus"]}
        expected |= {node["path"] for entry in inventory["mig"] for node in entry["nodes"]}
    elif kind == "none":
        ids = ["none"]
    else:
        for gpu in draw(st.lists(st.sampled_from(inventory["gpus"]), min_size=1, max_size=20)):
            entries = [entry for entry in inventory["mig"] if entry["gpu"] == gpu["bus_id"]]
            chosen.add(gpu["bus_id"])
            with_mig: bool = draw(st.booleans())
            if entries and with_mig:
                entry = draw(st.sampled_from(entries))
                ids.append(mig_forms(draw, gpu, entry))
                expected |= {node["path"] for node in entry["nodes"]}
            else:
                ids.append(forms(draw, gpu))
    roles = ("gpu", "drm") if "graphics" in capabilities else ("gpu",)
    per_gpu = [node for node in inventory["nodes"] if node["gpu"] in chosen and node["role"] in roles]
    expected |= {node["path"] for node in per_gpu}

    env = {"NVIDIA_VISIBLE_DEVICES": ",".join(ids), "NVIDIA_DRIVER_CAPABILITIES": ",".join(sorted(capabilities))}
    if draw(st.booleans()):
        env["NVIDIA_IMEX_CHANNELS"] = "2,0"
        expected |= {f"/dev/nvidia-caps-imex-channels/channel{number}" for number in (0, 2)}
    for variable, name in request.GATES.items():
        if draw(st.booleans()):
            env[variable] = "enabled"
            expected |= {node["path"] for node in inventory["gates"][name]["nodes"]}
    return inventory, env, expected


@settings(max_examples=3000, deadline=None)
@given(cases())
def test_the_plan_has_the_nodes_that_were_asked_for(case: tuple[dict[str, Any], dict[str, str], set[str]]) -> None:
    inventory, env, expected = case
    container = Container("/bundle")
    container.env = env
    wanted = request.decide(container, configuration.DEFAULTS).request
    assert wanted is not None
    plan = layout.layout(selection.select(inventory, wanted), TARGET)
    found = [node["path"] for node in plan.nodes]
    assert len(found) == len(set(found))
    assert set(found) == expected

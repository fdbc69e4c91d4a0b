# SPDX-License-Identifier: Apache-2.0
"""Requests: every source of one, their precedence, and the reasons that are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi.host import settings
from hook import request
from hook.state import Container
from ldcache.errors import NvhookError

ALL = {"NVIDIA_VISIBLE_DEVICES": "all"}
MOUNTS = {"accept-nvidia-visible-devices-as-volume-mounts": True}
REFUSING = {"accept-nvidia-visible-devices-envvar-when-unprivileged": False}
UNPRIVILEGED = "accept-nvidia-visible-devices-envvar-when-unprivileged is false, and the container is unprivileged"


def container(env: dict[str, str], *mounts: str, privileged: bool = False) -> Container:
    """A container with that environment and a mount of /dev/null at each of these places."""
    made = Container("/bundle")
    made.env = env
    made.privileged = privileged
    made.mounts = [{"source": "/dev/null", "destination": place, "type": "bind"} for place in mounts]
    return made


def decide(env: dict[str, str], *mounts: str, privileged: bool = False, **changed: Any) -> request.Decision:
    """The decision under the defaults but for `settings`."""
    configured = settings.DEFAULTS | changed.get("settings", {})
    return request.decide(container(env, *mounts, privileged=privileged), configured)


def asked(decision: request.Decision) -> request.Request:
    assert decision.request is not None
    return decision.request


def used(decision: request.Decision) -> list[tuple[str, str]]:
    return [(source["source"], source["name"]) for source in decision.sources if source["used"]]


def below(name: str) -> str:
    return f"/var/run/nvidia-container-devices/{name}"


def ids(value: str) -> tuple[str, ...] | None | str:
    """The ids of a value of NVIDIA_VISIBLE_DEVICES; "no request" where there is none."""
    wanted = decide({"NVIDIA_VISIBLE_DEVICES": value}).request
    return "no request" if wanted is None else wanted.ids


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("all", None),
        ("none", ()),
        ("void", "no request"),
        ("", "no request"),
        (" , ,", "no request"),
        ("0", ("0",)),
        ("1,0", ("1", "0")),
        ("0,0,1,0", ("0", "1")),
        (" 0 ,\tGPU-1234 ", ("0", "GPU-1234")),
        ("0,void", "no request"),
        ("0,none,all", ()),
        ("0,all,none", None),
        ("ALL", None),
    ],
)
def test_devices(value: str, expected: object) -> None:
    assert ids(value) == expected


def test_an_unset_variable_asks_for_nothing() -> None:
    assert decide({"NVIDIA_DRIVER_CAPABILITIES": "bogus"}).request is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ("compute", "utility")),
        ("", ("compute", "utility")),
        (" ,", ("compute", "utility")),
        ("utility", ("utility",)),
        ("video, compute,video", ("compute", "video")),
        ("all", request.ALL_CAPABILITIES),
        ("compute,all", request.ALL_CAPABILITIES),
    ],
)
def test_capabilities(value: str | None, expected: tuple[str, ...]) -> None:
    env = ALL if value is None else ALL | {"NVIDIA_DRIVER_CAPABILITIES": value}
    assert asked(decide(env)).capabilities == expected


def test_an_unknown_capability_is_named_with_the_known_ones() -> None:
    env = ALL | {"NVIDIA_DRIVER_CAPABILITIES": "compute,bogus,none"}
    with pytest.raises(NvhookError) as caught:
        decide(env)
    assert caught.value.what == "unknown driver capabilities in NVIDIA_DRIVER_CAPABILITIES: bogus, none"
    assert "compat32, compute, display, graphics, ngx, utility, video" in caught.value.remedy
    decision = decide(env, settings={"compat.unknown-capability": "warn"})
    assert asked(decision).capabilities == ("compute",)
    assert decision.warnings == ["unknown driver capabilities in NVIDIA_DRIVER_CAPABILITIES: bogus, none: ignored"]


def test_the_ceiling_of_capabilities() -> None:
    low = {"supported-driver-capabilities": ["utility"]}
    assert asked(decide(ALL, settings=low)).capabilities == ("utility",)
    assert asked(decide(ALL | {"NVIDIA_DRIVER_CAPABILITIES": "all"}, settings=low)).capabilities == ("utility",)
    with pytest.raises(NvhookError, match="the configuration does not allow: compute"):
        decide(ALL | {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}, settings=low)


def test_all_capabilities_by_configuration() -> None:
    wanted = asked(decide(ALL | {"NVIDIA_DRIVER_CAPABILITIES": "utility"}, settings={"compat.capabilities": "all"}))
    assert wanted.capabilities == request.ALL_CAPABILITIES
    assert "display" not in wanted.required


# --- mounts


def test_mounts_come_before_the_environment() -> None:
    decision = decide({"NVIDIA_VISIBLE_DEVICES": "1"}, below("0"), below("GPU-1234/"), below("0"), settings=MOUNTS)
    assert asked(decision).ids == ("0", "GPU-1234")
    assert ("environment", "NVIDIA_VISIBLE_DEVICES") not in used(decision)
    assert decision.sources[-1]["reason"] == "comes after volume mounts"


@pytest.mark.parametrize(
    ("destination", "expected"),
    [
        ("/var/run/nvidia-container-devices/0", "0"),
        ("//var/./run/x/../nvidia-container-devices//0/", "0"),
        ("/var/run/nvidia-container-devices", ""),
        ("/var/run/nvidia-container-devices/", ""),
        ("/var/run/nvidia-container-devicesX/0", ""),
        ("/var/run/nvidia-container-devices/../0", ""),
        ("/run/nvidia-container-devices/0", ""),
        ("/var/run/nvidia-container-devices/cdi/nvidia.com/gpu/0", "cdi/nvidia.com/gpu/0"),
        (7, ""),
        (None, ""),
    ],
)
def test_where_a_mount_asks_for_a_device(destination: object, expected: str) -> None:
    assert request.device_mount({"source": "/dev/null", "destination": destination}) == expected


@pytest.mark.parametrize("source", ["/dev/zero", "/dev/null/", "/dev//null", "dev/null", None])
def test_only_mounts_of_dev_null_ask(source: object) -> None:
    assert request.device_mount({"source": source, "destination": below("0")}) == ""


def test_mounts_that_the_configuration_does_not_accept() -> None:
    decision = decide({}, below("all"))
    assert decision.request is None
    assert decision.sources[0]["reason"] == "accept-nvidia-visible-devices-as-volume-mounts is false"
    assert asked(decide({"NVIDIA_VISIBLE_DEVICES": "1"}, below("0"))).ids == ("1",)


def test_mounts_of_cdi_names() -> None:
    decision = decide({}, below("cdi/nvidia.com/gpu/0"), below("cdi/nvidia.com/gpu=1"), settings=MOUNTS)
    assert asked(decision).ids == ("0", "1")
    decision = decide({}, below("cdi/what"), below("1"), settings=MOUNTS)
    assert asked(decision).ids == ("1",)
    assert len(decision.warnings) == 1
    with pytest.raises(NvhookError, match="other.com/nic=0 is no GPU that a hook can give"):
        decide({}, below("cdi/other.com/nic/0"), settings=MOUNTS)


def test_mounts_of_imex_channels_are_no_devices() -> None:
    env = {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_IMEX_CHANNELS": "7"}
    wanted = asked(decide(env, below("imex/3"), below("imex/1"), settings=MOUNTS))
    assert (wanted.ids, wanted.imex) == (("0",), (1, 3))
    assert decide({}, below("imex/3"), settings=MOUNTS).request is None


# --- swarm resources


def test_swarm_resources_come_before_the_environment() -> None:
    swarm = {"swarm-resource": ["RESOURCE_A", "RESOURCE_B"]}
    env = {"NVIDIA_VISIBLE_DEVICES": "all", "RESOURCE_B": "1", "RESOURCE_A": "0, GPU-x"}
    decision = decide(env, settings=swarm)
    assert asked(decision).ids == ("0", "GPU-x", "1")
    assert used(decision) == [("swarm resource", "RESOURCE_A"), ("swarm resource", "RESOURCE_B")]
    # An empty one is there all the same.
    assert decide(ALL | {"RESOURCE_A": ""}, settings=swarm).request is None
    assert asked(decide(ALL, settings=swarm)).ids is None


# --- legacy images


def test_a_legacy_image_asks_for_everything() -> None:
    decision = decide({"CUDA_VERSION": "9.0.176"})
    wanted = asked(decision)
    assert decision.legacy_image and wanted.ids is None
    assert wanted.capabilities == request.ALL_CAPABILITIES and "display" not in wanted.required
    assert wanted.requirements == [("CUDA_VERSION", "cuda>=9.0")]
    assert used(decision)[0] == ("legacy image", "CUDA_VERSION")


def test_what_makes_an_image_legacy() -> None:
    assert decide({"CUDA_VERSION": "12.4.1", "NVIDIA_REQUIRE_CUDA": "cuda>=12.4"}).request is None
    assert decide({"CUDA_VERSION": ""}).request is None
    assert asked(decide({"CUDA_VERSION": "9", "NVIDIA_REQUIRE_CUDA": ""})).ids is None
    assert decide({"CUDA_VERSION": "9", "NVIDIA_VISIBLE_DEVICES": ""}).request is None
    assert asked(decide({"CUDA_VERSION": "9", "NVIDIA_VISIBLE_DEVICES": "none"})).ids == ()
    # Set to nothing, the capabilities are the ordinary ones.
    env = {"CUDA_VERSION": "9", "NVIDIA_DRIVER_CAPABILITIES": ""}
    assert asked(decide(env)).capabilities == ("compute", "utility")


# --- privilege


@pytest.mark.parametrize("env", [ALL, {"CUDA_VERSION": "9.0"}, {"NVIDIA_VISIBLE_DEVICES": "none"}])
def test_the_environment_of_unprivileged_containers(env: dict[str, str]) -> None:
    decision = decide(env, settings=REFUSING)
    assert decision.request is None and used(decision) == []
    assert decision.sources[0]["reason"] == UNPRIVILEGED
    (warning,) = decision.warnings
    assert "unprivileged container" in warning
    assert decide(env, privileged=True, settings=REFUSING).request is not None


def test_void_is_refused_without_a_warning() -> None:
    for value in ("void", ""):
        assert decide({"NVIDIA_VISIBLE_DEVICES": value}, settings=REFUSING).warnings == []


def test_mounts_of_unprivileged_containers_are_believed() -> None:
    decision = decide(ALL | {"NVIDIA_IMEX_CHANNELS": "1"}, below("0"), settings=REFUSING | MOUNTS)
    assert asked(decision).ids == ("0",)
    assert asked(decision).imex == ()
    assert decision.warnings == []


def test_swarm_resources_of_unprivileged_containers() -> None:
    assert decide({"RESOURCE": "0"}, settings=REFUSING | {"swarm-resource": ["RESOURCE"]}).request is None


# --- MIG, IMEX, gates


@pytest.mark.parametrize("name", ["CONFIG", "MONITOR"])
def test_managing_mig_needs_privileges(name: str) -> None:
    variable = f"NVIDIA_MIG_{name}_DEVICES"
    env = ALL | {variable: "all"}
    assert asked(decide(env, privileged=True)).mig_control == (name.lower(),)
    with pytest.raises(NvhookError, match=f"{variable} is set in a container without CAP_SYS_ADMIN"):
        decide(env)
    with pytest.raises(NvhookError, match="is 0,1, which is not supported"):
        decide(env | {variable: "0,1"}, privileged=True)
    for single in ("MIG-1234", "0:0"):
        with pytest.raises(NvhookError, match="asks for single MIG devices"):
            decide(env | {"NVIDIA_VISIBLE_DEVICES": single}, privileged=True)
    assert asked(decide(ALL | {variable: ""})).mig_control == ()


@pytest.mark.parametrize(
    ("value", "expected"), [("", ()), ("none", ()), ("void", ()), ("1, 0,1", (0, 1)), ("1048575", (1048575,))]
)
def test_imex_channels(value: str, expected: tuple[int, ...]) -> None:
    assert asked(decide(ALL | {"NVIDIA_IMEX_CHANNELS": value})).imex == expected


@pytest.mark.parametrize("value", ["0,5-7", "bogus", "-1", "1048576", "\u0661"])
def test_what_is_no_imex_channel(value: str) -> None:
    with pytest.raises(NvhookError, match="is no IMEX channel"):
        decide(ALL | {"NVIDIA_IMEX_CHANNELS": value})


def test_imex_requests_that_are_ignored() -> None:
    decision = decide(ALL | {"NVIDIA_IMEX_CHANNELS": "all"})
    assert asked(decision).imex == () and "NVIDIA_IMEX_CHANNELS=all is ignored" in decision.warnings[0]
    ignoring = {"features.ignore-imex-channel-requests": True}
    env = ALL | {"NVIDIA_IMEX_CHANNELS": "bogus"}
    assert asked(decide(env, below("imex/x"), settings=ignoring | MOUNTS)).imex == ()
    assert decide({"NVIDIA_IMEX_CHANNELS": "0"}).request is None


def test_gates() -> None:
    env = {"NVIDIA_GDS": "enabled", "NVIDIA_MOFED": "enabled", "NVIDIA_GDRCOPY": "true", "NVIDIA_NVSWITCH": "enabled"}
    assert asked(decide(ALL | env)).gates == ("gds", "mofed", "nvswitch")
    assert decide(env).request is None


# --- requirements


def test_requirements() -> None:
    env = ALL | {
        "NVIDIA_REQUIRE_CUDA": "cuda>=12.4",
        "NVIDIA_REQUIRE_ARCH": "arch>=7.0",
        "NVIDIA_REQUIRE_JETPACK": "csv-mounts=all",
        "NVIDIA_REQUIRE_JETPACK_HOST_MOUNTS": "x",
    }
    expected = [("NVIDIA_REQUIRE_ARCH", "arch>=7.0"), ("NVIDIA_REQUIRE_CUDA", "cuda>=12.4")]
    assert asked(decide(env)).requirements == expected
    assert asked(decide(env)).image_cuda == "12.4"


@pytest.mark.parametrize("value", ["1", "t", "T", "TRUE", "true", "True"])
def test_requirements_turned_off_by_the_image(value: str) -> None:
    env = ALL | {"NVIDIA_REQUIRE_CUDA": "cuda>=99", "NVIDIA_DISABLE_REQUIRE": value}
    assert asked(decide(env)).requirements == []


@pytest.mark.parametrize("value", ["", "0", "f", "yes", "tRUE"])
def test_what_does_not_turn_them_off(value: str) -> None:
    env = ALL | {"NVIDIA_REQUIRE_CUDA": "cuda>=99", "NVIDIA_DISABLE_REQUIRE": value}
    assert len(asked(decide(env)).requirements) == 1


@pytest.mark.parametrize("off", [{"disable-require": True}, {"compat.requirements": "off"}])
def test_requirements_turned_off_by_the_configuration(off: dict[str, Any]) -> None:
    assert asked(decide(ALL | {"NVIDIA_REQUIRE_CUDA": "cuda>=99"}, settings=off)).requirements == []


# --- whether anything may be asked for


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, False),
        (ALL, True),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, False),
        ({"NVIDIA_VISIBLE_DEVICES": " ,"}, False),
        ({"CUDA_VERSION": "12.4"}, True),
        ({"CUDA_VERSION": "12.4", "NVIDIA_REQUIRE_CUDA": "cuda>=12.4"}, False),
        ({"CUDA_VERSION": "12.4", "NVIDIA_VISIBLE_DEVICES": "void"}, False),
        ({"DOCKER_RESOURCE_GPU": "0"}, False),
    ],
)
def test_what_may_ask(env: dict[str, str], expected: bool, tmp_path: Path) -> None:
    assert request.possible(container(env), str(tmp_path)) is expected
    assert request.possible(container(env, below("0")), str(tmp_path)) is True


@pytest.mark.parametrize("name", [settings.OURS, settings.NVIDIAS])
def test_swarm_resources_may_ask(name: str, tmp_path: Path) -> None:
    file = tmp_path / name[1:]
    file.parent.mkdir(parents=True)
    here = container({"DOCKER_RESOURCE_GPU": "0", "PATH": "/bin"})
    for text, expected in (
        ('swarm-resource = "A,DOCKER_RESOURCE_GPU"', True),
        ('#swarm-resource = "DOCKER_RESOURCE_GPU"', False),
        ('swarm-resource = "DOCKER_RESOURCE_GPUS"', False),
        ('  "swarm-resource"="DOCKER_RESOURCE_GPU, B"', True),
    ):
        file.write_text(f"disable-require = false\n{text}\n")
        assert request.possible(here, str(tmp_path)) is expected, text


def test_annotations_are_reported() -> None:
    here = container(ALL)
    here.annotations = {"cdi.k8s.io/x": "nvidia.com/gpu=0", "other": "y"}
    decision = request.decide(here, settings.DEFAULTS)
    assert [(item["name"], item["used"]) for item in decision.sources if item["source"] == "annotation"] == [
        ("cdi.k8s.io/x", False)
    ]
    assert asked(decision).ids is None


def test_a_hostile_value_is_shown_on_one_line() -> None:
    with pytest.raises(NvhookError) as caught:
        decide({"NVIDIA_VISIBLE_DEVICES": "a\nb\x1b[31m=" + "c" * 5000})
    assert caught.value.what.isprintable() and len(caught.value.what) < 400


WORDS = st.text(alphabet="0179gGPUMIG-/:=.,; allnonevoidcudimex\x00\x1b\u0661", max_size=12)
VARIABLES = st.sampled_from(
    [
        request.DEVICES,
        request.CAPABILITIES,
        request.IMEX,
        request.MIG_CONFIG,
        request.CUDA_VERSION,
        request.REQUIRE_CUDA,
        *request.GATES,
        "RESOURCE",
    ]
)


@given(st.dictionaries(VARIABLES, WORDS), st.lists(WORDS, max_size=3), st.booleans(), st.booleans(), st.booleans())
def test_any_container_has_a_decision_or_an_error(
    env: dict[str, str], mounts: list[str], privileged: bool, believed: bool, accepted: bool
) -> None:
    configured = {
        "accept-nvidia-visible-devices-envvar-when-unprivileged": believed,
        "accept-nvidia-visible-devices-as-volume-mounts": accepted,
        "swarm-resource": ["RESOURCE"],
    }
    places = [below(word) for word in mounts]
    try:
        decision = decide(env, *places, privileged=privileged, settings=configured)
    except NvhookError as error:
        assert error.what.isprintable()
        return
    assert all(source["reason"] for source in decision.sources)
    assert all(text.isprintable() for text in decision.warnings)
    if decision.request is not None:
        assert request.possible(container({"RESOURCE": ""} | env, *places), "/") or "RESOURCE" in env
        assert privileged or believed or (accepted and mounts)

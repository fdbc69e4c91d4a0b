# SPDX-License-Identifier: Apache-2.0
"""What a container asks for, and why that was decided: environment, volume mounts, annotations, configuration.

Hot. The variables and their meaning are those that images for NVIDIA's hook carry; docs/configuration.md has the
precedence. `possible` says whether anything can be asked for at all, before the configuration is known; `decide`
decides.
"""

from __future__ import annotations

from cdi.host import settings as configuration
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hook.cdifiles import Files
    from hook.state import Container

DEVICES = "NVIDIA_VISIBLE_DEVICES"
CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
IMEX = "NVIDIA_IMEX_CHANNELS"
MIG_CONFIG = "NVIDIA_MIG_CONFIG_DEVICES"
MIG_MONITOR = "NVIDIA_MIG_MONITOR_DEVICES"
REQUIRE = "NVIDIA_REQUIRE_"
# Of images for Jetson boards; what they ask for is no property of a driver.
NO_REQUIREMENT = "NVIDIA_REQUIRE_JETPACK"
REQUIRE_CUDA = "NVIDIA_REQUIRE_CUDA"
DISABLE_REQUIRE = "NVIDIA_DISABLE_REQUIRE"
CUDA_VERSION = "CUDA_VERSION"

MOUNTS = "/var/run/nvidia-container-devices"
ANNOTATIONS = "cdi.k8s.io/"
# CDI names of these kinds are GPUs of this host, which need no CDI file.
OUR_KINDS = ("nvidia.com/gpu", "runtime.nvidia.com/gpu")
# Never looked for in files, whatever they define.
AUTOMATIC = "runtime.nvidia.com/gpu"

# The annotation that the runtime shim leaves: what it has edited once is done.
DONE = "nvhook.request"

ALL_CAPABILITIES = configuration.CAPABILITIES
DEFAULT_CAPABILITIES = ("compute", "utility")

# The variable of each gate and its name in an inventory. Only this very value opens it.
GATES = {"NVIDIA_GDRCOPY": "gdrcopy", "NVIDIA_GDS": "gds", "NVIDIA_MOFED": "mofed", "NVIDIA_NVSWITCH": "nvswitch"}
ENABLED = "enabled"
# What has a CDI file of its own, and the mode of `cdi generate` that makes it.
MODES = {IMEX: "imex", **GATES, MIG_CONFIG: "management", MIG_MONITOR: "management"}

IMEX_MAX = 1 << 20
UNPRIVILEGED = "accept-nvidia-visible-devices-envvar-when-unprivileged is false, and the container is unprivileged"
SHOWN_MAX = 200

# As Go's strconv.ParseBool; any other text is false.
TRUE = ("1", "t", "T", "TRUE", "true", "True")


class Request:
    """GPUs and capabilities. `ids` is None for all GPUs; empty for the driver's files without a GPU.

    `required` are the capabilities that must work or the start fails. `all` does not ask for a display on a
    host that has none: images say `all` and mean what there is. `imex` are channel numbers; `gates` names of
    an inventory's gates; `mig_control` is some of `config` and `monitor`; `requirements` are pairs of a
    variable's name and an expression, and `image_cuda` the CUDA version that the image is built for, or "".
    """

    __slots__ = (
        "capabilities",
        "gates",
        "ids",
        "image_cuda",
        "imex",
        "mig_control",
        "required",
        "requirements",
    )

    def __init__(
        self, ids: tuple[str, ...] | None, capabilities: tuple[str, ...], required: tuple[str, ...] | None = None
    ) -> None:
        self.ids = ids
        self.capabilities = capabilities
        self.required = capabilities if required is None else required
        self.imex: tuple[int, ...] = ()
        self.gates: tuple[str, ...] = ()
        self.mig_control: tuple[str, ...] = ()
        self.requirements: list[tuple[str, str]] = []
        self.image_cuda = ""

    def to_json(self) -> dict[str, Any]:
        """As `nvhook plan` prints it; what is seldom asked for only where it is."""
        devices = "all" if self.ids is None else list(self.ids)
        seldom = {"imex_channels": self.imex, "gates": self.gates, "mig": self.mig_control}
        more = {name: list(value) for name, value in seldom.items() if value}
        return {"devices": devices, "capabilities": list(self.capabilities), **more}


class Decision:
    """How a container's request came about. `request` is None where no GPU is asked for; `configuration` is the file
    that was obeyed, or None. `cdi` are the CDI devices that go through files, which only the runtime shim reads.

    `sources` has one entry for each place that says something: `source`, `name`, `value`, `used` and the `reason`.
    """

    __slots__ = ("cdi", "configuration", "legacy_image", "privileged", "request", "sources", "warnings")

    def __init__(self, privileged: bool, legacy_image: bool) -> None:
        self.cdi: list[str] = []
        self.configuration: str | None = None
        self.privileged = privileged
        self.legacy_image = legacy_image
        self.request: Request | None = None
        self.sources: list[dict[str, Any]] = []
        self.warnings: list[str] = []

    def saw(self, source: str, name: str, value: str, used: bool, reason: str) -> None:
        """One place that says something."""
        entry = {"source": source, "name": name, "value": value, "used": used, "reason": reason}
        self.sources.append(entry)

    def to_json(self) -> dict[str, Any]:
        """As `nvhook plan` prints it."""
        return {
            "configuration": self.configuration,
            "privileged": self.privileged,
            "legacy_image": self.legacy_image,
            "sources": self.sources,
        }


def possible(container: Container, host_root: str = "/") -> bool:
    """Whether the container may ask for a GPU, under whatever configuration. Opens a configuration file only where
    nothing else says yes, for the names of swarm resources."""
    env = container.env
    items = split(env.get(DEVICES, ""))
    if items and "void" not in items:
        return True
    if DEVICES not in env and is_legacy(env):
        return True
    if any(device_mount(mount) for mount in container.mounts):
        return True
    return configuration.names_swarm_resource(host_root, env)


def names_cdi(annotations: dict[str, str]) -> bool:
    """Whether an annotation may ask for CDI devices, by the usual prefix or by what it says."""
    for name, value in annotations.items():
        if name.startswith(ANNOTATIONS):
            return True
        kind, equals, _ = value.partition("=")
        if equals and kind.count("/") == 1 and not set(kind) & set(' "{[,:'):
            return True
    return False


def is_legacy(env: dict[str, str]) -> bool:
    """Whether the image is of the time before NVIDIA_REQUIRE_CUDA, when every CUDA image meant all GPUs."""
    return bool(env.get(CUDA_VERSION)) and not env.get(REQUIRE_CUDA)


def decide(container: Container, settings: dict[str, Any], files: Files | None = None) -> Decision:
    """Weigh all sources. `files` are the host's CDI files, for whoever can give devices of them. Raises NvhookError for
    what is asked for and can't be meant or is not allowed."""
    env = container.env
    decision = Decision(container.privileged, is_legacy(env))
    believed = container.privileged or settings["accept-nvidia-visible-devices-envvar-when-unprivileged"]
    annotated = _annotations(container, decision, files)
    first = "comes after annotations" if annotated else ""
    mounted = _mounted(container, settings, decision, first)
    from_mounts = [value for kind, value in mounted if kind != "imex"]
    first = first or ("comes after volume mounts" if from_mounts else "")
    from_env = _from_environment(decision, env, settings, believed, first)
    asked = annotated or from_mounts or from_env
    if "void" in asked:
        asked = []
    if files is not None:
        asked = _without_files(decision, files, asked)
    if not asked:
        _unused(decision, env, believed)
        return decision
    capabilities, required = _capabilities(decision, env, settings)
    wanted = Request(_ids(asked), capabilities, required)
    wanted.imex = _imex(decision, env, settings, believed, mounted)
    wanted.gates = tuple(name for variable, name in GATES.items() if _gate(decision, env, variable))
    wanted.mig_control = _mig_control(decision, container, wanted)
    wanted.image_cuda = _image_cuda(env)
    wanted.requirements = requirements(decision, env, settings)
    decision.request = wanted
    return decision


def split(text: str) -> list[str]:
    """Items between commas, blanks around them dropped, empty ones too."""
    return [item for part in text.split(",") if (item := part.strip())]


def device_mount(mount: dict[str, Any]) -> str:
    """What a mount of config.json asks for: the part of its destination below MOUNTS; "" where it is none.

    It stands for itself by mounting nothing: its source is /dev/null. Who may add such mounts is the engine's
    business, which is why they can be believed where an environment can't.
    """
    destination = mount.get("destination")
    if mount.get("source") != "/dev/null" or not isinstance(destination, str):
        return ""
    parts: list[str] = []
    for part in destination.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    place = MOUNTS.strip("/").split("/")
    return "/".join(parts[len(place) :]) if parts[: len(place)] == place else ""


def _mounted(container: Container, settings: dict[str, Any], decision: Decision, first: str) -> list[tuple[str, str]]:
    """Kind (`device`, `imex`, `cdi`) and value of each mount that is accepted, once each; of devices none if something
    comes `first`."""
    accepted = settings["accept-nvidia-visible-devices-as-volume-mounts"]
    found: list[tuple[str, str]] = []
    for mount in container.mounts:
        name = device_mount(mount)
        if not name:
            continue
        if not accepted:
            reason = "accept-nvidia-visible-devices-as-volume-mounts is false"
            decision.saw("volume mount", mount["destination"], name, False, reason)
            continue
        kind, _, rest = name.partition("/")
        item = (kind, rest) if kind in ("cdi", "imex") and rest else ("device", name)
        if item[0] == "cdi":
            item = ("cdi", cdi_name(rest))
            if not item[1]:
                decision.saw("volume mount", mount["destination"], name, False, "is no CDI name")
                decision.warnings.append(f"the mount {_shown(mount['destination'])} names no CDI device")
                continue
        late = first if item[0] != "imex" else ""
        reason = late or "volume mounts come before the environment"
        decision.saw("volume mount", mount["destination"], item[1], not late, reason)
        if not late and item not in found:
            found.append(item)
    return found


def cdi_name(text: str) -> str:
    """`vendor/class/device` or `vendor/class=device` as the latter; "" for anything else."""
    kind, equals, device = text.partition("=")
    if not equals:
        kind, _, device = text.rpartition("/")
    vendor, slash, name = kind.partition("/")
    return f"{kind}={device}" if vendor and slash and name and device and "/" not in name + device else ""


def _from_environment(
    decision: Decision, env: dict[str, str], settings: dict[str, Any], believed: bool, first: str
) -> list[str]:
    """Ids by the environment: of the swarm resources if there are any, else of NVIDIA_VISIBLE_DEVICES, else `all`
    for a legacy image. None of them where something comes `first`, or the environment isn't believed."""
    swarm = [name for name in settings["swarm-resource"] if name in env]
    names = swarm or ([DEVICES] if DEVICES in env else [])
    items = [item for name in names for item in split(env[name])]
    implied = not names and decision.legacy_image
    if implied:
        items = ["all"]
    refused = bool(items) and "void" not in items and not believed and not first
    why = first or ("" if believed else UNPRIVILEGED)
    for name in names:
        used = why or ("swarm resources come before NVIDIA_VISIBLE_DEVICES" if swarm else "names the devices")
        decision.saw("swarm resource" if swarm else "environment", name, env[name], not why, used)
    if swarm and DEVICES in env and DEVICES not in swarm:
        decision.saw("environment", DEVICES, env[DEVICES], False, "comes after swarm resources")
    if implied:
        used = why or "CUDA_VERSION without NVIDIA_REQUIRE_CUDA means all GPUs"
        decision.saw("legacy image", CUDA_VERSION, env[CUDA_VERSION], not why, used)
    if refused:
        asked = _shown(",".join(items))
        decision.warnings.append(f"devices asked for by the environment of an unprivileged container: {asked}: ignored")
    return [] if why else items


def _annotations(container: Container, decision: Decision, files: Files | None) -> list[str]:
    """The CDI names of annotations, where there is anybody to give them."""
    prefixes = (ANNOTATIONS,) if files is None else files.prefixes
    reason = "annotations come before mounts and environment"
    if files is None:
        reason = "only the engine or the runtime can give CDI devices of annotations"
    for name in sorted(container.annotations):
        if name.startswith(prefixes):
            decision.saw("annotation", name, container.annotations[name], files is not None, reason)
    return [] if files is None else files.annotated(container.annotations)


def _without_files(decision: Decision, files: Files, items: list[str]) -> list[str]:
    """What is left for the inventory: ids, and names of our kinds that no file defines."""
    if files.kind:
        items = [item if "=" in item else f"{files.kind}={item}" for item in items]
    named = [item for item in items if "=" in item and not item.startswith(f"{AUTOMATIC}=")]
    defined = files.defined(named)
    for item in dict.fromkeys(named):
        if item in defined or files.kind or item.partition("=")[0] not in OUR_KINDS:
            decision.cdi.append(item)
    return [item for item in items if item not in decision.cdi]


def _ids(items: list[str]) -> tuple[str, ...] | None:
    ids = [_device(item) for item in items]
    for item in ids:
        # As libnvidia-container reads it, in any case.
        if item.lower() == "all":
            return None
        if item == "none":
            return ()
    return tuple(dict.fromkeys(ids))


def _device(item: str) -> str:
    """An id; of a CDI name of our kinds its device's."""
    kind, equals, device = item.partition("=")
    if not equals:
        return item
    if kind in OUR_KINDS and device:
        return device
    what = f"{_shown(item)} is no GPU that a hook can give: it is another kind of CDI device"
    raise NvhookError(what, "ask the engine for it: docker, podman: --device; Kubernetes: an annotation of the plugin")


def _capabilities(
    decision: Decision, env: dict[str, str], settings: dict[str, Any]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Sorted capability names, and those of them that must work."""
    allowed = tuple(settings["supported-driver-capabilities"])
    named, unknown = read_capabilities(env)
    if unknown:
        names = _shown(", ".join(unknown))
        what = f"unknown driver capabilities in {CAPABILITIES}: {names}"
        if settings["compat.unknown-capability"] != "warn":
            raise NvhookError(what, f"use `all` or some of {', '.join(ALL_CAPABILITIES)}")
        decision.warnings.append(f"{what}: ignored")
    everything = settings["compat.capabilities"] == "all"
    if CAPABILITIES in env:
        reason = "compat.capabilities is all" if everything else "names the capabilities"
        decision.saw("environment", CAPABILITIES, env[CAPABILITIES], not everything, reason)
    if everything or "all" in named or (CAPABILITIES not in env and decision.legacy_image):
        return allowed, tuple(name for name in allowed if name != "display" or name in named)
    if not named:
        default = tuple(name for name in DEFAULT_CAPABILITIES if name in allowed)
        return default, default
    refused = [name for name in named if name not in allowed]
    if refused:
        what = f"driver capabilities that the configuration does not allow: {', '.join(refused)}"
        permitted = ", ".join(allowed) or "none"
        raise NvhookError(what, f"supported-driver-capabilities allows {permitted}; ask for less, or let it allow more")
    return named, named


def read_capabilities(env: dict[str, str]) -> tuple[tuple[str, ...], list[str]]:
    """The known names in NVIDIA_DRIVER_CAPABILITIES, sorted, `all` among them; and the unknown ones."""
    items = split(env.get(CAPABILITIES, ""))
    known = {item for item in items if item in ALL_CAPABILITIES or item == "all"}
    return tuple(sorted(known)), [item for item in items if item not in known]


def _imex(
    decision: Decision,
    env: dict[str, str],
    settings: dict[str, Any],
    believed: bool,
    mounted: list[tuple[str, str]],
) -> tuple[int, ...]:
    mounts = [value for kind, value in mounted if kind == "imex"]
    ignored = settings["features.ignore-imex-channel-requests"]
    reason = "features.ignore-imex-channel-requests is true" if ignored else ""
    if not reason and mounts:
        reason = "comes after volume mounts"
    if not reason and not believed:
        reason = UNPRIVILEGED
    items = split(env.get(IMEX, ""))
    if {"void", "none"} & set(items):
        items = []
    if "all" in items and not reason:
        reason = "all is ignored: name the channels"
        decision.warnings.append(f"{IMEX}=all is ignored: name the channels")
    if IMEX in env:
        decision.saw("environment", IMEX, env[IMEX], not reason, reason or "names IMEX channels")
    if ignored:
        return ()
    if not mounts and not reason:
        mounts = items
    return tuple(sorted({_channel(item) for item in mounts}))


def _channel(item: str) -> int:
    if item.isascii() and item.isdigit() and len(item) < 8 and int(item) < IMEX_MAX:
        return int(item)
    raise NvhookError(f"{_shown(item)} is no IMEX channel", f"name channels from 0 to {IMEX_MAX - 1}, commas between")


def _gate(decision: Decision, env: dict[str, str], variable: str) -> bool:
    if variable not in env:
        return False
    opened = env[variable] == ENABLED
    decision.saw("environment", variable, env[variable], opened, "is enabled" if opened else "is not `enabled`")
    return opened


def _mig_control(decision: Decision, container: Container, wanted: Request) -> tuple[str, ...]:
    """Managing MIG, or watching all of it, reaches beyond a container's own GPUs: privileged ones only."""
    granted = []
    for variable, name in ((MIG_CONFIG, "config"), (MIG_MONITOR, "monitor")):
        value = container.env.get(variable, "")
        if not value:
            continue
        if not container.privileged:
            what = f"{variable} is set in a container without CAP_SYS_ADMIN"
            raise NvhookError(what, "run the container privileged, or take the variable away")
        if value != "all":
            raise NvhookError(f"{variable} is {_shown(value)}, which is not supported", "set it to `all`")
        if any(item.upper().startswith("MIG-") or item.count(":") == 1 for item in wanted.ids or ()):
            what = f"{variable} is set for a container that asks for single MIG devices"
            raise NvhookError(what, "ask for whole GPUs, or take the variable away")
        decision.saw("environment", variable, value, True, "the container is privileged")
        granted.append(name)
    return tuple(granted)


def _unused(decision: Decision, env: dict[str, str], believed: bool) -> None:
    """What asks for more than GPUs, where the inventory gives none. A CDI file has what it has, and that is told of
    what a container would miss."""
    reason = "the devices are those of CDI files" if decision.cdi else "no GPU is asked for"
    for name in (CAPABILITIES, *MODES):
        value = env.get(name, "")
        if not value:
            continue
        decision.saw("environment", name, value, False, reason)
        obeyed = believed if name == IMEX else value == ENABLED or name not in GATES
        if decision.cdi and name in MODES and obeyed and value not in ("void", "none"):
            asked = f"{name}={_shown(value)} is not obeyed: {reason}"
            decision.warnings.append(f"{asked}; ask for a device of `cdi generate --mode {MODES[name]}`")


def _image_cuda(env: dict[str, str]) -> str:
    """The CUDA version that the image says it is built for, `12.4`; "" where it says none."""
    version = _two_parts(env.get(CUDA_VERSION, ""))
    if version:
        return version
    for alternative in env.get(REQUIRE_CUDA, "").split():
        for term in alternative.split(","):
            if term.lower().startswith("cuda>="):
                return _two_parts(term[6:])
    return ""


def _two_parts(text: str) -> str:
    """Major and minor of a version; a lone major stands for .0; "" where it is none."""
    parts = text.strip().split("-")[0].split(".")
    major, minor = parts[0], parts[1] if len(parts) > 1 else "0"
    if all(part.isascii() and part.isdigit() and len(part) < 6 for part in (major, minor)):
        return f"{int(major)}.{int(minor)}"
    return ""


def requirements(decision: Decision, env: dict[str, str], settings: dict[str, Any]) -> list[tuple[str, str]]:
    """Variables' names and expressions that are to be checked; none where they are turned off."""
    names = sorted(name for name in env if name.startswith(REQUIRE) and not name.startswith(NO_REQUIREMENT))
    found = [(name, env[name]) for name in names]
    if decision.legacy_image:
        found.append((CUDA_VERSION, f"cuda>={_two_parts(env[CUDA_VERSION]) or env[CUDA_VERSION]}"))
    reason = ""
    if settings["disable-require"] or settings["compat.requirements"] == "off":
        reason = "the configuration turns requirements off"
    elif env.get(DISABLE_REQUIRE, "") in TRUE:
        reason = "NVIDIA_DISABLE_REQUIRE is set"
    for name, expression in found:
        decision.saw("requirement", name, expression, not reason, reason or "is checked against the host")
    return [] if reason else found


def _shown(text: str) -> str:
    """A container's text in a line of ours: escaped, and cut."""
    return ascii(text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 3] + "...")[1:-1]

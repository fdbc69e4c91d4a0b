# SPDX-License-Identifier: Apache-2.0
"""The configuration files: read, judged, and turned into what `cdi.host.settings` gives to hot code.

`/etc/nvhook/config.toml` is ours. Where it is absent, NVIDIA's `/etc/nvidia-container-runtime/config.toml` is obeyed,
key by key; docs/configuration.md has both. A value of the wrong kind is an error: some keys decide what a container
may ask for, and a guess would be somebody's hole. A key that is not known is a warning with the likeliest name.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cdi.host import settings
from ldcache import root
from ldcache.errors import NvhookError

if sys.version_info >= (3, 11):
    import tomllib  # novm
else:
    import tomli as tomllib

Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Instead:
    """What a value that means nothing is taken for, and the end of a warning that says so."""

    value: Any
    text: str


@dataclass(frozen=True, slots=True)
class Key:
    """A key of our file: what it means, in a line, and how its value is read. ValueError says what it must be."""

    text: str
    convert: Convert


def boolean(value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def string(value: Any) -> str:
    """Any string."""
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


def strings(value: Any) -> list[str]:
    """A list of strings."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("a list of strings")
    return list(value)


def names(value: Any) -> list[str]:
    """Names between commas in a string, as NVIDIA's file has them, or a list of strings."""
    items = strings(value) if isinstance(value, list) else string(value).split(",")
    return [item.strip() for item in items if item.strip()]


def capabilities(value: Any) -> list[str]:
    """Driver capabilities between commas, sorted; `all` for all."""
    items = names(value)
    unknown = [item for item in items if item not in (*settings.CAPABILITIES, "all")]
    if unknown:
        raise ValueError(f"`all` or some of {', '.join(settings.CAPABILITIES)}, not {', '.join(unknown)}")
    return list(settings.CAPABILITIES) if "all" in items else sorted(set(items))


def folder(value: Any) -> str:
    """An absolute path; "" is the host's root, as in NVIDIA's file."""
    path = string(value) or "/"
    if not path.startswith("/"):
        raise ValueError("an absolute path")
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))


def log_file(value: Any) -> str:
    """An absolute path of a file; "" for none, as /dev/null, which NVIDIA's file may name, comes to."""
    path = string(value)
    if path in ("", "/dev/null"):
        return ""
    if not path.startswith("/") or path.endswith("/"):
        raise ValueError("an absolute path of a file")
    return path


def table(value: Any) -> dict[str, Any]:
    """What keys lie in."""
    if not isinstance(value, dict):
        raise ValueError("a table")
    return value


def choice(*values: str) -> Convert:
    """One of a few words."""

    def convert(value: Any) -> str:
        if value not in values:
            raise ValueError(f"one of {', '.join(values)}")
        return str(value)

    return convert


KEYS: dict[str, Key] = {
    "accept-nvidia-visible-devices-as-volume-mounts": Key(
        "obey mounts of /dev/null below /var/run/nvidia-container-devices", boolean
    ),
    "accept-nvidia-visible-devices-envvar-when-unprivileged": Key(
        "obey the environment of containers without CAP_SYS_ADMIN", boolean
    ),
    "disable-require": Key("do not look at NVIDIA_REQUIRE_*", boolean),
    "supported-driver-capabilities": Key("what NVIDIA_DRIVER_CAPABILITIES may ask for, commas between", capabilities),
    "swarm-resource": Key("variables that come before NVIDIA_VISIBLE_DEVICES, commas between", names),
    "compat.capabilities": Key("honour: what the container asks for; all: everything", choice("honour", "all")),
    "compat.forward-compatibility": Key("use the libraries in an image's /usr/local/cuda/compat", boolean),
    "compat.requirements": Key("what follows from NVIDIA_REQUIRE_* that are not met", choice("enforce", "warn", "off")),
    "compat.unknown-capability": Key("what follows from a capability that nobody knows", choice("error", "warn")),
    "driver.load-kmods": Key("load nvidia-uvm and nvidia-modeset, and make nodes, where these are missing", boolean),
    "driver.root": Key("where the driver's files lie on the host", folder),
    "features.ignore-imex-channel-requests": Key("give no IMEX channels", boolean),
    "features.no-additional-gids-for-device-nodes": Key(
        "the runtime adds no groups of device nodes to a container's user", boolean
    ),
    "log.file": Key("where starts write what went wrong, or more; none by default", log_file),
    "log.level": Key("how much: error, warning, info or debug", choice("error", "warning", "info", "debug")),
    "prestart.no-cgroups": Key("leave the device rules alone: something else allows the devices", boolean),
    "prestart.no-devbind": Key("leave /dev alone: something else brings the nodes", boolean),
    "runtime.annotation-prefixes": Key("annotations that name CDI devices begin so, commas between", names),
    "runtime.default-kind": Key("mode cdi: the kind of devices that are asked for by a bare id", string),
    "runtime.mode": Key("auto; cdi: files alone; legacy: the prestart hook", choice("auto", "cdi", "legacy")),
    "runtime.runtimes": Key("low-level runtimes, the first that is installed, commas between", names),
    "runtime.spec-dirs": Key("folders of CDI files, the last one first, commas between", names),
    "shim.proc-mask": Key("the mask over /proc/driver/nvidia by the runtime", choice("auto", "always", "never")),
}


def nvidias_mode(value: Any) -> str:
    """NVIDIA's modes: jit-cdi makes the devices of what is on the host, as our auto does. So would csv, but see
    `settings.of_runtime`."""
    mode = str(choice("auto", "cdi", "csv", "jit-cdi", "legacy")(value))
    return "auto" if mode == "jit-cdi" else mode


def forward_compatibility(value: Any) -> bool | Instead:
    """NVIDIA's modes: but for `disabled`, each decides by the note in the image's library, as we do. A word that is no
    mode, or none, NVIDIA's hook takes for `disabled`."""
    mode = string(value)
    if mode in ("disabled", "hook", "ldconfig", "mount"):
        return mode != "disabled"
    return Instead(False, "taken for disabled; the modes are disabled, hook, ldconfig, mount")


def nvidias_log_file(value: Any) -> str | Instead:
    """A path that is not absolute NVIDIA's programs take from wherever they are started; no start fails by it."""
    path = string(value)
    try:
        return log_file(path)
    except ValueError as error:
        return Instead("", f"no log is written there; it must be {error}")


# Hooks of NVIDIA's that a container can be without, by the settings that say so here. What the others do is done
# without a hook.
OPTIONAL_HOOKS: dict[str, tuple[str, Any]] = {
    "disable-device-node-modification": ("shim.proc-mask", "never"),
    "enable-cuda-compat": ("compat.forward-compatibility", False),
}
HOOKS = ("all", "chmod", "create-symlinks", "update-application-profile", "update-ldcache", *OPTIONAL_HOOKS)


def hooks(value: Any) -> list[str] | Instead:
    """Names of NVIDIA's hooks, or `all`."""
    items = strings(value)
    known = [item for item in items if item in HOOKS]
    unknown = [item for item in items if item not in HOOKS]
    return Instead(known, f"no hook is called {', '.join(unknown)}") if unknown else known


# NVIDIA's keys: our own, where there is one, and how the value is read. None: what the key is about
# does not exist here (no command line tool, no ldconfig). A key that stands for itself has more to do with others than
# one name says (`merge`).
NVIDIA: dict[str, tuple[str | None, Convert]] = {
    "accept-nvidia-visible-devices-as-volume-mounts": ("accept-nvidia-visible-devices-as-volume-mounts", boolean),
    "accept-nvidia-visible-devices-envvar-when-unprivileged": (
        "accept-nvidia-visible-devices-envvar-when-unprivileged",
        boolean,
    ),
    "disable-require": ("disable-require", boolean),
    "supported-driver-capabilities": ("supported-driver-capabilities", capabilities),
    "swarm-resource": ("swarm-resource", names),
    "features.allow-cuda-compat-libs-from-container": (None, boolean),
    "features.allow-ldconfig-from-container": (None, boolean),
    "features.allow-unknown-oci-spec-fields": (None, boolean),
    "features.disable-cuda-compat-lib-hook": (None, boolean),
    "features.disable-imex-channel-creation": (None, boolean),
    "features.ignore-imex-channel-requests": ("features.ignore-imex-channel-requests", boolean),
    "features.no-additional-gids-for-device-nodes": ("features.no-additional-gids-for-device-nodes", boolean),
    "nvidia-container-cli.debug": ("log.file", nvidias_log_file),
    "nvidia-container-cli.environment": (None, strings),
    "nvidia-container-cli.ldcache": (None, string),
    "nvidia-container-cli.ldconfig": (None, string),
    "nvidia-container-cli.load-kmods": ("driver.load-kmods", boolean),
    "nvidia-container-cli.no-cgroups": ("prestart.no-cgroups", boolean),
    "nvidia-container-cli.no-pivot": (None, boolean),
    "nvidia-container-cli.path": (None, string),
    "nvidia-container-cli.root": ("driver.root", folder),
    "nvidia-container-cli.user": (None, string),
    "nvidia-container-runtime.debug": ("nvidia-container-runtime.debug", nvidias_log_file),
    "nvidia-container-runtime.log-level": ("nvidia-container-runtime.log-level", string),
    "nvidia-container-runtime.mode": ("runtime.mode", nvidias_mode),
    "nvidia-container-runtime.modes.cdi.annotation-prefixes": ("runtime.annotation-prefixes", strings),
    "nvidia-container-runtime.modes.cdi.default-kind": ("runtime.default-kind", string),
    "nvidia-container-runtime.modes.cdi.spec-dirs": ("runtime.spec-dirs", strings),
    "nvidia-container-runtime.modes.csv.compat-container-root": (None, string),
    "nvidia-container-runtime.modes.csv.mount-spec-path": (None, string),
    "nvidia-container-runtime.modes.jit-cdi.nvcdi-disable-hooks": (
        "nvidia-container-runtime.modes.jit-cdi.nvcdi-disable-hooks",
        hooks,
    ),
    "nvidia-container-runtime.modes.jit-cdi.nvcdi-feature-flags": (None, strings),
    "nvidia-container-runtime.modes.legacy.cuda-compat-mode": ("compat.forward-compatibility", forward_compatibility),
    "nvidia-container-runtime.runtimes": ("runtime.runtimes", strings),
    "nvidia-container-runtime-hook.path": (None, string),
    "nvidia-container-runtime-hook.skip-mode-detection": (None, boolean),
    "nvidia-ctk.path": (None, string),
}


def read(root_fd: int) -> dict[str, Any]:
    """The configuration in force, as an inventory holds it: `source`, a path on the host or None; `values`, those that
    the file sets; `warnings`. Raises NvhookError."""
    for path in (settings.OURS, settings.NVIDIAS):
        try:
            content = root.read_file(root_fd, path, settings.FILE_MAX)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise NvhookError(f"cannot read {path}: {error.strerror}", "repair the file, or remove it") from error
        values, warnings = parse(path, content)
        return {"source": path, "values": values, "warnings": warnings}
    return {"source": None, "values": {}, "warnings": []}


def parse(path: str, content: bytes, nvidias: bool | None = None) -> tuple[dict[str, Any], list[str]]:
    """The settings that a file holds, by our names, and warnings. Where `nvidias` doesn't say whose keys it has, its
    path does. Raises NvhookError."""
    nvidias = path == settings.NVIDIAS if nvidias is None else nvidias
    try:
        document = tomllib.loads(content.decode())
    except ValueError as error:
        raise NvhookError(f"{path} is no TOML: {error}", "repair the file, or remove it") from error
    known = NVIDIA if nvidias else {name: (name, key.convert) for name, key in KEYS.items()}
    tables = {name[:at] for name in known for at, sign in enumerate(name) if sign == "."}
    values: dict[str, Any] = {}
    warnings = []
    for name, value in flat(document, tables):
        if name in tables:
            judged(path, name, value, table)
        if name not in known:
            warnings.append(f"{path}: {name} is no key of it{suggestion(name, list(known))}")
            continue
        ours, convert = known[name]
        converted = judged(path, name, value, convert)
        if isinstance(converted, Instead):
            warnings.append(f"{path}: {name} is {shown(value)}; {converted.text}")
            converted = converted.value
        if ours is not None:
            values[ours] = converted
    if nvidias:
        merge(values)
    far = off_line(content.decode(), values.get("swarm-resource", []))
    if far:
        warnings.append(
            f"{path}: swarm-resource has {', '.join(far)} on another line, where no start looks; write all on the key's"
        )
    return values, warnings


def off_line(text: str, resources: list[str]) -> list[str]:
    """Swarm resources that stand on no line with the key. A start of a container that asks for a GPU by nothing else
    looks for them there, without reading TOML (`settings.names_swarm_resource`)."""
    lines = [line for line in text.splitlines() if "swarm-resource" in line and not line.lstrip().startswith("#")]
    words = {word for line in lines for word in re.split(r"[\s\"',=]+", line)}
    return [name for name in resources if name not in words]


# The words of NVIDIA's runtime that are not ours.
LEVELS = {"trace": "debug", "warn": "warning", "fatal": "error", "panic": "error"}


def merge(values: dict[str, Any]) -> None:
    """Settings that come of several of NVIDIA's keys."""
    prefix = "nvidia-container-runtime."
    of_runtime = {name[len(prefix) :]: values.pop(name) for name in list(values) if name.startswith(prefix)}
    nvidias_log(values, of_runtime.get("debug", ""), of_runtime.get("log-level", "info"))
    # In its other modes NVIDIA's runtime has no such hooks.
    if values.get("runtime.mode", "auto") == "auto":
        disabled = of_runtime.get("modes.jit-cdi.nvcdi-disable-hooks", [])
        values |= dict(ours for hook, ours in OPTIONAL_HOOKS.items() if hook in disabled or "all" in disabled)


def nvidias_log(values: dict[str, Any], file: str, level: str) -> None:
    """One log for the two that NVIDIA's programs write. That of the command line tool is for debugging, without a
    level; the runtime's, `file`, counts where there is no other, from its level on."""
    if values.get("log.file"):
        values["log.level"] = "debug"
    elif file:
        level = LEVELS.get(level, level)
        values["log.file"] = file
        values["log.level"] = level if level in ("error", "warning", "info", "debug") else "info"


def flat(document: dict[str, Any], tables: set[str], above: str = "") -> list[tuple[str, Any]]:
    """Names with dots and values. A table that no known key lies in is one unknown name, not many."""
    found: list[tuple[str, Any]] = []
    for name, value in document.items():
        path = f"{above}{name}"
        if isinstance(value, dict) and path in tables:
            found += flat(value, tables, f"{path}.")
        else:
            found.append((path, value))
    return found


def suggestion(name: str, known: list[str]) -> str:
    """The likeliest name that was meant, as the end of a sentence."""
    by_last = {one.rpartition(".")[2]: one for one in known}
    near = difflib.get_close_matches(name, known, 1, 0.75)
    near = near or [by_last[one] for one in difflib.get_close_matches(name.rpartition(".")[2], by_last, 1, 0.75)]
    return f"; did you mean {near[0]}?" if near else ""


def judged(path: str, name: str, value: Any, convert: Convert) -> Any:
    """The value as a setting. Raises NvhookError naming file, key and what it must be."""
    try:
        return convert(value)
    except ValueError as error:
        what = f"{path}: {name} is {shown(value)}; it must be {error}"
        raise NvhookError(what, f"write {name} as docs/configuration.md says") from error


def shown(value: Any) -> str:
    """A value as a message has it."""
    return ascii(value)[:80]

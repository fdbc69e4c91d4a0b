# SPDX-License-Identifier: Apache-2.0
"""GPUs and MIG devices by the ids that people and software give: one rule for containers and for CDI files.

Hot. An id means the same in NVIDIA_VISIBLE_DEVICES (hook.selection) and for `cdi generate --device-id`.
"""

from __future__ import annotations

from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Of the ids that there are, as many as an error names: it is one line, and eight GPUs may be 56 MIG devices.
SHOWN = 24


class UuidsUnknown(Exception):
    """A request by UUID, and an inventory in which the kernel does not tell some GPU's UUID: ask NVML."""


class Missing(NvhookError):
    """What the host lacks for a request that could be met."""

    reason = "host"


class Device:
    """What one id names: a GPU, and with it one MIG device of it or None."""

    __slots__ = ("gpu", "mig")

    def __init__(self, gpu: dict[str, Any], mig: dict[str, Any] | None = None) -> None:
        self.gpu = gpu
        self.mig = mig


def find(inventory: dict[str, Any], name: str) -> Device:
    """The device that an id names: an index, a UUID or its unambiguous beginning (any letter case), a bus id; of MIG
    devices a UUID likewise, `GPU:MIG` by index, or `MIG-GPU-<UUID>/<GPU instance>/<compute instance>`.

    Raises NvhookError for none or several, and UuidsUnknown.
    """
    gpus: list[dict[str, Any]] = inventory["gpus"]
    mig: list[dict[str, Any]] = inventory.get("mig") or []
    lower = name.lower()
    if lower.startswith("mig-gpu-"):
        uuid, gi, ci = (lower[4:].split("/") + ["", ""])[:3]
        parent = _by_uuid(inventory, gpus, uuid, name) if lower.count("/") == 2 else None
        numbers = {"gi": _number(gi), "ci": _number(ci)}
        return _instance(inventory, parent, numbers, name)
    if lower.startswith("mig-"):
        entry = _by_uuid(inventory, mig, lower, name)
        parent = None if entry is None else next((gpu for gpu in gpus if gpu["bus_id"] == entry["gpu"]), None)
        return _device(inventory, parent, entry, name)
    if lower.startswith("gpu-"):
        return _device(inventory, _by_uuid(inventory, gpus, lower, name), None, name)
    index, colon, rest = name.partition(":")
    if colon and ":" not in rest:
        parent = next((gpu for gpu in gpus if gpu["index"] == _number(index)), None)
        return _instance(inventory, parent, {"index": _number(rest)}, name)
    address = _address(lower) if colon else None
    if address is not None:
        return _device(inventory, next((gpu for gpu in gpus if _address(gpu["bus_id"]) == address), None), None, name)
    return _device(inventory, next((gpu for gpu in gpus if gpu["index"] == _number(name)), None), None, name)


def _device(inventory: dict[str, Any], gpu: dict[str, Any] | None, mig: dict[str, Any] | None, name: str) -> Device:
    if gpu is None:
        raise _unknown(inventory, name)
    return Device(gpu, mig)


def _instance(inventory: dict[str, Any], gpu: dict[str, Any] | None, numbers: dict[str, int], name: str) -> Device:
    """The MIG device of a GPU with these numbers."""
    if gpu is None:
        raise _unknown(inventory, name)
    for entry in inventory.get("mig") or []:
        if entry["gpu"] == gpu["bus_id"] and all(entry[key] == value for key, value in numbers.items()):
            return Device(gpu, entry)
    raise _unknown(inventory, name)


def _number(text: str) -> int:
    """A decimal number, -1 for anything else; one of a thousand digits would be slow to convert and is no index."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else -1


def _by_uuid(inventory: dict[str, Any], entries: list[dict[str, Any]], wanted: str, name: str) -> dict[str, Any] | None:
    """The entry with that UUID, or the only one whose UUID begins so."""
    begins = []
    for entry in entries:
        uuid = entry["uuid"]
        if uuid is None:
            continue
        if uuid.lower() == wanted:
            return entry
        if uuid.lower().startswith(wanted) and len(wanted) > 4:
            begins.append(entry)
    if any(entry["uuid"] is None for entry in entries):
        # One of the unknown may begin so too.
        raise UuidsUnknown
    if len(begins) > 1:
        what = f"{name[:80]!a} is the beginning of more than one UUID; {_valid(inventory)}"
        raise NvhookError(what, "write more of the UUID")
    return begins[0] if begins else None


def _address(text: str) -> tuple[int, ...] | None:
    """A PCI address as numbers, whatever its leading zeros; None for what is none."""
    parts = text.replace(".", ":").split(":")
    if len(parts) != 4 or text.count(".") != 1 or not all(0 < len(part) <= 8 for part in parts):
        return None
    if not all(sign in "0123456789abcdef" for part in parts for sign in part):
        return None
    return tuple(int(part, 16) for part in parts)


def _unknown(inventory: dict[str, Any], name: str) -> NvhookError:
    if not inventory["gpus"]:
        return no_gpu(inventory)
    shown = name if len(name) <= 80 else name[:77] + "..."
    left_out = "".join(f"; left out: {fault['bus_id']} ({fault['reason']})" for fault in inventory["faults"])
    what = f"no GPU {shown!a} on this host; {_valid(inventory)}{left_out}"
    return NvhookError(what, "ask for one of these indexes or UUIDs, or for all")


def _valid(inventory: dict[str, Any]) -> str:
    """The ids that there are, GPUs first."""
    indexes = {gpu["bus_id"]: gpu["index"] for gpu in inventory["gpus"]}
    valid = [f"{gpu['index']} ({gpu['uuid'] or gpu['bus_id']})" for gpu in inventory["gpus"]]
    valid += [
        f"{indexes.get(entry['gpu'])}:{entry['index']} ({entry['uuid'] or 'MIG'})"
        for entry in inventory.get("mig") or []
    ]
    more = f", and {len(valid) - SHOWN} more" if len(valid) > SHOWN else ""
    return f"there are {', '.join(valid[:SHOWN])}{more}"


def no_gpu(inventory: dict[str, Any]) -> NvhookError:
    """The error of an inventory without a GPU."""
    faults = inventory["faults"]
    if faults:
        reasons = ", ".join(f"{fault['bus_id']}: {fault['reason']}" for fault in faults)
        return Missing(f"none of the driver's GPUs can be used: {reasons}", "look at the kernel's log: dmesg")
    what = "the driver is loaded and has no GPU: /proc/driver/nvidia/gpus is empty"
    return Missing(what, "see whether lspci shows the GPU, and dmesg for what the driver says of it")

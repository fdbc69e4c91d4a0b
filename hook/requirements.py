# SPDX-License-Identifier: Apache-2.0
"""What an image requires of the driver and the GPUs (NVIDIA_REQUIRE_*), and how its CUDA version fits the driver's.

Hot. The expressions are libnvidia-container's: alternatives between blanks, terms that must all hold between
commas, and a term is `cuda`, `driver`, `arch` or `brand`, one of six comparisons, and a value. Versions are
compared number by number, a missing one being 0.
"""

from __future__ import annotations

from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PROPERTIES = ("cuda", "driver", "arch", "brand")
# The longer ones first: `>=` begins with `>`.
COMPARISONS = ("!=", "<=", ">=", "=", "<", ">")


class Unmet(NvhookError):
    """A requirement of the image that does not hold."""

    reason = "requirements"


# Release branch of the driver -> the CUDA version that its libcuda implements (release notes of CUDA, "CUDA Toolkit
# and Corresponding Driver Versions"). NVML tells the same, but may take seconds.
CUDA_OF_BRANCH = {
    384: "9.0",
    390: "9.1",
    396: "9.2",
    410: "10.0",
    418: "10.1",
    440: "10.2",
    450: "11.0",
    455: "11.1",
    460: "11.2",
    465: "11.3",
    470: "11.4",
    495: "11.5",
    510: "11.6",
    515: "11.7",
    520: "11.8",
    525: "12.0",
    530: "12.1",
    535: "12.2",
    545: "12.3",
    550: "12.4",
    555: "12.5",
    560: "12.6",
    565: "12.7",
    570: "12.8",
    575: "12.9",
    580: "13.0",
}
NEWEST_BRANCH = 580
# From CUDA 11 on, programs built for a newer minor version run on any driver of the same major version.
FIRST_WITH_MINOR_COMPATIBILITY = 11

LINE_MAX = 3000
ALL_THE_SAME = "to start all the same, set NVIDIA_DISABLE_REQUIRE=1 in the container"
REMEDIES = {
    "cuda": "update the driver, or use an image for an earlier CUDA",
    "driver": "install a driver of that version, or use an image for this one",
    "arch": "use an image for this kind of GPU, or ask for another GPU",
    "brand": "use an image for this kind of GPU, or ask for another GPU",
}


class Invalid(NvhookError):
    """An expression that can't be read."""

    def __init__(self, name: str, term: str, why: str) -> None:
        super().__init__(
            f"{ascii(name)[1:-1]} holds {ascii(term[:80])}, which is no requirement: {why}",
            "repair the variable, or set NVIDIA_DISABLE_REQUIRE=1 in the container",
        )


class FactUnknown(Exception):
    """The verdict hangs on something that only NVML tells. Its argument is the property's name."""


def driver_cuda(driver: dict[str, Any]) -> str | None:
    """The CUDA version of an inventory's driver: NVML's word, else the table's; None for a branch newer than that."""
    if driver.get("cuda"):
        return str(driver["cuda"])
    branch = version(driver["version"].partition(".")[0])
    if branch is None or branch[0] > NEWEST_BRANCH:
        return None
    known = [number for number in CUDA_OF_BRANCH if number <= branch[0]]
    return CUDA_OF_BRANCH[max(known)] if known else None


def branch_for(cuda: str) -> int | None:
    """The first release branch that implements that CUDA version; None where the table does not go so far."""
    wanted = version(cuda)
    if wanted is None:
        return None
    # By their number, and branches bring ever newer versions.
    return next((branch for branch, brings in CUDA_OF_BRANCH.items() if compare(brings, cuda) >= 0), None)


def version(text: str) -> list[int] | None:
    """The numbers of a version, None for what is none."""
    parts = text.split(".")
    if len(parts) > 8 or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        return None
    return [int(part) for part in parts]


def compare(one: str, other: str) -> int:
    """Below, at or above 0, as `one` is older than, as old as or newer than `other`. Both are versions."""
    first, second = version(one) or [], version(other) or []
    length = max(len(first), len(second))
    left, right = first + [0] * (length - len(first)), second + [0] * (length - len(second))
    return (left > right) - (left < right)


def check(
    requirements: list[tuple[str, str]],
    inventory: dict[str, Any],
    gpus: list[dict[str, Any]],
    warnings: list[str],
    enforced: bool,
    untold: str,
) -> list[Verdict]:
    """A verdict on each expression that can be judged.

    Raises NvhookError for one that does not hold or can't be read; where they are not enforced, that is a warning.
    Raises FactUnknown for what nobody tells; where `untold`, the beginning of a sentence, says who does not, that is a
    warning too.
    """
    made = []
    for name, expression in requirements:
        try:
            verdict = judge(name, expression, inventory, gpus)
        except FactUnknown as error:
            if not untold:
                raise
            warnings.append(f"{name} is not checked: {untold} {error}")
            continue
        except Invalid as error:
            if enforced:
                raise
            warnings.append(error.what)
            continue
        made.append(verdict)
        if not verdict.satisfied:
            if enforced:
                raise Unmet(verdict.sentence(), verdict.remedy())
            warnings.append(verdict.sentence())
    return made


def judge(name: str, expression: str, inventory: dict[str, Any], gpus: list[dict[str, Any]]) -> Verdict:
    """An expression holds if it does for every GPU chosen, or, without one, for the driver. Raises Invalid, and
    FactUnknown."""
    verdict = Verdict(name, expression)
    subjects: list[dict[str, Any] | None] = [*gpus] or [None]
    for gpu in subjects:
        verdict.judge(_facts(inventory["driver"], gpu), gpu)
        if not verdict.satisfied:
            break
    return verdict


def _facts(driver: dict[str, Any], gpu: dict[str, Any] | None) -> dict[str, str | None]:
    facts: dict[str, str | None] = {"driver": driver["version"], "cuda": driver_cuda(driver)}
    if gpu is not None:
        facts |= {"arch": gpu.get("arch"), "brand": gpu.get("brand")}
    return facts


class Verdict:
    """One expression: whether it holds, and why each alternative that was looked at does not."""

    __slots__ = ("expression", "failed", "gpu", "name", "satisfied")

    def __init__(self, name: str, expression: str) -> None:
        self.name = name
        self.expression = expression
        self.satisfied = True
        self.failed: list[tuple[str, str]] = []
        self.gpu: int | None = None

    def judge(self, facts: dict[str, str | None], gpu: dict[str, Any] | None) -> None:
        """The verdict for one GPU. Where one alternative hangs on an unknown fact, another may still hold."""
        self.failed = []
        unknown = ""
        alternatives = self.expression.split()
        for alternative in alternatives:
            missing, reason = self._alternative(alternative, facts)
            if not missing and not reason:
                self.satisfied = True
                return
            if missing:
                unknown = missing
            else:
                self.failed.append((alternative, reason))
        if unknown:
            raise FactUnknown(unknown)
        self.satisfied = not alternatives
        self.gpu = None if gpu is None else gpu["index"]

    def _alternative(self, alternative: str, facts: dict[str, str | None]) -> tuple[str, str]:
        """An unknown property that it hangs on, or "", and what the first term that fails found, or ""."""
        unknown = ""
        for text in alternative.split(","):
            name, comparison, value = self._term(text)
            if name not in facts:
                # Without a GPU there is nothing that could have the wrong architecture.
                continue
            found = facts[name]
            if found is None:
                unknown = name
            elif not holds(name, found, comparison, value):
                return "", f"{name} is {found}"
        return unknown, ""

    def _term(self, text: str) -> tuple[str, str, str]:
        place = min((at for sign in "!=<>" if (at := text.find(sign)) >= 0), default=-1)
        name = text[: max(place, 0)].lower()
        comparison = next((sign for sign in COMPARISONS if place >= 0 and text.startswith(sign, place)), "")
        value = text[place + len(comparison) :]
        if name not in PROPERTIES:
            raise Invalid(self.name, text, f"the properties are {', '.join(PROPERTIES)}")
        if name == "brand" and (comparison not in ("=", "!=") or not value or value.startswith("=")):
            raise Invalid(self.name, text, "a brand is compared by = or !=")
        if name != "brand" and version(value) is None:
            raise Invalid(self.name, text, f"compare by one of {' '.join(COMPARISONS)} with a version")
        return name, comparison, value

    def sentence(self) -> str:
        """Each alternative that failed with what was found, in one line."""
        failed = ", or ".join(
            alternative if alternative == reason else f"{alternative} ({reason})" for alternative, reason in self.failed
        )
        text = ascii(failed)[1:-1]
        if len(text) > LINE_MAX:
            text = text[: LINE_MAX - 3] + "..."
        whose = "" if self.gpu is None else f" of GPU {self.gpu}"
        return f"{ascii(self.name)[1:-1]} is not met by the driver{whose}: {text}"

    def remedy(self) -> str:
        """What helps against the first alternative, which is the one that is meant; the others are exceptions."""
        for _, reason in self.failed:
            name = reason.partition(" ")[0]
            if name in REMEDIES:
                return f"{REMEDIES[name]}; {ALL_THE_SAME}"
        return ALL_THE_SAME

    def to_json(self) -> dict[str, Any]:
        """As `nvhook plan` prints it."""
        failed = [{"alternative": alternative, "found": reason} for alternative, reason in self.failed]
        return {"name": self.name, "expression": self.expression, "satisfied": self.satisfied, "failed": failed}


def holds(name: str, found: str, comparison: str, value: str) -> bool:
    """One comparison."""
    if name == "brand":
        return (found.lower() == value.lower()) == (comparison == "=")
    order = compare(found, value)
    return {
        "=": order == 0,
        "!=": order != 0,
        "<": order < 0,
        "<=": order <= 0,
        ">": order > 0,
        ">=": order >= 0,
    }[comparison]


class Compatibility:
    """How an image's CUDA version fits the driver's. `kind` is `native`, `minor`, `forward` or `none`."""

    __slots__ = ("driver", "driver_cuda", "image_cuda", "kind", "needed")

    def __init__(self, image_cuda: str, driver: dict[str, Any], driver_cuda: str, forward: bool) -> None:
        self.image_cuda = image_cuda
        self.driver_cuda = driver_cuda
        self.driver: str = driver["version"]
        self.needed = branch_for(image_cuda)
        wanted, have = int(image_cuda.partition(".")[0]), int(driver_cuda.partition(".")[0])
        if compare(image_cuda, driver_cuda) <= 0:
            self.kind = "native"
        elif forward:
            self.kind = "forward"
        elif wanted == have and have >= FIRST_WITH_MINOR_COMPATIBILITY:
            self.kind = "minor"
        else:
            self.kind = "none"

    def warning(self) -> str:
        """One line, "" where there is nothing to say."""
        if self.kind == "native":
            return ""
        needed = f"driver {self.needed} or newer" if self.needed else f"a driver newer than {NEWEST_BRANCH}"
        start = f"the image is built for CUDA {self.image_cuda}, driver {self.driver} brings {self.driver_cuda}"
        says = {
            "minor": "minor-version compatibility applies, so PTX and the newest functions may fail",
            "forward": "forward compatibility applies, by the libraries in the image",
            "none": "neither minor-version nor forward compatibility applies, so CUDA programs will fail",
        }
        return f"{start}: {says[self.kind]}; {needed} would do"

    def to_json(self) -> dict[str, Any]:
        """As `nvhook plan` prints it."""
        return {
            "image_cuda": self.image_cuda,
            "driver_cuda": self.driver_cuda,
            "kind": self.kind,
            "driver_needed": self.needed,
        }


def compatibility(image_cuda: str, driver: dict[str, Any], forward: bool) -> Compatibility | None:
    """How they fit; None where one of the versions is not known. `forward`: the image's own libcuda is used."""
    found = driver_cuda(driver)
    return Compatibility(image_cuda, driver, found, forward) if image_cuda and found else None

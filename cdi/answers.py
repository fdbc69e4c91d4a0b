# SPDX-License-Identifier: Apache-2.0
"""The child that answers `hook.child`: what takes TOML or YAML. Cold; prints one JSON object."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ldcache import root
from ldcache.errors import NvhookError


def configuration(host_root: str) -> dict[str, Any]:
    """The values that the configuration file in force sets, by our names."""
    from cdi.host import config

    fd = root.open_root(host_root)
    try:
        values: dict[str, Any] = config.read(fd)["values"]
        return values
    finally:
        os.close(fd)


def devices(words: list[str]) -> dict[str, Any]:
    """The devices that CDI files define, of those named behind `--`; the folders stand before."""
    from cdi import reader, registry

    at = words.index("--")
    return registry.table(registry.scan(words[:at], reader.load), words[at + 1 :])


def main() -> int:
    """`configuration HOST_ROOT`, or `devices FOLDER… -- NAME…`."""
    question, *words = sys.argv[1:]
    try:
        answer = configuration(words[0]) if question == "configuration" else devices(words)
        print(json.dumps({"answer": answer}))
    except NvhookError as error:
        print(json.dumps({"error": [error.what, error.remedy]}))
    return 0

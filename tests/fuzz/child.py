# SPDX-License-Identifier: Apache-2.0
"""The process that fuzzes: TARGET, a folder for the corpus, libFuzzer's options. Started by `tests.fuzz.run`."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path

import atheris

from tests import fuzz


def main() -> None:
    """Never returns: libFuzzer leaves the process."""
    name, folder, *options = sys.argv[1:]
    target = importlib.import_module(f"tests.fuzz.fuzz_{name}")
    with atheris.instrument_imports(include=["ldcache", "cdi"]):
        # Its first calls import what it tests.
        for data in (seeds := [*target.seeds(), *fuzz.corpus(name)]):
            target.TestOneInput(data)
    for data in seeds:
        (Path(folder) / hashlib.sha256(data).hexdigest()).write_bytes(data)
    atheris.Setup([sys.argv[0], folder, *options], target.TestOneInput)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

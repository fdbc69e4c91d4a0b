# SPDX-License-Identifier: Apache-2.0
"""Lay out nvhook below a folder as a package installs it: `python packaging/stage.py DESTDIR --site FOLDER`.

One layout for .deb and .rpm: /usr/lib/nvhook with the packages, what the distribution lacks, and the programs; links in
/usr/bin. `hook.install` makes the same from a wheel. The native parts must be built.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

TREE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TREE))

from hook import install  # noqa: E402

LIBRARY = "/usr/lib/nvhook"
PYTHON = "/usr/bin/python3"

# Programs for people, each with the function that it starts.
PROGRAMS = {
    "nvhook": "hook.cli",
    "cdi": "cdi.__main__",
    "ldcache": "ldcache.cli",
    # Not by the launcher's own name for it, or the two would start each other.
    "ctk": "hook.names.ctk",
    "nvidia-container-cli": "hook.names.containercli",
}
# Names in /usr/bin of the companion package, each with what it leads to.
COMPANION = dict.fromkeys(install.NVIDIA_LAUNCHERS, "launch") | {
    # A launcher too: CDI files of older releases have `nvidia-ctk hook …`, in whatever environment.
    "nvidia-ctk": "launch",
    "nvidia-container-cli": "nvidia-container-cli",
    "ldcache": "ldcache",
}

# -I: nothing of the working directory or of the caller's variables is imported by root.
PROGRAM = """\
#!{python} -I
# SPDX-License-Identifier: Apache-2.0
import sys

sys.path.insert(0, {library!r})
from {module} import main

sys.exit(main())
"""

# -S hides the distribution's folder, which holds _cffi_backend.
ENTRY = """\
# SPDX-License-Identifier: Apache-2.0
import sys
sys.path[:0] = [{library!r}, {site}]
from hook.start import main
main()
"""


def stage(top: Path, site: str) -> None:
    """Everything below `top`. `site` is a Python expression for the folder of the distribution's modules."""
    library = top / LIBRARY.lstrip("/")
    for name in install.PACKAGES:
        shutil.copytree(TREE / name, library / name, ignore=install.NOT_COPIED, copy_function=shutil.copyfile)
    shutil.copyfile(binding(), library / "pynvml.py")
    programs = library / "bin"
    programs.mkdir()
    for name in ("launch", "cuda-check"):
        shutil.copyfile(TREE / "hook/bin" / name, programs / name)
    install.write_marks(programs / "launch", {"@PYTHON@": PYTHON, "@ENTRY@": f"{LIBRARY}/bin/entry"})
    (programs / "entry").write_text(ENTRY.format(library=LIBRARY, site=site))
    for name, module in PROGRAMS.items():
        (programs / name).write_text(PROGRAM.format(python=PYTHON, library=LIBRARY, module=module))
    install.set_modes(library)
    (programs / "entry").chmod(0o644)
    links = top / "usr/bin"
    links.mkdir(parents=True)
    names = {"nvhook": "nvhook"} | dict.fromkeys(install.LAUNCHERS, "launch") | COMPANION
    for name, target in names.items():
        (links / name).symlink_to(f"../lib/nvhook/bin/{target}")


def binding() -> Path:
    """NVML's binding, one module, which the distributions lack; of the Python that runs this."""
    spec = importlib.util.find_spec("pynvml")
    if spec is None or spec.origin is None:
        raise SystemExit("the Python module pynvml is not installed; remedy: pip install nvidia-ml-py")
    return Path(spec.origin)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("destdir", type=Path)
    parser.add_argument("--site", required=True, help="where the distribution's modules are, a Python expression")
    arguments = parser.parse_args()
    stage(arguments.destdir, arguments.site)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""python -m tests.simhost DIRECTORY: builds a simulated host from a shell."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.simhost import Host, build, build_h200, gpus, platforms


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simhost", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gpus", type=int, default=1, metavar="N")
    parser.add_argument("--driver", default=Host().version, metavar="VERSION")
    parser.add_argument("--layout", choices=tuple(platforms.PLACES), default="debian")
    parser.add_argument("--i386", action="store_true", help="the 32-bit libraries too")
    parser.add_argument(
        "--h200", action="store_true", help="the real host of tests/data/h200; other options don't count"
    )
    arguments = parser.parse_args()
    if arguments.h200:
        built = build_h200(arguments.directory)
    else:
        host = Host(version=arguments.driver, gpus=gpus(arguments.gpus), layout=arguments.layout, i386=arguments.i386)
        built = build(arguments.directory, host)
    if built.nodes_skipped:
        print(f"no device nodes: {built.nodes_skipped}")
    print(built.root)


if __name__ == "__main__":
    main()

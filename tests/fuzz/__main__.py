# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.fuzz TARGET --seconds N [--record]`; see the package."""

from __future__ import annotations

import argparse
import datetime
import sys

from tests import fuzz

RECORD = fuzz.TREE / "docs/fuzzing.md"


def main(argv: list[str] | None = None) -> int:
    """0 without a finding, 1 with one."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz one of the parsers.")
    parser.add_argument("target", choices=[*fuzz.targets(), "all"])
    parser.add_argument("--seconds", type=int, default=60, metavar="N", help="for each target; default: %(default)s")
    parser.add_argument("--record", action="store_true", help="append a line to docs/fuzzing.md")
    arguments = parser.parse_args(argv)
    found = False
    for target in fuzz.targets() if arguments.target == "all" else [arguments.target]:
        outcome = fuzz.run(target, arguments.seconds)
        print(line(outcome))
        if arguments.record:
            with RECORD.open("a", encoding="utf-8") as file:
                file.write(line(outcome) + "\n")
        for data in outcome.findings:
            found = True
            print(outcome.log[-3000:], data.hex(), sep="\n", file=sys.stderr)
    return 1 if found else 0


def line(outcome: fuzz.Outcome) -> str:
    """A row of the table in docs/fuzzing.md."""
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    numbers = f"{outcome.seconds} | {outcome.executions} | {outcome.coverage} | {len(outcome.findings)}"
    return f"| {date} | {outcome.target} | {numbers} |"


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The command `cdi`, also `python -m cdi`. `check` has its own way in: a timer runs it, and the other verbs' imports
would take twice its time."""

from __future__ import annotations

import sys

from ldcache.output import until_closed


def main() -> int:
    """The exit status of the command."""
    return until_closed(_run)


def _run() -> int:
    if sys.argv[1:2] != ["check"]:
        from cdi import cli

        return cli.main()
    from cdi import check
    from ldcache.errors import NvhookError

    try:
        return check.main(sys.argv[2:])
    except NvhookError as error:
        sys.stderr.write(f"nvhook: error: {error.what}\n  remedy: {error.remedy}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())

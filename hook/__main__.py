# SPDX-License-Identifier: Apache-2.0
"""`python -m hook`: the command `nvhook`."""

import sys

from hook.cli import main

sys.exit(main())

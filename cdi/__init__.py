# SPDX-License-Identifier: Apache-2.0
"""The Container Device Interface, and in `host` all that asks this machine what it has.

The way of a file: `source` reads its bytes, `reader` parses YAML, `decode` makes a spec of the value, `validate`
judges it by release (`versions`, `names`), `advice` warns; `report` is all of that for one file. `registry` finds
devices in folders, `inject` puts them into a configuration, `annotations` are one way to ask for them. `spec`
writes files, `generate` makes one of an inventory, `transform` moves one's paths. What an id names, `devices` says, and
what a capability brings, `capabilities`, for files and for containers. `cli` is the command `cdi`; `jsontext`
is JSON for code that runs while a container starts.
"""

import ldcache

# An inventory made by another version is made anew.
VERSION = ldcache.VERSION

# SPDX-License-Identifier: Apache-2.0
"""Container engines' own configuration: how nvhook gets into it, out of it, and whether a daemon has read it.

Cold. An engine's module says which settings belong into which file; `settings` puts them there and takes them
out, `jsonfile` and `tomlfile` change a text and leave the rest of it, `files` writes.
"""

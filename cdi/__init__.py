# SPDX-License-Identifier: Apache-2.0
"""The Container Device Interface, and in `host` all that asks this machine what it has.

`names` and `spec` are the format: names, the lowest version that holds a content, the rules that readers
apply, writing a file. `generate` makes a spec of an inventory; `cli` is the command `cdi`. `jsontext` is JSON
for code that runs while a container starts.
"""

# pyproject.toml has the same (a test compares them); an inventory made by another version is made anew.
VERSION = "0.1.0"

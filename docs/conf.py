# SPDX-License-Identifier: Apache-2.0
"""Sphinx: `python -m sphinx docs docs/_build`. tests/unit/test_docs.py builds it with warnings as errors."""

project = "nvhook"
copyright = "the nvhook authors"
extensions = ["myst_parser"]
myst_enable_extensions = ["deflist"]
exclude_patterns = ["_build"]
html_theme = "alabaster"
# A link to a heading, `errors.md#mounts`, is checked like any other.
myst_heading_anchors = 3

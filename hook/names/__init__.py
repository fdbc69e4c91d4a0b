# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's commands, by their names and with their arguments, on nvhook's verbs. Cold; the companion package has them.

An argument that has no meaning here is said so, never dropped in silence: a warning where the result is the same
without it, an error where it isn't.
"""

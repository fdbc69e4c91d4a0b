# SPDX-License-Identifier: Apache-2.0
"""Containers: what one asks for, where the host's files land in it, and the ways to put them there.

The hook for runtimes is `prestart`; its parts, in the order in which they are used: `state`, `request`,
`injection`, `selection`, `layout`, `plan`, `steps`, with `namespace` and `cgroup` below them. `create_container` is the
hook that CDI files name. The rest is for people: `planner`, `verify`, `install`, and the command, `cli`.
"""

# SPDX-License-Identifier: Apache-2.0
"""The modules that a container start may load beside what a bare interpreter has loaded by itself.

A module here costs every container of the machine its milliseconds: `json` would cost 8 (by way of `re`), typing
10, dataclasses 15. The set of modules is the same on any machine, a time is not; so the set is the budget.
`tests/unit/test_hot_imports.py` holds imports against it, `tests/system/test_hot_start.py` a real start.
"""

from __future__ import annotations

# Ours. A module that joins this list says so in its docstring.
OURS = {
    "cdi",
    "cdi.annotations",
    "cdi.capabilities",
    "cdi.decode",
    "cdi.devices",
    "cdi.host",
    "cdi.host.fingerprint",
    "cdi.host.settings",
    "cdi.host.store",
    "cdi.inject",
    "cdi.jsontext",
    "cdi.logline",
    "cdi.names",
    "cdi.registry",
    "cdi.source",
    "cdi.validate",
    "cdi.versions",
    "hook",
    "hook.bpf",
    "hook.cdihook",
    "hook.cgroup",
    "hook.cgroupfs",
    "hook.compat",
    "hook.create_container",
    "hook.devicefilter",
    "hook.files",
    "hook.injection",
    "hook.layout",
    "hook.loader",
    "hook.log",
    "hook.mounts",
    "hook.namespace",
    "hook.params",
    "hook.plan",
    "hook.prestart",
    "hook.profile",
    "hook.record",
    "hook.request",
    "hook.requirements",
    "hook.runtimehook",
    "hook.search",
    "hook.selection",
    "hook.start",
    "hook.state",
    "hook.step",
    "hook.steps",
    # The runtime shim's.
    "hook.arguments",
    "hook.bundle",
    "hook.cdifiles",
    "hook.child",
    "hook.lowlevel",
    "hook.outside",
    "hook.protection",
    "hook.runtime",
    "hook.runtimelog",
    "hook.shim",
    "hook.volumes",
    "ldcache",
    "ldcache.cache",
    "ldcache.imageconf",
    "ldcache.elf",
    "ldcache.errors",
    "ldcache.kernel",
    "ldcache.merge",
    "ldcache.names",
    "ldcache.order",
    "ldcache.root",
    "ldcache.imagescan",
}

# What cffi brings along, and modules of Python written in C that need no other. `struct` and `__future__` are
# a few lines of Python, a tenth of a millisecond each.
COMPILED = {"_cffi_backend", "ldcache._sys", "ldcache._sys.lib"}
BUILT_IN = {
    "__future__",
    "_json",
    "_signal",
    "_struct",
    "errno",
    "fcntl",
    "gc",
    "marshal",
    "posix",
    "struct",
    "sys",
    "time",
}

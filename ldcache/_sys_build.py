# SPDX-License-Identifier: Apache-2.0
"""cffi description of `ldcache._sys`; compiled by packaging/build.py."""

import pathlib

import cffi

HEADER = pathlib.Path(__file__).with_name("sys.h")


def declarations(text: str) -> str:
    """The prototypes of a C header, without the preprocessor lines that cffi's parser refuses."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


ffibuilder = cffi.FFI()
ffibuilder.cdef(declarations(HEADER.read_text()))
ffibuilder.set_source("ldcache._sys", '#include "sys.h"', py_limited_api=True)

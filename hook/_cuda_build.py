# SPDX-License-Identifier: Apache-2.0
"""cffi description of `hook._cuda`; compiled by packaging/build.py."""

import pathlib

import cffi

HEADER = pathlib.Path(__file__).with_name("cuda.h")


def declarations(text: str) -> str:
    """The declarations of a C header, without the preprocessor lines that cffi's parser refuses."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


ffibuilder = cffi.FFI()
ffibuilder.cdef(declarations(HEADER.read_text()))
ffibuilder.set_source("hook._cuda", '#include "cuda.h"', py_limited_api=True)

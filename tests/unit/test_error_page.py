# SPDX-License-Identifier: Apache-2.0
"""docs/errors.md has every error of the sources, and the sources have every message of the page.

By the parts of a message that are constant: what is filled in stands on the page in capitals, as an example, or as an
ellipsis. A message of the page may also be an example, as a whole, of one in the sources.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import messages

PAGE = Path(__file__).resolve().parents[2] / "docs/errors.md"
# Shorter constants are everywhere.
PART_MIN = 8
# On the page these stand for themselves, other words in capitals for something else.
WORDS = "CAP_SYS_ADMIN CDI CRI CUDA EGL ELF GPU IMEX JSON MIG MPS NVIDIA NVML PTX TOML UTF UUID WSL"
PLACEHOLDER = re.compile(rf"\b(?!(?:{WORDS.replace(' ', '|')})\b|NVIDIA_)[A-Z][A-Z0-9_]*\b|…")
# What the kernel says of a failure is no text of ours.
KERNELS = [f": {os.strerror(number)}" for number in errno.errorcode]


def normal(text: str) -> str:
    """Quotes are all one, since a backtick can't stand between backticks; and so is blank space."""
    return " ".join(text.replace("`", "'").split())


def constants(parts: list[str]) -> list[str]:
    """The parts of a message, as they can be looked for."""
    return [normal(part).strip(" :;,.'()") for part in parts]


def longest(parts: list[str]) -> str:
    return max(constants(parts), key=len)


def is_example(term: str, texts: list[str]) -> bool:
    """Whether the message is one of these texts, with something in its holes."""
    with_holes = (text.split(messages.HOLE) for text in texts if messages.HOLE in text)
    patterns = (".+".join(map(re.escape, parts)) for parts in with_holes if len(longest(parts)) >= PART_MIN)
    return any(re.fullmatch(pattern, term) for pattern in patterns)


def terms() -> Iterator[str]:
    """The messages of the page: what stands between backticks before a definition, parentheses aside."""
    lines = PAGE.read_text().splitlines()
    for line, after in zip(lines, lines[1:], strict=False):
        if after.startswith(": "):
            plain = re.sub(r"\([^()`]*(?:`[^`]*`[^()`]*)*\)(?=[^`]*(?:`[^`]*`[^`]*)*$)", "", line)
            yield from re.findall(r"`([^`]+)`", plain)


@pytest.fixture(scope="module")
def sources() -> dict[str, messages.Module]:
    return messages.modules()


def test_every_error_is_on_the_page(sources: dict[str, messages.Module]) -> None:
    page = normal(" ".join(terms()))
    found = list(messages.errors(sources))
    assert len(found) > 250
    missing = []
    for place, text in found:
        part = longest(text.split(messages.HOLE))
        if len(part) >= PART_MIN and part not in page:
            missing.append(f"{place}: {text.replace(messages.HOLE, '…')}")
    assert not missing, "\n".join(missing)


def test_every_message_of_the_page_is_in_the_sources(sources: dict[str, messages.Module]) -> None:
    texts = list(map(normal, messages.all_texts(sources)))
    said = "\n".join(texts)
    found = list(terms())
    assert len(found) > 250
    missing = []
    for term in found:
        text = term
        for words in KERNELS:
            text = text.removesuffix(words)
        parts = [part for part in constants(re.split(PLACEHOLDER, text)) if len(part) >= PART_MIN]
        if not all(part in said for part in parts) and not is_example(normal(term), texts):
            missing.append(term)
    assert not missing, "\n".join(missing)

# SPDX-License-Identifier: Apache-2.0
"""The text format of Prometheus, version 0.0.4, as a node exporter's textfile collector reads it. Cold."""

from __future__ import annotations


class Text:
    """Metrics, written one after the other; all samples of one follow its head."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def head(self, name: str, kind: str, about: str) -> None:
        """What a metric is."""
        self._lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]

    def sample(self, name: str, value: float, **labels: str) -> None:
        """One value."""
        shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        self._lines.append(f"{name}{{{shown}}} {value}")

    def text(self) -> str:
        """All of it."""
        return "\n".join(self._lines) + "\n"


def _escaped(text: str) -> str:
    """A label's value: the format knows three escapes, and what is no UTF-8 costs the whole file."""
    plain = text.encode("utf-8", "backslashreplace").decode()
    return plain.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

# SPDX-License-Identifier: Apache-2.0
"""What a source file imports, read off its text; nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

# Modules that cffi compiles: no .py file tells of them.
COMPILED = ("ldcache._sys", "hook._cuda")


def modules(tree: Path, packages: tuple[str, ...]) -> dict[str, Path]:
    """Dotted name and file of each module in these packages."""
    found = {}
    for package in packages:
        for path in sorted((tree / package).rglob("*.py")):
            parts = path.relative_to(tree).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, path: Path, known: dict[str, Path], at_run_time: bool = False) -> set[str]:
    """Dotted names that module `name` imports, anywhere in it, functions included.

    `from cdi import jsontext` is `cdi.jsontext` where `known` has a module of that name, else `cdi`.
    With `at_run_time`, imports that stand below `if TYPE_CHECKING:` are left out.
    """
    top = ast.parse(path.read_text(encoding="utf-8"), str(path))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in _nodes(top, at_run_time):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(package, node)
            for alias in node.names:
                deeper = f"{base}.{alias.name}"
                found.add(deeper if deeper in known or deeper in COMPILED else base)
    return found - {"__future__"}


def _nodes(top: ast.AST, at_run_time: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(top):
        if at_run_time and isinstance(node, ast.If) and _names_type_checking(node.test):
            for other in node.orelse:
                yield from _nodes(other, at_run_time)
            continue
        yield node
        yield from _nodes(node, at_run_time)


def _names_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _absolute(package: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])

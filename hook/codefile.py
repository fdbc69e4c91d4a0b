# SPDX-License-Identifier: Apache-2.0
"""The one file with the code of all hot modules, from which hook.start takes them; as a program, its maker.

`BIN/hot.TAG`, TAG being the interpreter's cache tag: its magic number as in a .pyc file (PEP 3147), then, marshalled, a
dictionary of name → (is a package, its file, marshalled code). Docstrings and annotations, which nothing reads at run
time, are left out; lines and names are those of the sources, so tracebacks are the same. Written where byte code is:
by `nvhook install` and by packages' scripts. Without it all works, 1 to 4 ms slower.
"""

from __future__ import annotations

import ast
import importlib.util
import marshal
import os
import sys
from pathlib import Path

PACKAGES = ("ldcache", "cdi", "hook")
# How a module says that container starts load it.
MARK = "\nHot"
BEFORE = ("hook", "hook.start")


class Bare(ast.NodeTransformer):
    """A module without annotations and without what is for type checkers alone."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        """A parameter."""
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """A function's result."""
        self.generic_visit(node)
        node.returns = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        """A variable; one without a value is gone, for __slots__ classes declare theirs elsewhere."""
        self.generic_visit(node)
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        """What makes annotations texts has none left to do it to."""
        return ast.copy_location(ast.Pass(), node) if node.module == "__future__" else node

    def visit_If(self, node: ast.If) -> ast.stmt:
        """`if TYPE_CHECKING`."""
        self.generic_visit(node)
        checked = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return ast.copy_location(ast.Pass(), node) if checked else node


def hot(library: Path) -> dict[str, Path]:
    """The hot modules and the packages that hold them, by name."""
    found: dict[str, Path] = {}
    for package in PACKAGES:
        for path in sorted((library / package).rglob("*.py")):
            if path.name == "__init__.py" or MARK not in (
                ast.get_docstring(ast.parse(path.read_bytes()), clean=False) or ""
            ):
                continue
            found[".".join(path.relative_to(library).with_suffix("").parts)] = path
            for folder in path.relative_to(library).parents[:-1]:
                found[".".join(folder.parts)] = library / folder / "__init__.py"
    # They are loaded before the file is.
    return {name: path for name, path in found.items() if name not in BEFORE}


def code(source: bytes, file: str) -> bytes:
    """A module's marshalled code."""
    tree = ast.fix_missing_locations(Bare().visit(ast.parse(source, file)))
    # 2: without docstrings.
    return marshal.dumps(compile(tree, file, "exec", dont_inherit=True, optimize=2))


def write(library: Path, final: Path) -> Path:
    """Write the file for the modules in `library`, which will be known as `final`. Raises OSError."""
    modules = {}
    for name, path in hot(library).items():
        file = str(final / path.relative_to(library))
        modules[name] = (path.name == "__init__.py", file, code(path.read_bytes(), file))
    # Another Python's, which might return to newer modules.
    for old in (library / "bin").glob("hot.*"):
        old.unlink()
    target = library / "bin" / f"hot.{sys.implementation.cache_tag}"
    beside = target.with_name(f".{target.name}.new")
    beside.write_bytes(importlib.util.MAGIC_NUMBER + marshal.dumps(modules))
    beside.chmod(0o644)
    os.replace(beside, target)
    return target


if __name__ == "__main__":
    LIBRARY = Path(__file__).resolve().parents[1]
    write(LIBRARY, LIBRARY)

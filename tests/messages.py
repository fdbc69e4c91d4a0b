# SPDX-License-Identifier: Apache-2.0
"""Messages as they stand in the sources, with holes for what is filled in, for the test of the page on errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TREE = Path(__file__).resolve().parent.parent
PACKAGES = ("cdi", "hook", "ldcache")
# Between the constant parts of a message.
HOLE = "\0"


@dataclass
class Module:
    """One source file: its constants by name, and what its names stand for elsewhere in the packages."""

    path: Path
    tree: ast.Module
    constants: dict[str, str] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`cdi.host.store`."""
        return ".".join(self.path.relative_to(TREE).with_suffix("").parts)


def modules() -> dict[str, Module]:
    """All modules of the packages, by name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((TREE / package).rglob("*.py")):
            module = Module(path, ast.parse(path.read_text()))
            found[module.name] = module
    for module in found.values():
        _read_names(module)
    return found


def _read_names(module: Module) -> None:
    for statement in module.tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            for target in statement.targets:
                if isinstance(target, ast.Name) and isinstance(statement.value.value, str | int):
                    module.constants[target.id] = str(statement.value.value)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                module.imported[alias.asname or alias.name] = (node.module, alias.name)


class Texts:
    """What an expression may say, each with holes. Names stand for what is assigned to them in the same function."""

    def __init__(self, every: dict[str, Module], module: Module, scope: ast.AST) -> None:
        self.every = every
        self.module = module
        self.assigned: dict[str, list[ast.expr]] = {}
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.assigned.setdefault(target.id, []).append(node.value)
                    elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                        for name, value in zip(target.elts, node.value.elts, strict=False):
                            if isinstance(name, ast.Name):
                                self.assigned.setdefault(name.id, []).append(value)

    def of(self, node: ast.expr, depth: int = 0) -> list[str]:
        """The texts, or one hole."""
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.JoinedStr):
            return self._joined(node, depth)
        if isinstance(node, ast.FormattedValue):
            return self._value(node)
        if isinstance(node, ast.IfExp):
            return self.of(node.body, depth) + self.of(node.orelse, depth)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return [left + right for left in self.of(node.left, depth) for right in self.of(node.right, depth)]
        if isinstance(node, ast.Name) and depth < 3 and node.id in self.assigned:
            return [text for value in self.assigned[node.id] for text in self.of(value, depth + 1)]
        return [self._constant(node)]

    def _joined(self, node: ast.JoinedStr, depth: int) -> list[str]:
        texts = [""]
        for part in node.values:
            texts = [text + more for text in texts for more in self.of(part, depth)]
        return texts

    def _value(self, node: ast.FormattedValue) -> list[str]:
        # A conversion or a format makes another text of it.
        return [HOLE if node.conversion != -1 or node.format_spec else self._constant(node.value)]

    def _constant(self, node: ast.expr) -> str:
        """A module's constant, by its name there or elsewhere; else a hole."""
        if isinstance(node, ast.Name):
            if node.id in self.module.constants:
                return self.module.constants[node.id]
            owner, name = self.module.imported.get(node.id, ("", ""))
            return self._elsewhere(owner, name)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner, name = self.module.imported.get(node.value.id, ("", ""))
            return self._elsewhere(f"{owner}.{name}", node.attr)
        return HOLE

    def _elsewhere(self, owner: str, name: str) -> str:
        module = self.every.get(owner)
        return HOLE if module is None else module.constants.get(name, HOLE)


def errors(every: dict[str, Module]) -> Iterator[tuple[str, str]]:
    """Place and text of each error that a person may read."""
    classes = {"NvhookError"}
    for module in every.values():
        classes |= {
            node.name
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id in classes for b in node.bases)
        }
    for module, scope, call in _calls(every):
        called = call.func.id if isinstance(call.func, ast.Name) else ""
        if called in classes and call.args and not isinstance(call.args[0], ast.Starred):
            for text in Texts(every, module, scope).of(call.args[0]):
                yield f"{module.path.relative_to(TREE)}:{call.lineno}", text


def _calls(every: dict[str, Module]) -> Iterator[tuple[Module, ast.AST, ast.Call]]:
    """Each call, with the innermost function that it stands in."""
    for module in every.values():
        scopes: list[tuple[ast.AST, ast.AST]] = [(module.tree, module.tree)]
        while scopes:
            node, scope = scopes.pop()
            if isinstance(node, ast.Call):
                yield module, scope, node
            inner = node if isinstance(node, ast.FunctionDef) else scope
            scopes += [(child, inner) for child in ast.iter_child_nodes(node)]


def all_texts(every: dict[str, Module]) -> list[str]:
    """Every string of the sources, those of the C programs included."""
    found = []
    for module in every.values():
        texts = Texts(every, module, ast.Module(body=[], type_ignores=[]))
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                found += texts.of(node)
    for path in [*TREE.glob("packaging/**/*.c"), *TREE.glob("packaging/**/*.h"), *TREE.glob("hook/**/*.c")]:
        joined = re.sub(r'"\s*\n\s*"', "", path.read_text())
        found += [re.sub(r"%[a-z]+", HOLE, text) for text in re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)]
    return found

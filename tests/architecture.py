"""The import graph of the package, read from the syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

NAME = "stream_balancer"
ROOT = Path(__file__).resolve().parents[1]


class Import(NamedTuple):
    """One module names another."""

    module: str
    """Dotted, in full: ``stream_balancer.planning.partition``, or ``torch.distributed``."""
    typing_only: bool
    """It stands under ``if TYPE_CHECKING``: never run, but a reader follows it all the same."""


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; a package is its ``__init__``."""
    found = {}
    for path in sorted((ROOT / NAME).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(module: str) -> frozenset[Import]:
    """What a module imports, wherever in it the import stands."""
    return frozenset(imports_in(ast.parse(modules()[module].read_text()), module))


def imports_in(tree: ast.Module, module: str) -> Iterator[Import]:
    """The imports of a tree that stands in this module."""
    known = modules()
    package = module if known[module].name == "__init__.py" else module.rpartition(".")[0]
    yield from _imports(tree, package, known, typing_only=False)


def _imports(node: ast.AST, package: str, known: Iterable[str], *, typing_only: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, typing_only) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")
            base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])
        for alias in node.names:  # `from package import module` names the module, not the package
            inner = f"{base}.{alias.name}"
            yield Import(inner if inner in known else base, typing_only)
    for child in ast.iter_child_nodes(node):
        below = isinstance(node, ast.If) and child in node.body and "TYPE_CHECKING" in ast.dump(node.test)
        yield from _imports(child, package, known, typing_only=typing_only or below)


def edges(*, typing: bool = True) -> dict[str, set[str]]:
    """The import graph of the package. Its own ``__init__`` is left out: it imports nothing until asked for a name."""
    known = modules().keys() - {NAME}
    return {
        module: {i.module for i in imports(module) if i.module in known - {module} and (typing or not i.typing_only)}
        for module in known
    }


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected modules, largest first (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted((group for group in found if len(group) > 1), key=lambda group: (-len(group), group))


def folder_of(module: str) -> str:
    """The name at the top level that a module belongs to."""
    return module.split(".")[1]

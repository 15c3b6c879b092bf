"""The shape of the code, measured from its imports: ``make architecture``.

    python tests/architecture.py [CHECKOUT ...]

Several checkouts stand side by side: a commit in a worktree of its own beside today's. All is read from the syntax
trees, so old commits need not run. ``tests/unit/test_package.py`` judges by the same graph.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
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
def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the package by its dotted name; a package is its ``__init__``."""
    found = {}
    for path in sorted((root / NAME).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(module: str, root: Path = ROOT) -> frozenset[Import]:
    """What a module imports, wherever in it the import stands."""
    return frozenset(imports_in(tree_of(modules(root)[module]), module, root))


def imports_in(tree: ast.Module, module: str, root: Path = ROOT) -> Iterator[Import]:
    """The imports of a tree that stands in this module."""
    known = modules(root)
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


def edges(root: Path = ROOT, *, typing: bool = True) -> dict[str, set[str]]:
    """The import graph of the package. Its own ``__init__`` is left out: it imports nothing until asked for a name."""
    known = modules(root).keys() - {NAME}
    return {
        module: {
            i.module for i in imports(module, root) if i.module in known - {module} and (typing or not i.typing_only)
        }
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


def layers(root: Path = ROOT) -> int:
    """Names in the longest chain of imports between names at the top level; those in one circle count as one."""
    graph = edges(root, typing=False)
    above: dict[str, set[str]] = {folder_of(module): set() for module in graph}
    for module, imported in graph.items():
        above[folder_of(module)] |= {folder_of(other) for other in imported} - {folder_of(module)}
    groups = circles(above)
    group_of = {name: min(group) for group in groups for name in group}
    joined: dict[str, set[str]] = {}
    for name, others in above.items():
        own = group_of.get(name, name)
        joined.setdefault(own, set()).update(group_of.get(other, other) for other in others)

    def depth(name: str) -> int:
        return 1 + max((depth(other) for other in joined[name] - {name}), default=0)

    return max(map(depth, joined))


Function = ast.FunctionDef | ast.AsyncFunctionDef


def comments_of(path: Path) -> int:
    """Comments for a reader: no rulers, nothing that is addressed to a tool."""
    with tokenize.open(path) as file:
        found = [token.string for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.COMMENT]
    return sum(not text.startswith(("# --", "# type:", "# noqa", "#!")) for text in found)


def lines_of(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


_LAYOUT = {
    getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER", "ENCODING")
}


def code_tokens_of(path: Path) -> int:
    """Tokens of code: no comments, no docstrings, no layout. Long names and long lines do not count more."""
    documented = {
        (node.value.lineno, node.value.col_offset)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    with path.open("rb") as file:
        return sum(
            token.type not in _LAYOUT and not (token.type == tokenize.STRING and token.start in documented)
            for token in tokenize.tokenize(file.readline)
        )


def count(root: Path, is_one: Callable[[ast.AST], bool]) -> int:
    """Nodes of the package's syntax trees."""
    return sum(is_one(node) for path in modules(root).values() for node in ast.walk(tree_of(path)))


def is_message(node: ast.AST) -> bool:
    """A type of message between processes: a struct with a tag."""
    return isinstance(node, ast.ClassDef) and any(keyword.arg == "tag" for keyword in node.keywords)


def refuses_a_knob(node: ast.AST) -> bool:
    """``raise ConfigError(...)``."""
    raised = node.exc if isinstance(node, ast.Raise) else None
    return isinstance(raised, ast.Call) and isinstance(raised.func, ast.Name) and raised.func.id == "ConfigError"


def measure(root: Path) -> dict[str, object]:
    """Every figure of one checkout."""
    package = list(modules(root).values())
    together = [", ".join(group) for group in circles(edges(root))]
    longest = max((lines_of([path]), module) for module, path in modules(root).items())
    return {
        "lines of the package": lines_of(package),
        "code tokens of the package": sum(map(code_tokens_of, package)),
        "functions": count(root, lambda node: isinstance(node, Function)),
        "classes": count(root, lambda node: isinstance(node, ast.ClassDef)),
        "types of messages": count(root, is_message),
        "raise ConfigError": count(root, refuses_a_knob),
        "lines of tests": lines_of((root / "tests").rglob("*.py")),
        "files of the package": len(package),
        "comments, % of its lines": round(100 * sum(map(comments_of, package)) / lines_of(package), 1),
        "names at the top level": len({folder_of(module) for module in modules(root) if module != NAME}),
        "layers": layers(root),
        "circles of imports": "; ".join(together) or 0,
        "longest module": f"{longest[1]} {longest[0]}",
    }


def main() -> None:
    """Print the figures of the checkouts that are named, side by side, or of this one."""
    checkouts = [Path(name).resolve() for name in sys.argv[1:]] or [ROOT]
    measured = [measure(path) for path in checkouts]
    for title in measured[0]:
        print(title, *(one.get(title) for one in measured), sep=" | ")


if __name__ == "__main__":
    main()

"""Who may import whom, by folder: the rule of docs/architecture.md, checked on the syntax trees.

A new module needs no line here. A new name at the top level needs a layer, and should be rare.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from architecture import NAME, ROOT, circles, edges, folder_of, imports, imports_in, modules

import stream_balancer as sb

LAYERS = [
    {"errors", "values", "field_docs", "cost"},
    {"planning"},
    {"types", "statistics", "config"},
    {"core", "wire", "slots"},
    {"net", "facade", "learn"},
    {"host", "client"},  # the controller's process, and the others': what they share is below them
    {"tools", "metrics", "integrations", "ray"},
    {"testing"},
    {"cli"},
    {"__main__"},
]
"""Lowest first. A module imports its own package, and what lies in lower layers; packages of one layer never each
other. A single module may import, and be imported by, another name of its layer, as long as there is no circle."""

WAITING = {"anyio", "asyncio", "trio", "time", "threading", "random", "datetime", "concurrent", "multiprocessing"}
"""An event loop, a clock, a thread, or chance."""
PURE = set().union(*LAYERS[:3]) - {"errors"} | {"core", "learn", "wire"}
PURE_TOOLS = "generation length_models simulate simulation_report simulation_run trace tune tune_report"
PURE_MODULES = [f"tools.{name}" for name in PURE_TOOLS.split()]
PURE_MODULES += ["host.checkpoint", "host.plan_rows", "host.records"]
"""Pure modules in folders that are not."""
WITHOUT_TORCH = {"errors", "field_docs", "cost", "planning", "config", "core", "learn"}

EVERY = sorted(modules().keys() - {NAME})


def tops(module: str) -> set[str]:
    return {found.module.partition(".")[0] for found in imports(module)}


def short(module: str) -> str:
    return module.partition(".")[2]


def is_above(module: str, other: str) -> bool:
    """May the first import the second?"""
    mine, its = ((layer_of(folder_of(m)), is_package(folder_of(m))) for m in (module, other))
    return mine[0] > its[0] or (mine[0] == its[0] and not (mine[1] and its[1]))


def layer_of(name: str) -> int:
    (found,) = (level for level, names in enumerate(LAYERS) if name in names)
    return found


def is_package(name: str) -> bool:
    return modules()[f"{NAME}.{name}"].name == "__init__.py"


def test_imports_go_downwards() -> None:
    """Imports for types counted: a reader follows those, too."""
    upward = {
        (short(module), short(other))
        for module, imported in edges().items()
        for other in imported
        if folder_of(module) != folder_of(other) and not is_above(module, other)
    }
    assert upward == set()


def test_no_module_needs_itself() -> None:
    assert circles(edges(typing=False)) == []
    assert circles(edges()) == []


@pytest.mark.parametrize("module", [m for m in EVERY if folder_of(m) in PURE or short(m) in PURE_MODULES])
def test_pure_modules_neither_wait_nor_read_a_clock(module: str) -> None:
    assert not tops(module) & WAITING


def test_what_decides_knows_no_torch() -> None:
    assert [m for m in EVERY if folder_of(m) in WITHOUT_TORCH and "torch" in tops(m)] == []


def test_planning_knows_nothing_of_the_project_but_itself() -> None:
    assert {folder_of(other) for module in EVERY if folder_of(module) == "planning" for other in edges()[module]} == {
        "planning"
    }


def test_only_the_network_and_integrations_name_torch_distributed() -> None:
    allowed = ("net.", "client.barrier", "integrations.")  # trainers hand us their groups
    named = [m for m in EVERY if any(found.module.startswith("torch.distributed") for found in imports(m))]
    assert [m for m in named if not short(m).startswith(allowed)] == []


def test_nothing_unpickles() -> None:
    assert [m for m in EVERY if tops(m) & {"pickle", "cloudpickle", "marshal", "shelve", "dill"}] == []


INTEGRATIONS = [m for m in EVERY if folder_of(m) == "integrations"]
SHARED = ("integrations.partitions", "integrations._plans", "integrations._rows")
"""What several adapters stand on; neither knows any trainer."""


def test_no_adapter_imports_another() -> None:
    for module in INTEGRATIONS:
        own = ".".join(short(module).split(".")[:2])
        others = {short(other) for other in edges()[module] if folder_of(other) == "integrations"}
        assert all(other.startswith((own, *SHARED)) for other in others), module


SUBCLASSES = {"integrations.transfer_queue", "integrations.verl.sampler"}
"""These are their trainer's class, and nothing else."""


@pytest.mark.parametrize("module", [m for m in INTEGRATIONS if short(m) not in SUBCLASSES])
def test_an_adapter_imports_its_trainer_only_when_used(module: str) -> None:
    ours = {NAME, "torch", "numpy", "anyio", "msgspec", *sys.stdlib_module_names}
    body = ast.parse(Path(modules()[module]).read_text()).body
    at_the_top = ast.Module([node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))], [])
    assert {found.module.partition(".")[0] for found in imports_in(at_the_top, module)} <= ours


@pytest.mark.parametrize("module", INTEGRATIONS)
def test_an_adapter_uses_public_names_only(module: str) -> None:
    public = {NAME: {*sb.__all__, *sb._MODULE_OF}, f"{NAME}.planning": set(sb.planning.__all__)}
    of_alias = {"sb": public[NAME], "planning": public[f"{NAME}.planning"]}
    for node in ast.walk(ast.parse(Path(modules()[module]).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(NAME):
            if not (node.module or "").startswith(f"{NAME}.integrations"):
                assert {one.name for one in node.names} <= public.get(node.module or "", set()), node.module
        elif isinstance(node, ast.Import):
            assert all(one.name == NAME for one in node.names if one.name.startswith(NAME)), ast.unparse(node)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in of_alias:
            assert node.attr in of_alias[node.value.id], ast.unparse(node)


def test_the_graph_sees_relative_imports_functions_and_types(tmp_path: Path) -> None:
    package = tmp_path / NAME
    (package / "a").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "a" / "__init__.py").write_text("from .b import x\n")
    (package / "a" / "b.py").write_text(f"def f():\n    from {NAME} import c\n")
    (package / "c.py").write_text(f"import typing\nif typing.TYPE_CHECKING:\n    import {NAME}.a\n")
    a, b, c = f"{NAME}.a", f"{NAME}.a.b", f"{NAME}.c"
    assert edges(tmp_path) == {a: {b}, b: {c}, c: {a}}
    assert circles(edges(tmp_path)) == [[a, b, c]]
    assert circles(edges(tmp_path, typing=False)) == []


def test_the_architecture_page_shows_the_same_layers() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", page, re.MULTILINE)
    shown = {int(number): set(re.findall(r"`(\w+)`", names)) for number, names in rows}
    assert shown == dict(enumerate(LAYERS, start=1))

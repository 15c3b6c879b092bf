"""Rooms keep to their question: what each may import is checked on the syntax tree."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "stream_balancer"
WAITING = {"anyio", "asyncio", "trio", "time", "threading", "random", "datetime", "concurrent"}
PURE = [
    "cost.py",
    "config.py",
    "_admission.py",
    "_buffer.py",
    "_core.py",
    "_counts.py",
    "trace.py",
    "wire.py",
    "layout.py",
    "snapshot.py",
    "stall.py",
]
PURE += ["handover.py", "journal/records.py", "journal/contents.py"]
TORCHLESS = ["cost.py", "config.py", "_accept.py", "_admission.py", "_buffer.py", "_core.py", "_counts.py", "trace.py"]
PLANNING = sorted(f"planning/{p.name}" for p in (PACKAGE / "planning").glob("*.py"))


def imports_of(name: str) -> set[str]:
    """Every module a file imports, full dotted names, wherever in the file the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / name).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def tops(name: str) -> set[str]:
    return {module.split(".")[0] for module in imports_of(name)}


@pytest.mark.parametrize("name", PURE + PLANNING)
def test_pure_rooms_neither_wait_nor_read_a_clock(name: str) -> None:
    assert not tops(name) & WAITING


@pytest.mark.parametrize("name", TORCHLESS + PLANNING)
def test_deciding_rooms_know_no_torch(name: str) -> None:
    assert "torch" not in tops(name)


@pytest.mark.parametrize("name", PLANNING)
def test_planning_knows_nothing_of_the_project_but_itself(name: str) -> None:
    ours = {m for m in imports_of(name) if m.startswith("stream_balancer")}
    assert all(m.startswith("stream_balancer.planning") for m in ours)


def test_only_the_transport_names_torch_distributed() -> None:
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if name.startswith(("transport/", "demo/")):
            continue
        assert not any(m.startswith("torch.distributed") for m in imports_of(name)), name


def test_nothing_unpickles() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not tops(str(path.relative_to(PACKAGE))) & {"pickle", "cloudpickle", "marshal", "shelve", "dill"}, path


def test_there_is_no_utils_room() -> None:
    assert not list(PACKAGE.rglob("util*.py"))

"""Rooms keep to their question: what each may import is checked on the syntax tree."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "stream_balancer"
WAITING = {"anyio", "asyncio", "trio", "time", "threading", "random", "datetime", "concurrent"}
PURE = [
    "cost.py",
    "config.py",
    "core/admission.py",
    "core/batching.py",
    "core/buffer.py",
    "core/machine.py",
    "core/counters.py",
    "core/observer.py",
    "core/derived.py",
    "core/idle_time.py",
    "tools/trace.py",
    "wire/share.py",
    "tensors.py",
    "controller/checkpoint.py",
    "core/diagnosis.py",
    "core/auto_window.py",
    "core/calibration.py",
    "tools/tune.py",
    "tools/simulate.py",
]
PURE += ["wire/partial_share.py", "controller/journal/records.py", "controller/journal/contents.py"]
TORCHLESS = [
    "cost.py",
    "config.py",
    "core/accept.py",
    "core/admission.py",
    "core/batching.py",
    "core/buffer.py",
    "core/machine.py",
    "core/counters.py",
    "core/observer.py",
    "core/derived.py",
    "core/idle_time.py",
    "core/auto_window.py",
    "core/calibration.py",
    "tools/trace.py",
    "watch/status.py",
    "watch/view.py",
]
PLANNING = sorted(f"planning/{p.name}" for p in (PACKAGE / "planning").glob("*.py"))


@cache
def imports_of(name: str) -> set[str]:
    """Every module a file imports, full dotted names, wherever in the file the import stands."""
    return imports_in(ast.parse((PACKAGE / name).read_text()))


def imports_in(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
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


def test_only_the_edges_name_torch_distributed() -> None:
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if name.startswith(
            ("transport/", "rank/barrier.py", "demo/", "integrations/")
        ):  # trainers hand us their groups
            continue
        assert not any(m.startswith("torch.distributed") for m in imports_of(name)), name


def test_nothing_unpickles() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not tops(str(path.relative_to(PACKAGE))) & {"pickle", "cloudpickle", "marshal", "shelve", "dill"}, path


def test_there_is_no_utils_room() -> None:
    assert not list(PACKAGE.rglob("util*.py"))


INTEGRATIONS = sorted(p for p in (PACKAGE / "integrations").rglob("*.py"))


SHARED = ("stream_balancer.integrations.partitions", "stream_balancer.integrations._rows")
"""What several adapters stand on; neither knows any trainer."""


def test_nothing_imports_an_adapter_and_no_adapter_another() -> None:
    for path in PACKAGE.rglob("*.py"):
        own = ".".join(["stream_balancer", *path.relative_to(PACKAGE).with_suffix("").parts[:2]])
        adapters = {m for m in imports_of(str(path.relative_to(PACKAGE))) if "stream_balancer.integrations." in m}
        allowed = (own, *SHARED) if path in INTEGRATIONS else own
        assert all(m.startswith(allowed) for m in adapters), path


@pytest.mark.parametrize("path", INTEGRATIONS, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_an_adapter_imports_its_trainer_only_when_used(path: Path) -> None:
    ours = {"stream_balancer", "torch", "numpy", "anyio", "msgspec", *sys.stdlib_module_names}
    at_the_top = ast.Module(
        [n for n in ast.parse(path.read_text()).body if isinstance(n, (ast.Import, ast.ImportFrom))], []
    )
    assert {module.split(".")[0] for module in imports_in(at_the_top)} <= ours

"""The package: public names, what importing it needs, who may import whom (docs/architecture.md)."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest
import stubs
from architecture import NAME, ROOT, circles, edges, folder_of, imports, imports_in, modules
from guard import GUARD_S

import stream_balancer as sb


def in_a_new_process(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=GUARD_S
    ).stdout


def test_every_public_name_is_what_type_checkers_see() -> None:
    for path, text in stubs.files().items():
        assert path.read_text() == text, "run: python tests/stubs.py"
    for name, module in sb._MODULE_OF.items():
        assert getattr(sb, name) is vars(importlib.import_module(f"stream_balancer.{module}"))[name], name
    assert all(isinstance(module, ModuleType) for module in (sb.cost, sb.errors, sb.planning, sb.rollouts))
    assert [name for name in dir(sb) if not name.startswith("__")] == sb.__all__
    assert len(sb.__all__) == 21


def test_the_command_line_answers_without_torch() -> None:
    said = in_a_new_process(
        "import sys; from typer.testing import CliRunner; from stream_balancer.cli import app\n"
        "for args in (['--help'], ['replay', '--help'], ['demo', '--help'], ['tune', '--help'], ['status', '--help'],\n"
        "             ['--version']):\n"
        "    assert CliRunner().invoke(app, args).exit_code == 0, args\n"
        "print('torch' in sys.modules)"
    )
    assert said.strip() == "False"


def test_help_of_all_commands_reads_no_knob_and_that_of_one_each_class_once() -> None:
    said = in_a_new_process(
        "import ast, sys; from typer.testing import CliRunner; from stream_balancer.cli import app\n"
        "parse, texts = ast.parse, []\n"
        "ast.parse = lambda text, *more, **how: texts.append(text) or parse(text, *more, **how)\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "print(len(texts), 'numpy' in sys.modules, 'stream_balancer.config' in sys.modules)\n"
        "assert CliRunner().invoke(app, ['replay', '--help']).exit_code == 0\n"
        "own = [text for text in texts if text.startswith(('class', '@'))]\n"
        "print(len(own) > 2, len(own) == len(set(own)))"
    )
    assert said.splitlines() == ["0 False False", "True True"]


def test_planning_needs_numpy_only() -> None:
    said = in_a_new_process(
        "import sys; sys.modules['torch'] = sys.modules['anyio'] = sys.modules['msgspec'] = None\n"
        "from stream_balancer import planning\n"
        "print(planning.choose([3, 1, 2, 2], dp_size=2, batch_size=2).size, len(planning.split([3, 1, 2], 2)))"
    )
    assert said.strip() == "2 2"


def test_modules_are_there_without_importing_them() -> None:
    said = in_a_new_process("import stream_balancer as sb; print(sb.cost.TokenCost is sb.cost.TokenCost)")
    assert said.strip() == "True"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'stream_balancer' has no attribute 'Balancer'"):
        _ = sb.Balancer  # type: ignore[attr-defined]


def test_a_former_name_says_where_it_is() -> None:
    with pytest.raises(AttributeError, match=r"there is stream_balancer\.errors\.ConfigError$"):
        _ = sb.ConfigError  # type: ignore[attr-defined]


def test_pytest_looks_into_every_folder_of_tests(pytestconfig: pytest.Config) -> None:
    passed_over = pytestconfig.getini("norecursedirs")  # pytest's own list has "dist" and "build"
    tests = Path(__file__).parents[1]
    folders = {folder for path in tests.rglob("test_*.py") for folder in path.relative_to(tests).parts[:-1]}
    assert {"aio", "dist", "integrations", "unit"} <= folders
    assert [folder for folder in folders if any(fnmatch(folder, pattern) for pattern in passed_over)] == []


def test_every_test_file_has_tests_that_ci_runs() -> None:
    """`make test-all` leaves out what is marked soak."""
    tests = Path(__file__).parents[1]
    for path in tests.rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        marks = [[ast.unparse(d) for d in n.decorator_list] for n in found if n.name.startswith("test_")]
        assert any("pytest.mark.soak" not in of_one for of_one in marks), path
        assert not re.search(r"^pytestmark = .*soak", path.read_text(), re.M), path


LAYERS = [
    {"errors", "values", "field_docs", "cost"},
    {"planning"},
    {"rollouts", "statistics", "config"},
    {"core", "wire", "slots", "steps"},
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
PURE = set().union(*LAYERS[:3]) - {"errors"} | {"core", "learn", "steps", "wire"}
PURE_TOOLS = "generation length_models simulate simulation_report simulation_run trace tune tune_report"
PURE_MODULES = [f"tools.{name}" for name in PURE_TOOLS.split()]
PURE_MODULES += ["host.checkpoint", "host.records"]
"""Pure modules in folders that are not."""
WITHOUT_TORCH = {"errors", "field_docs", "cost", "planning", "config", "core", "learn", "steps"}

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


def test_the_architecture_page_shows_the_same_layers() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", page, re.MULTILINE)
    shown = {int(number): set(re.findall(r"`(\w+)`", names)) for number, names in rows}
    assert shown == dict(enumerate(LAYERS, start=1))

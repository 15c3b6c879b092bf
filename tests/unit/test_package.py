"""The package itself: every public name is there, and nothing is imported before it is used."""

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
    assert all(isinstance(module, ModuleType) for module in (sb.cost, sb.errors, sb.planning, sb.types))
    assert [name for name in dir(sb) if not name.startswith("__")] == sb.__all__
    assert len(sb.__all__) == 24


def test_the_command_line_answers_without_torch() -> None:
    said = in_a_new_process(
        "import sys; from typer.testing import CliRunner; from stream_balancer.cli import app\n"
        "for args in (['--help'], ['replay', '--help'], ['demo', '--help'], ['tune', '--help'], ['status', '--help'],\n"
        "             ['--version']):\n"
        "    assert CliRunner().invoke(app, args).exit_code == 0, args\n"
        "print('torch' in sys.modules)"
    )
    assert said.strip() == "False"


def test_planning_needs_numpy_only() -> None:
    said = in_a_new_process(
        "import sys; sys.modules['torch'] = sys.modules['anyio'] = sys.modules['msgspec'] = None\n"
        "from stream_balancer import planning\n"
        "print(planning.choose([3, 1, 2, 2], dp_size=2, batch_size=2).size, len(planning.partition([3, 1, 2], 2)))"
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

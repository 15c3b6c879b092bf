"""The examples in docstrings run, and every public planning function, cost model and layout has one."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest
from architecture import modules

import stream_balancer as sb
from stream_balancer.types import trees

WITH_EXAMPLES = [module for module, path in modules().items() if ">>> " in path.read_text()]
VALUES = {"OversizeError", "Plan", "PlanKnobs", "Waiting", "LengthBiasSummary"}  # shown where they are made
MUST_HAVE = [
    *(getattr(sb.planning, name) for name in sb.planning.__all__ if name not in VALUES),
    *(getattr(sb.cost, name) for name in sb.cost.__all__ if name.endswith("Cost")),
    trees.tree,
    sb.types.MicroBatch,
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_give_what_they_show(module: str) -> None:
    result = doctest.testmod(import_module(module))
    assert result.failed == 0
    assert result.attempted > 0


@pytest.mark.parametrize("thing", MUST_HAVE, ids=lambda thing: thing.__name__)
def test_what_computes_has_an_example(thing: object) -> None:
    assert "Examples:\n" in (thing.__doc__ or "")

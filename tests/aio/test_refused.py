"""Pairs of knobs, and of a knob and an option, that are refused: those of the table in docs/tuning.md, no others."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import fields
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import anyio
import pytest

import stream_balancer as sb
from stream_balancer.testing import BACKENDS, MemoryNetwork

PAGE = Path(__file__).parents[2] / "docs" / "tuning.md"
BATCH = 8
GROUPS = {"size": 2}

KNOBS: dict[str, dict[str, Any]] = {
    "batch_size": {"batch_size": BATCH},
    "window": {"window": 4 * BATCH},
    "deadline_s": {"deadline_s": 9.0},
    "max_skips": {"max_skips": 20},
    "capacity": {"capacity": 20 * BATCH},
    "min_batch_size": {"min_batch_size": 3},
    "PaddedCost()": {"cost": sb.cost.PaddedCost()},
    "CalibratedCost()": {"cost": sb.cost.CalibratedCost()},
    "equal_rollouts=True": {"equal_rollouts": True},
    'sync="micro_batch"': {"sync": "micro_batch"},
    'policy="fifo"': {"policy": "fifo"},
    'policy="round_robin"': {"policy": "round_robin"},
    "loss_mask_column": {"loss_mask_column": "mask"},
    "micro_batches.max_tokens": {"micro_batches": {"max_tokens": 60}, "sync": "step"},
    "micro_batches.equal_number=False": {"micro_batches": {"equal_number": False}},
    "micro_batches.multiple_of": {"micro_batches": {"multiple_of": 2}},
    "micro_batches.overhead_cost": {"micro_batches": {"overhead_cost": 1.0}},
    "micro_batches.oversize": {"micro_batches": {"max_tokens": 60, "oversize": "alone"}, "sync": "step"},
    "groups.size": {"groups": GROUPS},
    "groups.min_size": {"groups": {**GROUPS, "min_size": 1}},
    "groups.patience": {"groups": {**GROUPS, "min_size": 1, "patience": 3.0}},
    "staleness.max_versions": {"staleness": {"max_versions": 2}},
    "staleness.on_stale": {"staleness": {"max_versions": 2, "on_stale": "send"}},
    "max_bytes": {"max_bytes": 10**6},
    "mini_batches": {"mini_batches": 2},
}
NEEDS = {
    "groups.patience": "groups.min_size",
}
"""A knob that plays a part only beside another: it is refused with whatever that is refused with."""


async def _serve(balancer: sb.StreamBalancer, **options: Any) -> None:
    await sb.serve(balancer, MemoryNetwork(dp_size=balancer.config.dp_size), **options)


async def _reserve(balancer: sb.StreamBalancer) -> None:
    async with balancer.reserve(2):
        pass


OPTIONS: dict[str, Callable[[sb.StreamBalancer], Awaitable[None]]] = {
    'serve(on_rank_loss="replan")': partial(_serve, on_rank_loss="replan"),
    "reserve()": _reserve,
}


def config_of(*names: str, **more: Any) -> sb.BalancerConfig | None:
    """None where they are two values of one knob."""
    knobs: dict[str, Any] = {"dp_size": 2, "batch_size": BATCH, **more}
    for name in names:
        for knob, value in KNOBS[name].items():
            before = knobs.get(knob)
            if isinstance(value, dict) and isinstance(before, dict):
                if any(before.get(one, there) != there for one, there in value.items()):
                    return None
                knobs[knob] = {**before, **value}
            elif before is None or knob in more:
                knobs[knob] = value
            elif value not in (None, before):
                return None
    return sb.BalancerConfig(**knobs)


def in_the_table() -> set[frozenset[str]]:
    """Pairs of a name in the first column and one in the second."""
    rows = re.findall(
        r"^\| (.*) \| (.*) \| .* \|$", PAGE.read_text().partition("## What does not go together")[2], re.M
    )
    cells = [[re.findall("`([^`]+)`", cell) for cell in row] for row in rows]
    return {frozenset((one, other)) for first, second in cells for one in first for other in second}


def is_documented(*names: str) -> bool:
    ways = [{name, NEEDS.get(name, name)} for name in names]
    table = in_the_table()
    return any(frozenset((one, other)) in table for one in ways[0] for other in ways[1])


def test_every_knob_is_tried() -> None:
    groups = {"micro_batches": sb.MicroBatches, "groups": sb.Groups, "staleness": sb.Staleness}
    plain = {field.name for field in fields(sb.BalancerConfig)} - groups.keys() - {"cost"}
    grouped = {f"{group}.{field.name}" for group, of in groups.items() for field in fields(of)}
    tried = {re.sub("=.*", "", name) for name in KNOBS}
    assert plain | grouped <= tried | {"dp_size"}


def test_pairs_of_knobs_that_are_refused_are_those_of_the_table() -> None:
    wrong = []
    for pair in combinations(KNOBS, 2):
        try:
            refused = "" if config_of(*pair) is not None else None
        except sb.errors.ConfigError as error:
            refused = str(error)
        if refused is not None and bool(refused) != is_documented(*pair):
            wrong.append((pair, refused))
    assert not wrong


@pytest.mark.parametrize("anyio_backend", BACKENDS[:1], indirect=True)
@pytest.mark.parametrize("option", OPTIONS)
async def test_knobs_that_an_option_refuses_are_those_of_the_table(option: str) -> None:
    wrong = []
    for name in KNOBS:
        config = config_of(name, **({"staleness": {"max_versions": 2}} if option == "reserve()" else {}))
        refused = ""
        if config is not None:
            balancer = sb.StreamBalancer(config)
            async with balancer:
                with anyio.move_on_after(0.001):
                    try:
                        await OPTIONS[option](balancer)
                    except sb.errors.ConfigError as error:
                        refused = str(error)
            if bool(refused) != is_documented(option, name):
                wrong.append((name, refused))
    assert not wrong

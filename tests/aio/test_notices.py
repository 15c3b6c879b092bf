"""What would go wrong in silence is in the log, once: bounds that nobody checks, batches that nobody acknowledges,
groups that are incomplete at the end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import helpers
import pytest

import stream_balancer as sb
from stream_balancer.testing import make_rollout

config = partial(helpers.config, batch_size=4, window=4, capacity=100)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "stream_balancer.balancer"]


async def train(balancer: sb.StreamBalancer, versions: Sequence[int | None], *, sets: bool = True) -> None:
    """Two steps; ``versions`` of each four rollouts."""
    batches = balancer.batches()
    for step in range(2):
        for number, version in enumerate(versions):
            await balancer.put(make_rollout(3, f"{step}.{number}", version=version))
        await anext(batches)
        if sets:
            balancer.set_version(step + 1)
    balancer.end()
    assert [batch async for batch in batches] == []


@pytest.mark.parametrize(
    ("most", "versions", "sets", "warnings", "unchecked"),
    [
        (None, [None] * 4, False, [], 0),
        (5, [0, 0, 0, 0], True, [], 4),
        (
            5,
            [0, None, 0, None],
            True,
            ["staleness.max_versions=5 is not checked for rollouts without .* 2 of step 0, .* '0.[13]'"],
            6,
        ),
        (
            5,
            [0, 0, 0, 0],
            False,
            [r"staleness.max_versions=5 is not checked: 2 steps .* set_version\(\) was never called"],
            8,
        ),
    ],
)
async def test_a_bound_on_staleness_that_nobody_checks(
    caplog: pytest.LogCaptureFixture, most: int | None, versions: Any, sets: bool, warnings: list[str], unchecked: int
) -> None:
    async with sb.StreamBalancer(config(staleness=sb.Staleness(max_versions=most))) as balancer:
        await train(balancer, versions, sets=sets)
        statistics = balancer.statistics()
    assert len(said(caplog)) == len(warnings)
    assert all(re.match(warning, line) for warning, line in zip(warnings, said(caplog), strict=True))
    assert statistics.unchecked_rollouts == unchecked
    assert (f"staleness: not checked for {unchecked} rollouts" in str(statistics)) == bool(unchecked)


@pytest.mark.parametrize(("acknowledges", "ends"), [(False, True), (True, True), (False, False)])
async def test_batches_that_nobody_acknowledged_are_named_at_the_end(
    caplog: pytest.LogCaptureFixture, acknowledges: bool, ends: bool
) -> None:
    async with sb.StreamBalancer(config()) as balancer:
        for number in range(12):
            await balancer.put(make_rollout(3, f"r{number}"))
        batches = balancer.batches(auto_ack=False)
        for step in range(3):
            await anext(batches)
            if acknowledges or step == 0:
                balancer.acknowledge(step)
        if ends:
            balancer.end()
    lines = [line.partition(" were ")[0] for line in said(caplog)]
    # who leaves before the end is not asked
    assert lines == (["closed before steps [1, 2]"] if ends and not acknowledges else [])


async def test_groups_that_are_incomplete_at_the_end_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with sb.StreamBalancer(config(groups=sb.Groups(size=2))) as balancer:
        for number in range(7):
            await balancer.put(make_rollout(3, f"r{number}", group_id=f"g{number % 4}"))
        await balancer.put(make_rollout(3, "r7", group_id="g7"))
        balancer.end()
        balancer.end()
        assert sum([len(batch.incomplete_groups) async for batch in balancer.batches()]) == 2
    [line] = said(caplog)
    assert line.startswith("end(): groups that lack siblings leave incomplete (2): 'g3' (1 of 2), 'g7' (1 of 2)")

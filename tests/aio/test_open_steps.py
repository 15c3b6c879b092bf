"""Steps that begin before they are complete: rows as they form, denominators with the last, whole steps again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from helpers import config, settle, waiting

import stream_balancer as sb
from stream_balancer.errors import ConfigError
from stream_balancer.host.batches import Batches
from stream_balancer.rollouts import Batch, RankBatch
from stream_balancer.testing import MemoryNetwork, make_rollout

rows_of_six = partial(config, batch_size=6, window=6, cost=sb.cost.TokenCost())
LENGTHS = (9, 1, 5, 2, 4, 3)


async def put(balancer: sb.StreamBalancer, *numbers: int, step: int = 0) -> None:
    for number in numbers:
        await balancer.put(make_rollout(LENGTHS[number], f"{step}.{number}"))


def ids(batch: Batch | RankBatch) -> list[str]:
    return sorted(r.rollout_id for r in batch.rollouts if not r.is_padding)


async def test_rows_leave_as_they_form_and_the_denominators_come_with_the_last() -> None:
    async with sb.StreamBalancer(rows_of_six()) as balancer:
        rows = balancer.batches(open=True)
        await put(balancer, 0, 1, 2, 3)
        first = await anext(rows)
        assert (first.step, first.is_last, ids(first)) == (0, False, ["0.0", "0.2"])  # the heaviest, one for each rank
        with pytest.raises(ValueError, match=r"step 0 is open, and more rows of it come.*divide them once"):
            _ = first.ranks[0].global_num_loss_tokens
        assert balancer.in_flight() == ()
        assert len(waiting(balancer)) == 4
        await put(balancer, 4, 5)
        last = await anext(rows)
        assert (last.step, last.is_last, ids(last)) == (0, True, ["0.1", "0.3", "0.4", "0.5"])
        assert [one.global_num_tokens for one in last.ranks] == [sum(LENGTHS)] * 2
        assert last.ranks[0].global_num_rollouts == 6
        assert last.num_rollouts == 4
        (whole,) = balancer.in_flight()
        assert ids(whole) == [f"0.{number}" for number in range(6)]
        assert (sorted(whole.loads), whole.finish, whole.lower_bound) == ([10, 14], 14, 12)
        await put(balancer, 0, 1, step=1)
        assert (await anext(rows)).step == 1
        assert balancer.in_flight() == ()
        assert balancer.statistics().acknowledged == 6


async def test_nothing_of_an_open_step_is_given_up() -> None:
    async with sb.StreamBalancer(
        rows_of_six(groups=sb.Groups(size=2), staleness=sb.Staleness(max_versions=0))
    ) as balancer:
        rows = balancer.batches(open=True)
        balancer.set_version(0)
        group = [make_rollout(3, f"a{n}", group_id="a", version=0) for n in range(2)]
        await balancer.put_group(group)
        await balancer.put(make_rollout(9, "b0", group_id="b", version=0))
        assert ids(await anext(rows)) == ["a0", "a1"]  # whole groups: b lacks a sibling
        balancer.set_version(1)
        assert balancer.abandon_group("a") == 0
        assert waiting(balancer) == ["a0", "a1"]
        balancer.end()
        last = await anext(rows)
        assert last.ranks[0].global_num_rollouts == 2
        assert await anext(rows, None) is None
        assert balancer.statistics().evicted["stale"] == 1


async def test_on_policy_rows_of_the_next_step_wait_for_the_update() -> None:
    async with sb.StreamBalancer(rows_of_six(staleness=sb.Staleness(max_versions=0))) as balancer:
        balancer.set_version(0)
        rows = balancer.batches(open=True)
        for number in range(6):
            await balancer.put(make_rollout(1, f"0.{number}", version=0))
        assert (await anext(rows)).is_last
        await balancer.put(make_rollout(1, "late", version=0))
        balancer.set_version(1)
        assert waiting(balancer) == []
        for number in range(2):
            await balancer.put(make_rollout(1, f"1.{number}", version=1))
        assert ids(await anext(rows)) == ["1.0", "1.1"]


async def cancel_the_last_row(balancer: sb.StreamBalancer, rows: Batches) -> None:
    """Of step 0, on its way to the trainer."""
    await put(balancer, *range(3))
    await anext(rows)
    await put(balancer, *range(3, 6))
    with anyio.CancelScope() as scope:
        scope.cancel()
        await anext(rows)
    for passes in range(20):  # also while the disk is waited for
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anext, rows)
            for _ in range(passes):
                await anyio.lowlevel.checkpoint()
            given = balancer.in_flight()
            tasks.cancel_scope.cancel()
        if given:
            break


@pytest.mark.parametrize("acknowledged", [False, True], ids=["open", "acknowledged"])
async def test_a_row_that_is_cancelled_on_its_way_is_given_again_unless_its_step_is_over(
    tmp_path: Path, acknowledged: bool
) -> None:
    async with sb.StreamBalancer(rows_of_six(), journal=tmp_path / "j") as balancer:
        rows = balancer.batches(open=True)
        await cancel_the_last_row(balancer, rows)
        if acknowledged:
            balancer.acknowledge_through(0)
            await put(balancer, 0, 1, step=1)
        row = await anext(rows)
        assert (row.step, row.is_last) == ((1, False) if acknowledged else (0, True))


async def test_a_window_that_was_not_given_is_as_wide_as_a_step_while_steps_come_in_rows() -> None:
    async with sb.StreamBalancer(config(batch_size=6)) as balancer:
        assert balancer.config.window == 9
        rows = balancer.batches(open=True)
        await put(balancer, *range(6))
        assert (await anext(rows)).is_last
        balancer.reconfigure(dp_size=3)
        assert balancer.config.window == 6
        await put(balancer, *range(6), step=1)
        assert (await anext(rows)).is_last
        balancer.batches()
        assert balancer.config.window == 9


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"window": 12}, "window: rows leave as they form"),
        ({"window": 6, "mini_batches": 2}, "mini_batches"),
    ],
)
async def test_knobs_that_rows_cannot_respect_are_refused(knobs: dict[str, Any], why: str) -> None:
    async with sb.StreamBalancer(config(batch_size=6, **knobs)) as balancer:
        with pytest.raises(ConfigError, match=why):
            balancer.batches(open=True)


async def test_ranks_cannot_become_others_in_the_middle() -> None:
    async with sb.StreamBalancer(rows_of_six()) as balancer:
        rows = balancer.batches(open=True)
        balancer.reconfigure(dp_size=1)
        balancer.reconfigure(dp_size=2)
        for length in (3, 4, 5):
            await balancer.put(make_rollout(length))
        assert not (await anext(rows)).is_last
        with pytest.raises(ConfigError, match="dp_size cannot change in the middle of a step"):
            balancer.reconfigure(dp_size=3)


# -- through serve() ---------------------------------------------------------------------------------------------------


async def train(feed: sb.RankFeed, got: list[tuple[int, list[str]]], ends: list[Any] | None = None) -> None:
    """What it got of each step, micro-batch by micro-batch."""
    async for step in feed:
        got.append((step.step, []))
        async for micro_batch in step:
            got[-1][1].extend(rollout.rollout_id for rollout in micro_batch.rollouts)
        end = await step.async_finish()
        assert end is not None
        assert end.rollouts == step.global_num_rollouts == 6
        if ends is not None:
            ends.append(end)


@pytest.mark.parametrize("meets", [False, True])
async def test_every_rank_begins_with_what_has_come_and_the_step_is_acknowledged_as_a_whole(meets: bool) -> None:
    got: list[list[Any]] = [[], []]
    options = {"on_rank_loss": "replan"} if meets else {}
    async with sb.StreamBalancer(rows_of_six()) as balancer, anyio.create_task_group() as tasks:
        transport = MemoryNetwork(dp_size=2)
        tasks.start_soon(partial(sb.serve, balancer, transport, open=True, **options))
        for rank in range(2):
            tasks.start_soon(train, sb.RankFeed(transport.connect(rank, depth=1)), got[rank])
        for step in range(3):
            for number in range(6):
                await put(balancer, number, step=step)
                await settle()
                began = [ids for rank in got for at, ids in rank if at == step]
                assert sum(map(len, began)) == number + (number % 2), "a row needs a rollout for each rank"
                assert balancer.in_flight() == () or number == 5 or step > 0
        balancer.end()
    for step in range(3):
        its = sorted(name for rank in got for number, names in rank if number == step for name in names)
        assert its == [f"{step}.{number}" for number in range(6)]
    assert balancer.statistics().acknowledged == 18


def siblings(name: str, count: int) -> list[sb.Rollout]:
    return [make_rollout(LENGTHS[n % 6], f"{name}{n}", group_id=name) for n in range(count)]


async def more_than_a_batch(balancer: sb.StreamBalancer) -> None:
    executions = [replace(one, execution_id=f"{at % 2}") for at, one in enumerate(siblings("big", 8))]
    await balancer.put_group(executions)  # two of four rollouts each


async def answered_late(balancer: sb.StreamBalancer) -> None:
    async with anyio.create_task_group() as puts:
        puts.start_soon(balancer.put_group, siblings("no", 2))
        puts.start_soon(balancer.put_group, siblings("yes", 2))
        await settle()
        assert not {"no0", "no1", "yes0", "yes1"}.intersection(waiting(balancer))
        await balancer.put_group(siblings("b", 2))
        await balancer.put_group(siblings("c", 2))  # the step is whole without those


async def abandoned(balancer: sb.StreamBalancer) -> None:
    (first, _) = siblings("gone", 2)
    await balancer.put(first)
    assert balancer.abandon_group("gone") == 1


async def judge(rollouts: Sequence[sb.Rollout]) -> bool:
    if rollouts[0].group_id in ("no", "yes"):
        await anyio.sleep(60.0)
    return rollouts[0].group_id != "no"


@pytest.mark.parametrize(
    ("happens", "steps", "evicted"),
    [
        (more_than_a_batch, [{"a": 2, "big": 4}, {"big": 4, "b": 2}, {"c": 2, "d": 2, "e": 2}], {}),
        (answered_late, [{"a": 2, "b": 2, "c": 2}, {"yes": 2, "d": 2, "e": 2}], {"filtered": 2}),
        (abandoned, [{"a": 2, "b": 2, "c": 2}, {"d": 2, "e": 2}], {"abandoned": 1}),
    ],
)
async def test_what_may_happen_to_a_group_in_the_midst_of_an_open_step(
    happens: Callable[[sb.StreamBalancer], Awaitable[None]], steps: list[dict[str, int]], evicted: dict[str, int]
) -> None:
    seen = dict[int, Counter[str]]()

    async def trained(feed: sb.RankFeed) -> None:
        async for step in feed:
            async for micro_batch in step:
                seen.setdefault(step.step, Counter()).update(r.group_id or "" for r in micro_batch.rollouts)
            await step.async_finish()

    knobs = rows_of_six(groups=sb.Groups(size=2), capacity=24)
    async with sb.StreamBalancer(knobs, accept=judge) as balancer, anyio.create_task_group() as tasks:
        transport = MemoryNetwork(dp_size=2)
        tasks.start_soon(partial(sb.serve, balancer, transport, open=True))
        for rank in range(2):
            tasks.start_soon(trained, sb.RankFeed(transport.connect(rank)))
        await balancer.put_group(siblings("a", 2))
        await settle()
        assert seen == {0: {"a": 2}}
        await happens(balancer)
        for name in "bcde":
            if name not in set().union(*seen.values()):
                await balancer.put_group(siblings(name, 2))
        balancer.end()
    assert [seen[number] for number in range(len(seen))] == steps
    assert {why: count for why, count in balancer.statistics().evicted.items() if count} == evicted


async def test_a_loop_over_micro_batches_gets_the_whole_step() -> None:
    async with sb.StreamBalancer(rows_of_six()) as balancer, anyio.create_task_group() as tasks:
        transport = MemoryNetwork(dp_size=2)
        tasks.start_soon(partial(sb.serve, balancer, transport, open=True))
        feeds = [sb.RankFeed(transport.connect(rank)) for rank in range(2)]
        await put(balancer, 0, 1)
        steps = [await anext(feed) for feed in feeds]
        with pytest.raises(RuntimeError, match="async for micro_batch in step"):
            _ = steps[0].micro_batches
        with pytest.raises(ValueError, match="is open, and more of it comes"):
            steps[0].ack()
        await put(balancer, 2, 3, 4, 5)
        await settle()
        assert sorted(name for step in steps for name in ids_of(*step.micro_batches)) == [f"0.{n}" for n in range(6)]
        assert {step.global_num_rollouts for step in steps} == {6}
        balancer.end()
        for feed in feeds:
            tasks.start_soon(drain, feed)
    assert balancer.statistics().acknowledged == 6


async def drain(feed: sb.RankFeed) -> None:
    assert [step async for step in feed] == []


def ids_of(*micro_batches: sb.rollouts.MicroBatch) -> list[str]:
    return [rollout.rollout_id for one in micro_batches for rollout in one.rollouts if not rollout.is_padding]

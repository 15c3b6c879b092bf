"""Columns that other models compute on ranks of their own, before the trainer's ranks get the step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import pytest
import torch
from helpers import give, kill
from served import Served, real
from torch import Tensor

import stream_balancer as sb
from stream_balancer.rollouts import MicroBatch, Rollout
from stream_balancer.testing import make_rollouts

pytestmark = pytest.mark.anyio
REF = {"ref": ["ref_logprobs"]}
ROLES = REF | {"value": ["values", "value_ranks"]}


def computed(role: str, micro_batches: Sequence[MicroBatch]) -> dict[str, list[Tensor]]:
    """What the role's model says of each micro-batch; each value follows from its token alone."""
    ids = [micro_batch.packed()["input_ids"] for micro_batch in micro_batches]
    if role == "ref":
        return {"ref_logprobs": [-one.float() / 7 for one in ids]}
    return {"values": [one.double() * 3 for one in ids], "value_ranks": [one % 5 for one in ids]}


class Run(Served):
    """Ranks of each role, too, and what they computed."""

    def __init__(self, *, roles: Mapping[str, Sequence[str]] = REF, dp_size: int = 1, **knobs: Any) -> None:
        super().__init__(roles=roles, dp_size=dp_size, **({"batch_size": 8} | knobs))
        self.computed: list[tuple[str, int, int]] = []
        """Role, rank and step, as they were given."""

    async def compute(self, role: str, rank: int, *, dies_at: int | None = None, **join: Any) -> None:
        """A rank of a role; ``dies_at``: step, before it gives its columns."""
        feed = self.feed(rank, role=role, **join)
        async for batch in feed:
            if batch.step == dies_at:
                kill(feed)
                return
            self.computed.append((role, rank, batch.step))
            give(batch, computed(role, batch.micro_batches))

    def computing(self, *ranks: int) -> list[Callable[[], Any]]:
        """All ranks of all roles."""
        return [partial(self.compute, role, rank) for role in self.roles for rank in ranks or self.ranks]

    def check(self) -> None:
        """Every token has its columns, on every rank."""
        assert self.seen
        for batch in self.seen:
            for micro_batch in batch.micro_batches:
                packed = micro_batch.packed()
                for role in self.roles:
                    for name, (expected,) in computed(role, [micro_batch]).items():
                        assert packed[name].dtype == expected.dtype
                        assert torch.equal(packed[name], expected), name
            late = {name for names in self.roles.values() for name in names}
            assert all(late < set(rollout.tokens) for rollout in batch.rollouts)


def lengths(*tokens: int) -> list[Rollout]:
    return list(make_rollouts(tokens))


async def test_a_step_has_the_columns_of_all_roles() -> None:
    run = Run(roles=ROLES, dp_size=2)
    await run.run(lengths(*(3 * n % 50 + 1 for n in range(43))), *run.computing())
    run.check()
    assert sorted(one.rollout_id for one in real(run.seen)) == sorted(run.rollouts)
    steps = sorted({batch.step for batch in run.seen})
    assert sorted(run.computed) == sorted((role, rank, step) for role in ROLES for rank in run.ranks for step in steps)
    assert run.balancer.in_flight() == ()
    assert run.balancer.statistics().acknowledged == 43


async def test_a_lost_rank_of_a_role_ends_serve_by_name_when_nobody_waits_for_it() -> None:
    run = Run(dp_size=2)
    async with run.balancer:
        trainers = [run.feed(rank) for rank in run.ranks]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(run.compute, "ref", 1, dies_at=0))
            waiting = run.feed(0, role="ref")
            await run.put(lengths(*range(1, 17)))
            with pytest.raises(sb.errors.RankLostError, match="rank 1 of role 'ref'") as raised:
                await run.serve()
        assert raised.value.rank == 1
        assert [batch.step for batch in run.balancer.in_flight()] == [0]
        assert (waiting.rank, [feed.waiting_s for feed in trainers]) == (0, [0.0, 0.0])


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_roles_run_ahead_of_the_trainer_by_its_credits_and_no_further(depth: int) -> None:
    run = Run(batch_size=2)
    async with run.balancer, anyio.create_task_group() as tasks:
        tasks.start_soon(run.serve)
        tasks.start_soon(partial(run.compute, "ref", 0, depth=8))
        trainer = run.feed(0, depth=depth)
        tasks.start_soon(run.put, lengths(*range(1, 61)))
        await anyio.sleep(10)
        assert len(run.computed) == depth
        await anext(trainer)
        await anyio.sleep(10)
        assert len(run.computed) == depth + 1
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("last", [False, True])
async def test_other_columns_than_were_asked_for_are_refused_at_both_ends(last: bool) -> None:
    run = Run(window=8 if last else 16)
    async with run.balancer:
        feed, _ = run.feed(0, role="ref"), run.feed(0)
        await run.put(lengths(*range(1, 9 if last else 17)))

        async def compute() -> None:
            batch = await anext(feed)
            if last:
                run.balancer.end()
            give(batch, {"logprobs": [micro_batch.packed()["input_ids"] for micro_batch in batch.micro_batches]})
            with pytest.raises(
                sb.errors.RefusedError, match=r"is to give the columns \['ref_logprobs'\], not \['logprobs'\]"
            ):
                await anext(feed)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(compute)
            with pytest.raises(sb.errors.RankLostError, match=r"not \['logprobs'\]"):
                await run.serve()


async def test_a_step_begins_when_its_first_columns_are_there() -> None:
    """Columns travel item by item."""
    run = Run(micro_batches=sb.MicroBatches(max_tokens=8))
    trained: list[int] = []
    async with run.balancer, anyio.create_task_group() as tasks:
        tasks.start_soon(run.serve)
        feed, trainer = run.feed(0, role="ref"), run.feed(0)

        async def train() -> None:
            async for step in trainer:
                async for micro_batch in step:
                    assert torch.equal(micro_batch.packed()["ref_logprobs"], -micro_batch.packed()["input_ids"] / 7)
                    trained.append(step.step)
                end = await step.async_finish()
                assert end is not None
                assert end.rollouts == step.global_num_rollouts == 8

        tasks.start_soon(train)
        await run.put(lengths(*[4] * 16))
        run.balancer.end()
        async for step in feed:
            number = 0
            async for micro_batch in step:
                await anyio.sleep(1)
                # whoever has not called finish() yet gets whole steps
                assert trained.count(step.step) == (number if step.step else 0)
                micro_batch.give(**{name: one for name, (one,) in computed("ref", [micro_batch]).items()})
                number += 1
            assert number == 4
    assert trained == [0] * 4 + [1] * 4


async def test_a_role_that_is_not_asked_for_anything_learns_so() -> None:
    run = Run()

    async def ask() -> None:
        with pytest.raises(sb.errors.RefusedError, match=r"rank 0 of role 'critic' .* has the roles \['ref'\]"):
            await anext(run.feed(0, role="critic"))
        with pytest.raises(ValueError, match=r"rank 0 of role 'ref' announces dp_size=3.*the trainer's plan"):
            await anext(run.feed(0, role="ref", dp_size=3))

    await run.run(lengths(*range(1, 17)), ask, *run.computing())
    run.check()


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        ({"": ["x"]}, "a role has a name"),
        ({"ref": []}, "a list of 1 to 64 names"),
        ({"ref": "ref_logprobs"}, "a list of 1 to 64 names"),
        ({"ref": ["x"], "value": ["x"]}, "give one column twice"),
        ({"ref": ["loss_mask", "x"]}, r"\['loss_mask'\] cannot come late"),
    ],
)
async def test_roles_that_nobody_could_have_are_refused(roles: Any, text: str) -> None:
    run = Run(roles={})
    async with run.balancer:
        with pytest.raises(ValueError, match=text):
            await run.serve(roles=roles)


async def test_a_column_that_rollouts_have_already_is_refused() -> None:
    run = Run(roles={"ref": ["input_ids2"]})
    async with run.balancer as balancer, anyio.create_task_group() as tasks:
        for n in range(16):
            await balancer.put(sb.Rollout(tokens={"input_ids": [1, n]}, scalars={"input_ids2": 3.0}))
        feeds = run.feed(0), run.feed(0, role="ref")  # one that is dropped leaves
        with pytest.raises(ValueError, match=r"role 'ref' is to give 'input_ids2', which rollout .* has already"):
            await run.serve()
        assert feeds
        tasks.cancel_scope.cancel()


async def test_a_stall_names_the_role(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(roles=ROLES, dp_size=2)
    caplog.set_level(logging.WARNING, "stream_balancer.dispatch")
    async with run.balancer, anyio.create_task_group() as tasks:
        tasks.start_soon(run.serve)
        feeds = [run.feed(rank) for rank in run.ranks] + [run.feed(rank, role="value") for rank in run.ranks]
        ref = run.feed(0, role="ref")
        tasks.start_soon(run.put, lengths(*range(1, 61)))
        await anyio.sleep(61)
        assert "rank 1 of role 'ref' has not connected in" in caplog.text
        late = run.feed(1, role="ref")
        batch = await anext(ref)
        give(batch, computed("ref", batch.micro_batches))
        for feed in feeds[2:]:
            batch = await anext(feed)
            give(batch, computed("value", batch.micro_batches))
        caplog.clear()
        await anyio.sleep(200)
        assert "step 0 waits for the columns of rank 1 of role 'ref'" in caplog.text
        assert late.waiting_s == 0.0
        tasks.cancel_scope.cancel()


async def test_what_a_role_could_not_fetch_is_masked_for_the_trainer_though_that_could() -> None:
    """Else it would train on columns of nothing."""
    run, rollouts = Run(dp_size=2, batch_size=4), lengths(10, 20, 30, 40)

    def gone_at_first() -> None:
        run.kept.gone = set() if run.computed else {1}  # the role's rank fetches first

    run.kept._die = gone_at_first
    await run.run(rollouts, *run.computing(), remote=True, rejoin_timeout_s=math.inf)
    left = [one.rollout_id for one in rollouts if one is not rollouts[1]]
    assert sorted(one.rollout_id for one in real(run.seen)) == sorted(left)
    assert {(b.global_num_rollouts, b.global_num_tokens, b.global_num_loss_tokens) for b in run.seen} == {(3, 80, 77)}
    assert run.balancer.statistics().evicted["lost"] == 1

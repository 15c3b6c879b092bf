"""Clauses of the transports' contract: ranks that have a role, and the columns that they give."""

from __future__ import annotations

from functools import partial

import anyio
import torch
from torch import Tensor

from stream_balancer.controller.serve import serve
from stream_balancer.errors import RankLostError
from stream_balancer.rank.feed import RankFeed
from stream_balancer.testing.harness import CLAUSE_TIMEOUT_S, Opener, accepted, collect, raises, until
from stream_balancer.testing.scripted import ScriptedBalancer, make_batch
from stream_balancer.transport import Report
from stream_balancer.transport.late_columns import GivenColumns
from stream_balancer.types import SUPPORTED_DTYPES, RankBatch

__all__ = ["CLAUSES"]

ROLES = {"ref": ["ref_logprobs", "ref_entropy"], "value": ["values"]}


def _computed(role: str, batch: RankBatch) -> dict[str, list[Tensor]]:
    ids = [micro_batch.packed()["input_ids"] for micro_batch in batch.micro_batches]
    if role == "value":
        return {"values": [one * 5 for one in ids]}
    return {"ref_logprobs": [-one.float() for one in ids], "ref_entropy": [one.double() / 3 for one in ids]}


async def _compute(feed: RankFeed, role: str) -> None:
    async for batch in feed:
        batch.ack(columns=_computed(role, batch))


async def columns_of_roles_are_joined_before_the_trainers_ranks_get_a_step(open_harness: Opener) -> None:
    """Ten steps of two ranks, through ``serve``; a rank of a role and one of the trainer are killed on the way."""
    async with open_harness(2) as harness:
        balancer = ScriptedBalancer([make_batch(step, 2, num_tokens=300) for step in range(10)])
        trained: dict[int, list[int]] = {0: [], 1: []}

        async def train(rank: int, *, dies_at: int | None = None, incarnation: int = 0) -> None:
            feed = harness.connect(rank, incarnation=incarnation)
            async for batch in feed:
                if batch.step == dies_at:
                    harness.kill(feed)
                    await train(rank, incarnation=1)
                    return
                trained[rank].append(batch.step)
                for micro_batch in batch.micro_batches:
                    packed = micro_batch.packed()
                    ids = packed["input_ids"]
                    assert torch.equal(packed["ref_logprobs"], -ids.float())
                    assert torch.equal(packed["ref_entropy"], ids.double() / 3)
                    assert torch.equal(packed["values"], ids * 5)

        async def compute_and_die() -> None:
            feed = harness.connect(1, role="ref")
            async for batch in feed:
                if batch.step == 3:
                    break
                batch.ack(columns=_computed("ref", batch))
            harness.kill(feed)
            await _compute(harness.connect(1, role="ref", incarnation=1), "ref")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(train, 0, dies_at=6))
            tasks.start_soon(train, 1)
            tasks.start_soon(compute_and_die)
            tasks.start_soon(_compute, harness.connect(0, role="ref"), "ref")
            for rank in range(2):
                tasks.start_soon(_compute, harness.connect(rank, role="value"), "value")
            await serve(balancer, harness.transport, rejoin_timeout_s=CLAUSE_TIMEOUT_S, roles=ROLES)
        assert trained[1] == list(range(10))
        assert sorted(set(trained[0])) == list(range(10))  # what it had acknowledged last may have been lost with it
        assert balancer.acknowledged == list(range(10))


async def columns_come_as_they_were_given(open_harness: Opener) -> None:
    """Every dtype, and a rank of the trainer with the same number beside it."""
    async with open_harness(1) as harness:
        trainer = harness.connect(0)
        await accepted(harness.transport)
        feed = harness.connect(0, role="ref")
        link = await accepted(harness.transport)
        assert (link.rank, link.role) == (0, "ref")
        link.send(make_batch(0, 1, num_tokens=5000).ranks[0])
        batch = await anext(feed)
        generator = torch.Generator().manual_seed(0)
        given = {
            str(dtype): [
                torch.rand(mb.num_tokens, generator=generator).mul(100).to(dtype) for mb in batch.micro_batches
            ]
            for dtype in SUPPORTED_DTYPES
        }
        batch.ack(columns=given)
        batch.ack()  # it is acknowledged
        reports: list[Report] = []
        await until(lambda: collect(link, reports))
        (report,) = reports
        assert isinstance(report, GivenColumns)
        assert report.step == 0
        for name, parts in given.items():
            assert report.columns[name].dtype == parts[0].dtype
            assert torch.equal(report.columns[name], torch.cat(parts)), f"{name} has changed on its way"
        for one in (feed, trainer):
            await one.aclose()


async def a_role_that_nobody_asked_for_learns_so(open_harness: Opener) -> None:
    """And ``serve`` goes on."""
    async with open_harness(1) as harness:
        balancer = ScriptedBalancer([make_batch(0, 1)], hold=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve, balancer, harness.transport)
            with raises(RankLostError) as raised:
                await anext(harness.connect(0, role="critic"))
            assert "rank 0 of role 'critic'" in str(raised.error)
            trainer = harness.connect(0)
            assert (await anext(trainer)).step == 0
            tasks.cancel_scope.cancel()


CLAUSES = (
    columns_of_roles_are_joined_before_the_trainers_ranks_get_a_step,
    columns_come_as_they_were_given,
    a_role_that_nobody_asked_for_learns_so,
)

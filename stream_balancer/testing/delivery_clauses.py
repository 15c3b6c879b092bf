"""Clauses of the transports' contract: what arrives, in which order, against which credits; what is acknowledged."""

from __future__ import annotations

from functools import partial

import anyio
import torch

from stream_balancer.controller.serve import serve
from stream_balancer.errors import WouldBlock
from stream_balancer.testing.harness import CLAUSE_TIMEOUT_S, Opener, accepted, collect, drain, raises, until
from stream_balancer.testing.scripted import (
    ScriptedBalancer,
    awkward_micro_batches,
    make_batch,
    make_rows,
    make_shared_batch,
    rank_batch,
    same_rollout,
    same_tensors,
)
from stream_balancer.transport import Report
from stream_balancer.types import RankBatch, Rollout
from stream_balancer.types.shared import join_column
from stream_balancer.wire.messages import PartsDone, StepComplete, StepHeld, StepReport

__all__ = ["CLAUSES"]


async def every_share_arrives_once_and_in_order(open_harness: Opener) -> None:
    """Twenty steps to two ranks through ``serve``."""
    async with open_harness(2) as harness:
        balancer = ScriptedBalancer([make_batch(step, 2) for step in range(20)])
        got: dict[int, list[RankBatch]] = {}

        async def train(rank: int) -> None:
            got[rank] = await drain(harness.connect(rank))

        async with anyio.create_task_group() as tasks:
            for rank in range(2):
                tasks.start_soon(train, rank)
            await serve(balancer, harness.transport)
        for rank in range(2):
            assert [b.step for b in got[rank]] == list(range(20))
            for batch in got[rank]:
                sent = make_batch(batch.step, 2).ranks[rank]
                assert all(same_rollout(a, b) for a, b in zip(sent.rollouts, batch.rollouts, strict=True))
                assert (batch.rank, batch.dp_size, batch.load) == (rank, 2, sent.load)
                assert batch.global_num_loss_tokens == sent.global_num_loss_tokens
        assert balancer.acknowledged == list(range(20))
        assert sorted(s[:2] for s in balancer.step_seconds) == [(s, r) for s in range(20) for r in range(2)]
        assert all(seconds >= 0 for _, _, seconds in balancer.step_seconds)


async def steps_may_skip_numbers(open_harness: Opener) -> None:
    """Steps increase and need not be consecutive: one between them may have been given up. Also after a restart."""
    async with open_harness(1) as harness:
        steps = [1, 4, 5, 11, 12]
        balancer = ScriptedBalancer([make_batch(step, 1) for step in steps])
        got: list[int] = []

        async def train() -> None:
            first = harness.connect(0)
            got.extend([(await anext(first)).step, (await anext(first)).step])
            await until(lambda: balancer.acknowledged == [1])
            harness.kill(first)
            got.pop()  # what it was working on comes again
            got.extend([batch.step async for batch in harness.connect(0, incarnation=1)])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            await serve(balancer, harness.transport, rejoin_timeout_s=CLAUSE_TIMEOUT_S)
        assert got == steps
        assert balancer.acknowledged == steps


async def credits_bound_the_queue(open_harness: Opener) -> None:
    """A rank with depth 3 is never sent a fourth batch until it takes one."""
    async with open_harness(1) as harness:
        feed = harness.connect(0, depth=3)
        link = await accepted(harness.transport)
        calls: list[int] = []
        link.subscribe(lambda: calls.append(link.credits))
        for step in range(3):
            link.send(make_batch(step, 1).ranks[0])
        assert link.credits == 0
        with raises(WouldBlock):
            link.send(make_batch(3, 1).ranks[0])
        assert (await anext(feed)).step == 0
        await until(lambda: link.credits == 1)
        assert calls, "subscribe() was not called back"
        assert link.report() is None, "taking a batch is not acknowledging it"
        link.send(make_batch(3, 1).ranks[0])
        assert [(await anext(feed)).step for _ in range(3)] == [1, 2, 3]
        await feed.aclose()


async def asking_for_the_next_acknowledges(open_harness: Opener) -> None:
    """Not the taking, not the leaving; or ``batch.ack()``, once."""
    async with open_harness(1) as harness:
        feed = harness.connect(0)
        link = await accepted(harness.transport)
        link.send(make_batch(0, 1).ranks[0])
        link.send(make_batch(1, 1).ranks[0])
        await anext(feed)
        feed.add_compute_s(1.5)
        feed.add_compute_s(2.0)
        batch = await anext(feed)
        reports: list[Report] = []
        await until(lambda: collect(link, reports))
        assert [done.step for done in reports] == [0]
        done = reports[0]
        assert isinstance(done, StepReport)
        assert done.compute_s is not None, "the trainer's own seconds were lost"
        assert abs(done.compute_s - 3.5) < 1e-6
        assert done.seconds >= 0.0
        assert done.waited_s >= 0.0
        batch.ack()
        batch.ack()
        await until(lambda: collect(link, reports) and len(reports) == 2)
        assert [done.step for done in reports] == [0, 1]
        last = reports[1]
        assert isinstance(last, StepReport)
        assert last.compute_s is None, "nothing was timed"
        await feed.aclose()


async def asking_for_more_is_told_without_an_acknowledgement(open_harness: Opener) -> None:
    """``auto_ack=False``: the controller knows that the trainer is through with a batch before it is acknowledged."""
    async with open_harness(1) as harness:
        feed = harness.connect(0, auto_ack=False)
        link = await accepted(harness.transport)
        link.send(make_batch(0, 1).ranks[0])
        link.send(make_batch(1, 1).ranks[0])
        first = await anext(feed)
        await anext(feed)
        reports: list[Report] = []
        await until(lambda: collect(link, reports))
        first.ack()
        await until(lambda: collect(link, reports) and len(reports) == 2)
        assert [(done.step, type(done)) for done in reports] == [(0, StepHeld), (0, StepReport)]
        await feed.aclose()


async def a_commit_acknowledges_all_before_it(open_harness: Opener) -> None:
    """``auto_ack=False``: nothing is acknowledged by asking for more, and what was not is delivered again."""
    async with open_harness(1) as harness:
        balancer = ScriptedBalancer([make_batch(step, 1) for step in range(8)])
        async with anyio.create_task_group() as tasks:

            async def control() -> None:
                await serve(balancer, harness.transport, rejoin_timeout_s=CLAUSE_TIMEOUT_S)

            tasks.start_soon(control)
            feed = harness.connect(0, auto_ack=False)
            taken = [await anext(feed) for _ in range(6)]
            assert balancer.acknowledged == [], "asking for the next batch acknowledged one"
            taken[3].ack()
            taken[1].ack()
            await until(lambda: balancer.acknowledged == [0, 1, 2, 3])
            harness.kill(feed)
            again = harness.connect(0, incarnation=1, auto_ack=False)
            taken = [batch async for batch in again]
            assert [batch.step for batch in taken] == [4, 5, 6, 7]
            assert balancer.acknowledged == [0, 1, 2, 3]
            taken[-1].ack()  # serve returns: the feed has taken its leave
        assert balancer.acknowledged == list(range(8))
        assert sorted(step for step, _, _ in balancer.step_seconds) == list(range(8))


async def bytes_are_identical(open_harness: Opener) -> None:
    """Every dtype, awkward shapes, all of the metadata."""
    sent = rank_batch(*awkward_micro_batches())
    async with open_harness(1) as harness:
        feed = harness.connect(0)
        link = await accepted(harness.transport)
        link.send(sent)
        got = await anext(feed)
        assert len(got.micro_batches) == len(sent.micro_batches)
        for ours, theirs in zip(sent.micro_batches, got.micro_batches, strict=True):
            assert ours.lengths == theirs.lengths
            for a, b in zip(ours.rollouts, theirs.rollouts, strict=True):
                assert same_rollout(a, b), f"rollout {a.rollout_id} changed on its way"
            mine, other = ours.packed(), theirs.packed()
            assert same_tensors(dict(mine.columns), dict(other.columns))
            assert torch.equal(mine.cu_seqlens, other.cu_seqlens)
            assert torch.equal(mine.rollout_weights, other.rollout_weights)
        await feed.aclose()


async def siblings_share_their_prefix_on_the_rank(open_harness: Opener) -> None:
    """A micro-batch has the same unique tokens there; a padding copy shares nothing."""

    def sibling(group: str, number: int) -> Rollout:
        own = torch.full((number + 1,), number)
        return Rollout(
            tokens={"input_ids": torch.cat([torch.arange(5) + len(group), own])},
            rollout_id=f"{group}{number}",
            group_id=group,
            prefix=5,
        )

    first = [sibling(group, number) for group in ("g", "long") for number in range(3)]
    sent = rank_batch(first, [sibling("g", 3), sibling("g", 4).padding_copy("padding-1")])
    async with open_harness(1) as harness:
        feed = harness.connect(0)
        link = await accepted(harness.transport)
        link.send(sent)
        got = await anext(feed)
        for ours, theirs, saved in zip(sent.micro_batches, got.micro_batches, (20, 0), strict=True):
            here, there = ours.tree(), theirs.tree()
            assert here.nodes == there.nodes
            assert here.index.equal(there.index)
            assert here["input_ids"].equal(there["input_ids"])
            assert there.num_tokens == theirs.num_tokens - saved
        await feed.aclose()


async def members_hold_the_parts_of_a_shared_rollout(open_harness: Opener) -> None:
    """Joined they are the whole, and what follows each part's chunks came with it. A rank that is killed in the middle
    of a step gets its parts again; the other one notices nothing."""
    async with open_harness(2) as harness:
        made = [make_shared_batch(step, 2) for step in range(4)]
        balancer = ScriptedBalancer([batch for batch, _ in made])
        got: dict[int, dict[int, RankBatch]] = {0: {}, 1: {}}

        async def train(rank: int, *, killed_at: int | None = None) -> None:
            feed = harness.connect(rank)
            async for batch in feed:
                if batch.step == killed_at:
                    harness.kill(feed)
                    feed = harness.connect(rank, incarnation=1)
                    # perhaps also the step before, if its report was lost
                    got[rank].update({again.step: again async for again in feed})
                    return
                got[rank][batch.step] = batch

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train, 0)
            tasks.start_soon(partial(train, 1, killed_at=2))
            await serve(balancer, harness.transport, rejoin_timeout_s=CLAUSE_TIMEOUT_S)
        assert [sorted(got[rank]) for rank in range(2)] == [[0, 1, 2, 3]] * 2
        assert balancer.acknowledged == [0, 1, 2, 3]
        for step, (_, wholes) in enumerate(made):
            members = [got[rank][step] for rank in range(2)]
            for number, whole in enumerate(wholes):
                parts = [member.micro_batches[number] for member in members]
                assert [(part.cp_group, part.cp_rank) for part in parts] == [((0, 1), 0), ((0, 1), 1)]
                layouts = [part.packed() for part in parts]
                for name, column in whole.tokens.items():
                    assert join_column([one[name] for one in layouts], whole.num_tokens).equal(column)
                    following = join_column([one.next(name) for one in layouts], whole.num_tokens)
                    assert following.equal(torch.cat([column[1:], column.new_zeros(1)]))
                assert [one.execution_loss_tokens.tolist() for one in layouts] == [[whole.num_tokens]] * 2
            assert all(not member.micro_batches[-1].cp_group for member in members)


async def held_batches_are_never_overwritten(open_harness: Opener) -> None:
    """A trainer that keeps tensors of old batches keeps what it saw."""
    async with open_harness(1) as harness:
        balancer = ScriptedBalancer([make_batch(step, 1, num_tokens=300) for step in range(12)])
        kept = []

        async def train() -> None:
            feed = harness.connect(0)
            kept.extend([(batch.step, batch.micro_batches[1].packed()["input_ids"]) async for batch in feed])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            await serve(balancer, harness.transport)
        for step, ids in kept:
            rollouts = make_batch(step, 1, num_tokens=300).ranks[0].micro_batches[1].rollouts
            assert torch.equal(ids, torch.cat([r.tokens["input_ids"] for r in rollouts])), (
                f"step {step} was overwritten"
            )


async def what_a_lost_rank_owed_comes_beside_the_queue(open_harness: Opener) -> None:
    """A part of a step that the rank has, without a credit and behind the end; and the reply that there is no more."""
    async with open_harness(1) as harness:
        feed = harness.connect(0, depth=1)
        link = await accepted(harness.transport)
        link.send(make_batch(0, 1).ranks[0])
        await anext(feed)
        await until(lambda: link.credits == 1)
        link.send(make_batch(1, 1).ranks[0])
        link.end()
        parts: list[RankBatch] = []
        reports: list[Report] = []
        others = feed.reassigned()

        async def take_over() -> None:
            parts.extend([part async for part in others])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take_over)
            await until(lambda: collect(link, reports))
            link.reassign(make_batch(0, 1, num_tokens=300).ranks[0])
            await until(lambda: collect(link, reports) and len(reports) == 2)
            link.complete(StepComplete(0, (0, 5)))
        assert reports == [PartsDone(0, 0), PartsDone(0, 1)]
        sent = make_batch(0, 1, num_tokens=300).ranks[0]
        assert [part.step for part in parts] == [0]
        assert all(same_rollout(a, b) for a, b in zip(sent.rollouts, parts[0].rollouts, strict=True))
        assert others.ranks == (0, 5)
        assert [batch.step async for batch in feed] == [1]


async def rows_of_an_open_step_are_acknowledged_together(open_harness: Opener) -> None:
    """They come in order under one number, what to divide by with the last. Asking for the next row acknowledges
    nothing: a rank that is lost among them gets all of them again."""
    async with open_harness(2) as harness:
        balancer = ScriptedBalancer([*make_rows(0, 2, 3), make_batch(1, 2), *make_rows(2, 2, 2)])
        got: dict[int, list[tuple[int, int, bool]]] = {0: [], 1: []}

        async def train(rank: int, incarnation: int) -> None:
            async with harness.connect(rank, incarnation=incarnation) as feed:
                async for batch in feed:
                    got[rank].append((batch.step, batch.micro_batches[0].lengths[0], batch.is_last))
                    if batch.is_last:
                        assert batch.global_num_tokens == 100
                    else:
                        with raises(ValueError):
                            _ = batch.global_num_tokens

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(serve, balancer, harness.transport, rejoin_timeout_s=CLAUSE_TIMEOUT_S))
            tasks.start_soon(train, 0, 0)
            lost = harness.connect(1)
            rows = [await anext(lost) for _ in range(2)]
            assert [(one.step, one.is_last) for one in rows] == [(0, False), (0, False)]
            assert balancer.acknowledged == []
            harness.kill(lost)
            await train(1, 1)
        every = [(0, 5, False), (0, 15, False), (0, 25, True), (1, 5, True), (2, 5, False), (2, 15, True)]
        assert got == {0: every, 1: every}
        assert balancer.acknowledged == [0, 1, 2]
        assert sorted(step for step, _, _ in balancer.step_seconds) == [0, 0, 1, 1, 2, 2]


CLAUSES = (
    rows_of_an_open_step_are_acknowledged_together,
    every_share_arrives_once_and_in_order,
    steps_may_skip_numbers,
    credits_bound_the_queue,
    asking_for_the_next_acknowledges,
    asking_for_more_is_told_without_an_acknowledgement,
    a_commit_acknowledges_all_before_it,
    bytes_are_identical,
    siblings_share_their_prefix_on_the_rank,
    members_hold_the_parts_of_a_shared_rollout,
    held_batches_are_never_overwritten,
    what_a_lost_rank_owed_comes_beside_the_queue,
)

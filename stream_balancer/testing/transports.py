"""The contract of a transport, as a test.

::

    async def test_mine():
        await check_transport(open_mine)      # raises AssertionError naming the clause that does not hold

``open_mine(dp_size)`` is an async context manager over a :class:`Harness`. Every clause opens a fresh one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Protocol, Self

import anyio
import torch
from torch import Tensor

from stream_balancer.controller.serve import serve
from stream_balancer.errors import (
    AlreadyInUseError,
    ClosedResourceError,
    EndOfStream,
    RankLostError,
    WouldBlock,
)
from stream_balancer.rank.feed import RankFeed
from stream_balancer.transport import Link, Report, Transport
from stream_balancer.types import SUPPORTED_DTYPES, Batch, MicroBatch, RankBatch, Rollout
from stream_balancer.wire.messages import StepHeld, StepReport

__all__ = ["Harness", "ScriptedBalancer", "check_transport", "make_batch", "same_rollout"]

CLAUSE_TIMEOUT_S = 30.0  # a guard against hangs, not a measurement


class Harness(Protocol):
    """One transport under test, and ways to reach it."""

    @property
    def transport(self) -> Transport:
        """The controller's side."""
        ...

    def connect(
        self,
        rank: int,
        *,
        dp_size: int | None = None,
        incarnation: int = 0,
        depth: int = 2,
        auto_ack: bool = True,
    ) -> RankFeed:
        """A rank's feed, as a trainer would open it."""
        ...

    def kill(self, feed: RankFeed) -> None:
        """Let the rank be gone without a word."""
        ...


Opener = Callable[[int], AbstractAsyncContextManager[Harness]]


def make_batch(step: int, dp_size: int, *, num_tokens: int = 5, micro_batches: int = 2) -> Batch:
    """A small batch whose every token tells its step and rank; two rollouts in each micro-batch."""
    shares = []
    for rank in range(dp_size):
        cut = []
        for m in range(micro_batches):
            rollouts = [_small_rollout(step, rank, f"{step}.{rank}.{m}.{i}", num_tokens + i) for i in range(2)]
            cut.append(MicroBatch.of(rollouts))
        shares.append(_share(step, rank, dp_size, tuple(cut)))
    tokens = sum(share.num_tokens for share in shares)
    count = sum(share.num_rollouts for share in shares)
    return Batch(
        step=step,
        reason="window",
        ranks=tuple(shares),
        num_rollouts=count,
        num_tokens=tokens,
        loads=tuple(share.load for share in shares),
        lower_bound=tokens / dp_size,
    )


def _small_rollout(step: int, rank: int, name: str, length: int) -> Rollout:
    return Rollout(
        tokens={"input_ids": torch.arange(length) + 1000 * step, "logprobs": torch.full((length,), float(rank))},
        scalars={"advantage": float(step)},
        rollout_id=name,
    )


def _share(step: int, rank: int, dp_size: int, micro_batches: tuple[MicroBatch, ...]) -> RankBatch:
    return RankBatch(
        step=step,
        rank=rank,
        dp_size=dp_size,
        micro_batches=micro_batches,
        load=float(sum(mb.num_tokens for mb in micro_batches)),
        global_num_rollouts=4 * dp_size,
        global_num_tokens=100,
        global_num_loss_tokens=50,
    )


class ScriptedBalancer:
    """Answers ``serve`` from a list of batches; remembers what was acknowledged. With ``hold``, waits after the
    last."""

    def __init__(self, batches: list[Batch], *, hold: bool = False) -> None:
        self._left = deque(batches)
        self._hold = hold
        self._in_flight: dict[int, Batch] = {}
        self.acknowledged: list[int] = []
        """Steps, in the order they were acknowledged."""
        self.step_seconds: list[tuple[int, int, float]] = []
        """(step, rank, seconds)."""

    def batches(self, *, auto_ack: bool = True) -> AsyncIterator[Batch]:
        """One after the other."""
        assert not auto_ack, "serve acknowledges by itself"
        return self

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        await anyio.lowlevel.checkpoint()
        if not self._left:
            if self._hold:
                await anyio.sleep_forever()
            raise StopAsyncIteration
        batch = self._left.popleft()
        self._in_flight[batch.step] = batch
        return batch

    def acknowledge(self, step: int) -> None:
        """Every rank is done with ``step``."""
        del self._in_flight[step]
        self.acknowledged.append(step)

    def nack(self, step: int) -> None:
        """``step`` comes again, next."""
        self._left = deque(sorted([self._in_flight.pop(step), *self._left], key=lambda batch: batch.step))

    def record_step_seconds(
        self,
        step: int,
        rank: int,
        seconds: float,
        *,
        own: bool = True,
        waited_s: float | None = None,
        ready_s: float = 0.0,
    ) -> None:
        """``rank`` took so long for ``step``."""
        self.step_seconds.append((step, rank, seconds))

    def in_flight(self) -> tuple[Batch, ...]:
        """Taken and not acknowledged."""
        return tuple(self._in_flight.values())


def same_rollout(one: Rollout, other: Rollout) -> bool:
    """Equal in every field, tensors bit by bit."""
    plain = ["rollout_id", "group_id", "version", "cost", "is_padding", "num_tokens", "num_loss_tokens"]
    plain += ["scalars", "metadata"]
    return (
        all(getattr(one, name) == getattr(other, name) for name in plain)
        and _same_tensors(dict(one.tokens), dict(other.tokens))
        and _same_tensors(dict(one.tensors), dict(other.tensors))
    )


def _same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - a transport has no event for everything a test may want to see
        await anyio.sleep(0.005)


async def _link(transport: Transport, *, ready: bool = True) -> Link:
    link = await transport.accept()
    if ready:
        await _until(lambda: link.credits > 0)
    return link


async def _drain(feed: RankFeed) -> list[RankBatch]:
    return [batch async for batch in feed]


# --- the clauses -----------------------------------------------------------------------------------------------------


async def every_share_arrives_once_and_in_order(open_harness: Opener) -> None:
    """Twenty steps to two ranks through ``serve``."""
    async with open_harness(2) as harness:
        balancer = ScriptedBalancer([make_batch(step, 2) for step in range(20)])
        got: dict[int, list[RankBatch]] = {}

        async def train(rank: int) -> None:
            got[rank] = await _drain(harness.connect(rank))

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
            await _until(lambda: balancer.acknowledged == [1])
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
        link = await _link(harness.transport)
        calls: list[int] = []
        link.subscribe(lambda: calls.append(link.credits))
        for step in range(3):
            link.send(make_batch(step, 1).ranks[0])
        assert link.credits == 0
        with _raises(WouldBlock):
            link.send(make_batch(3, 1).ranks[0])
        assert (await anext(feed)).step == 0
        await _until(lambda: link.credits == 1)
        assert calls, "subscribe() was not called back"
        assert link.report() is None, "taking a batch is not acknowledging it"
        link.send(make_batch(3, 1).ranks[0])
        assert [(await anext(feed)).step for _ in range(3)] == [1, 2, 3]
        await feed.aclose()


async def asking_for_the_next_acknowledges(open_harness: Opener) -> None:
    """Not the taking, not the leaving; or ``batch.ack()``, once."""
    async with open_harness(1) as harness:
        feed = harness.connect(0)
        link = await _link(harness.transport)
        link.send(make_batch(0, 1).ranks[0])
        link.send(make_batch(1, 1).ranks[0])
        await anext(feed)
        feed.add_compute_s(1.5)
        feed.add_compute_s(2.0)
        batch = await anext(feed)
        reports: list[Report] = []
        await _until(lambda: _collect(link, reports))
        assert [done.step for done in reports] == [0]
        done = reports[0]
        assert isinstance(done, StepReport)
        assert done.compute_s is not None, "the trainer's own seconds were lost"
        assert abs(done.compute_s - 3.5) < 1e-6
        assert done.seconds >= 0.0
        assert done.waited_s >= 0.0
        batch.ack()
        batch.ack()
        await _until(lambda: _collect(link, reports) and len(reports) == 2)
        assert [done.step for done in reports] == [0, 1]
        last = reports[1]
        assert isinstance(last, StepReport)
        assert last.compute_s is None, "nothing was timed"
        await feed.aclose()


async def asking_for_more_is_told_without_an_acknowledgement(open_harness: Opener) -> None:
    """``auto_ack=False``: the controller knows that the trainer is through with a batch before it is acknowledged."""
    async with open_harness(1) as harness:
        feed = harness.connect(0, auto_ack=False)
        link = await _link(harness.transport)
        link.send(make_batch(0, 1).ranks[0])
        link.send(make_batch(1, 1).ranks[0])
        first = await anext(feed)
        await anext(feed)
        reports: list[Report] = []
        await _until(lambda: _collect(link, reports))
        first.ack()
        await _until(lambda: _collect(link, reports) and len(reports) == 2)
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
            await _until(lambda: balancer.acknowledged == [0, 1, 2, 3])
            harness.kill(feed)
            again = harness.connect(0, incarnation=1, auto_ack=False)
            taken = [batch async for batch in again]
            assert [batch.step for batch in taken] == [4, 5, 6, 7]
            assert balancer.acknowledged == [0, 1, 2, 3]
            taken[-1].ack()  # serve returns: the feed has taken its leave
        assert balancer.acknowledged == list(range(8))
        assert sorted(step for step, _, _ in balancer.step_seconds) == list(range(8))


async def leaving_with_something_unacknowledged_is_a_loss(open_harness: Opener) -> None:
    """Also after the end was told."""
    async with open_harness(1) as harness:
        balancer = ScriptedBalancer([make_batch(step, 1) for step in range(3)])

        async def train() -> None:
            feed = harness.connect(0, auto_ack=False)
            batches = [batch async for batch in feed]
            batches[1].ack()
            await feed.aclose()
            batches[0].ack()
            with _raises(ClosedResourceError):
                batches[2].ack()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            with _raises(RankLostError) as caught:
                await serve(balancer, harness.transport)
        assert "step 2" in str(caught.error), caught.error
        assert balancer.acknowledged == [0, 1]


def _collect(link: Link, into: list[Report]) -> bool:
    done = link.report()
    if done is not None:
        into.append(done)
    return bool(into)


async def bytes_are_identical(open_harness: Opener) -> None:
    """Every dtype, awkward shapes, all of the metadata."""
    sent = _share(0, 0, 1, _awkward_micro_batches())
    async with open_harness(1) as harness:
        feed = harness.connect(0)
        link = await _link(harness.transport)
        link.send(sent)
        got = await anext(feed)
        assert len(got.micro_batches) == len(sent.micro_batches)
        for ours, theirs in zip(sent.micro_batches, got.micro_batches, strict=True):
            assert ours.lengths == theirs.lengths
            for a, b in zip(ours.rollouts, theirs.rollouts, strict=True):
                assert same_rollout(a, b), f"rollout {a.rollout_id} changed on its way"
            mine, other = ours.packed(), theirs.packed()
            assert _same_tensors(dict(mine.columns), dict(other.columns))
            assert torch.equal(mine.cu_seqlens, other.cu_seqlens)
            assert torch.equal(mine.rollout_weights, other.rollout_weights)
        await feed.aclose()


def _awkward_micro_batches() -> tuple[MicroBatch, ...]:
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for number, length in enumerate((1, 3, 64, 2, 129)):
        tokens = {"input_ids": torch.arange(length) * (2**40 if number == 2 else 1)}
        for dtype in SUPPORTED_DTYPES:
            name = str(dtype).removeprefix("torch.")
            raw = torch.randint(0, 256, (length * 3 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            tokens[name] = (raw % 2 if dtype is torch.bool else raw).view(dtype).view(length, 3)
        tokens["strided"] = torch.randn(7, 2 * length, generator=generator).T[::2, 3:5]
        tokens["nothing"] = torch.empty(length, 2, 0)
        rollouts.append(
            Rollout(
                tokens=tokens,
                scalars={"reward": float("inf"), "count": 2**53 + number, "flag": True},
                tensors={"pixels": torch.randn(2, number, 3, generator=generator), "one": torch.tensor(number)},
                metadata={"text": "Größe\x00", "deep": [{"a": None, "b": [1.5, -(2**63), b"\xff"]}]},
                rollout_id=f"r{number} \N{SNOWMAN}",
                group_id="g" if number % 2 else None,
                version=(number, number + 1) if number % 2 else number,
                cost=1.5 if number else None,
            )
        )
    rollouts.append(rollouts[0].padding_copy("padding"))
    return MicroBatch.of(rollouts[:1]), MicroBatch.of(rollouts[1:4]), MicroBatch.of(rollouts[4:])


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


async def the_end_is_told_after_what_was_sent(open_harness: Opener) -> None:
    """``end()`` overtakes nothing; the rank's close is an end, not a loss; nothing can be sent any more."""
    async with open_harness(1) as harness:
        feed = harness.connect(0)
        link = await _link(harness.transport)
        link.send(make_batch(0, 1).ranks[0])
        link.end()
        link.end()
        with _raises(ClosedResourceError):
            link.send(make_batch(1, 1).ranks[0])
        assert [batch.step for batch in await _drain(feed)] == [0]
        reports: list[Report] = []
        with _raises(EndOfStream):
            await _until(lambda: _collect(link, reports) and False)
        assert len(reports) == 1
        with _raises(ClosedResourceError):
            await anext(feed)


async def a_rank_that_leaves_early_is_named(open_harness: Opener) -> None:
    """Closing before the end is a loss for the controller: there were batches to train on."""
    async with open_harness(2) as harness:
        feed = harness.connect(1)
        link = await _link(harness.transport)
        link.send(make_batch(0, 2).ranks[1])
        await anext(feed)
        await feed.aclose()
        await feed.aclose()
        error = await _loss(link)
        assert error.rank == 1
        assert not link.live, "a lost link says that it lives"
        with _raises(RankLostError):
            link.send(make_batch(1, 2).ranks[1])
        with _raises(ClosedResourceError):
            await anext(feed)


async def _loss(link: Link) -> RankLostError:
    try:
        while True:
            link.report()
            await anyio.sleep(0.005)
    except RankLostError as error:
        return error


async def a_killed_rank_is_noticed_and_may_come_back(open_harness: Opener) -> None:
    """What it had not acknowledged comes again, in the same plan and order; the other rank notices nothing."""
    async with open_harness(2) as harness:
        balancer = ScriptedBalancer([make_batch(step, 2) for step in range(8)])
        steps: dict[int, list[int]] = {0: [], 1: []}

        async def healthy() -> None:
            steps[0] = [batch.step async for batch in harness.connect(0)]

        async def dies_once() -> None:
            first = harness.connect(1)
            for _ in range(3):
                steps[1].append((await anext(first)).step)
            await _until(lambda: 1 in balancer.acknowledged)  # its word about step 1 has come through
            harness.kill(first)
            steps[1].pop()  # what it was working on is gone with it
            steps[1] += [batch.step async for batch in harness.connect(1, incarnation=1)]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(healthy)
            tasks.start_soon(dies_once)
            await serve(balancer, harness.transport, rejoin_timeout_s=20)
        assert steps == {0: list(range(8)), 1: list(range(8))}
        assert balancer.acknowledged == list(range(8))


async def a_rank_that_stays_away_is_an_error(open_harness: Opener) -> None:
    """``serve`` names rank and step; what was not acknowledged is still in flight."""
    async with open_harness(1) as harness:
        balancer = ScriptedBalancer([make_batch(step, 1) for step in range(3)], hold=True)

        async def dies() -> None:
            feed = harness.connect(0)
            await anext(feed)
            await anext(feed)
            await _until(lambda: balancer.acknowledged == [0])
            harness.kill(feed)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(dies)
            with _raises(RankLostError) as caught:
                await serve(balancer, harness.transport)
        lost = caught.error
        assert isinstance(lost, RankLostError)
        assert lost.rank == 0
        assert lost.cause
        assert [batch.step for batch in balancer.in_flight()] == [1, 2][: len(balancer.in_flight())]
        assert balancer.acknowledged == [0]


async def a_rank_lost_before_serve_has_not_come_yet(open_harness: Opener) -> None:
    """Its next incarnation is waited for."""
    async with open_harness(1) as harness:
        balancer = ScriptedBalancer([make_batch(step, 1) for step in range(2)])
        feed = harness.connect(0)
        await anyio.sleep(0.2)  # time to connect
        harness.kill(feed)
        await anyio.sleep(0.05)  # and to be missed

        async def comes_back() -> None:
            await anyio.sleep(0.05)
            assert [batch.step for batch in await _drain(harness.connect(0, incarnation=1))] == [0, 1]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(comes_back)
            await serve(balancer, harness.transport, rejoin_timeout_s=CLAUSE_TIMEOUT_S)
        assert balancer.acknowledged == [0, 1]


async def a_lost_controller_is_noticed(open_harness: Opener) -> None:
    """After what had arrived was handed out."""
    async with open_harness(1) as harness:
        feed = harness.connect(0)
        link = await _link(harness.transport)
        link.send(make_batch(0, 1).ranks[0])
        assert (await anext(feed)).step == 0
        await harness.transport.aclose()
        with _raises(RankLostError) as caught:
            await anext(feed)
        assert isinstance(caught.error, RankLostError)
        assert caught.error.rank == 0
        await feed.aclose()


async def strangers_are_refused(open_harness: Opener) -> None:
    """A second feed for a rank, and one of another world; who is connected notices nothing."""
    async with open_harness(2) as harness:
        feed = harness.connect(0)
        link = await _link(harness.transport)
        with _raises(AlreadyInUseError) as caught:
            await anext(harness.connect(0))
        assert "rank 0" in str(caught.error)
        for rank, dp_size in ((1, 3), (1, 4)):
            with _raises(ValueError) as refused:
                await anext(harness.connect(rank, dp_size=dp_size))
            assert f"dp_size={dp_size}" in str(refused.error)
            assert "dp_size=2" in str(refused.error)
        link.send(make_batch(0, 2).ranks[0])
        assert (await anext(feed)).step == 0
        newer = harness.connect(0, incarnation=1)
        link = await _link(harness.transport)
        assert link.incarnation == 1
        link.send(make_batch(0, 2).ranks[0])
        assert (await anext(newer)).step == 0
        with _raises(RankLostError):
            await anext(feed)
        await newer.aclose()


async def cancelling_loses_nothing(open_harness: Opener) -> None:
    """``accept``, the iteration and ``serve``, at their awaits."""
    async with open_harness(1) as harness:
        with anyio.move_on_after(0.02):
            await harness.transport.accept()
        feed = harness.connect(0)
        for _ in range(3):
            with anyio.move_on_after(0.02):
                await anext(feed)
        balancer = ScriptedBalancer([make_batch(step, 1) for step in range(6)], hold=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve, balancer, harness.transport)
            assert (await anext(feed)).step == 0
            assert (await anext(feed)).step == 1
            await _until(lambda: balancer.acknowledged == [0])
            tasks.cancel_scope.cancel()
        with suppress(RankLostError):
            while True:
                await anext(feed)  # what had arrived before
        await feed.aclose()
        assert balancer.acknowledged == [0]
        again = harness.connect(0, incarnation=1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve, balancer, harness.transport)
            batches = [await anext(again) for _ in range(5)]
            assert [batch.step for batch in batches] == [1, 2, 3, 4, 5]
            batches[-1].ack()
            await _until(lambda: balancer.acknowledged == list(range(6)))
            tasks.cancel_scope.cancel()
        await again.aclose()


async def closing_is_idempotent_and_wakes(open_harness: Opener) -> None:
    """A task that waits in ``accept`` or in the iteration is told, not left waiting."""
    async with open_harness(1) as harness:
        feed = harness.connect(0)
        outcome: list[type[BaseException]] = []

        async def wait(what: Callable[[], Awaitable[object]]) -> None:
            try:
                await what()
            except Exception as error:  # noqa: BLE001 - recorded and asserted below
                outcome.append(type(error))

        await _link(harness.transport)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, harness.transport.accept)
            tasks.start_soon(wait, feed.__anext__)
            await anyio.sleep(0.02)
            with _raises(AlreadyInUseError):
                await anext(feed)
            await feed.aclose()
            await harness.transport.aclose()
            await harness.transport.aclose()
        assert outcome == [ClosedResourceError, ClosedResourceError], outcome


CLAUSES: tuple[Callable[[Opener], Awaitable[None]], ...] = (
    every_share_arrives_once_and_in_order,
    steps_may_skip_numbers,
    credits_bound_the_queue,
    asking_for_the_next_acknowledges,
    asking_for_more_is_told_without_an_acknowledgement,
    a_commit_acknowledges_all_before_it,
    leaving_with_something_unacknowledged_is_a_loss,
    bytes_are_identical,
    held_batches_are_never_overwritten,
    the_end_is_told_after_what_was_sent,
    a_rank_that_leaves_early_is_named,
    a_killed_rank_is_noticed_and_may_come_back,
    a_rank_that_stays_away_is_an_error,
    a_rank_lost_before_serve_has_not_come_yet,
    a_lost_controller_is_noticed,
    strangers_are_refused,
    cancelling_loses_nothing,
    closing_is_idempotent_and_wakes,
)
"""What every transport must do, one function each."""


async def check_transport(open_harness: Opener) -> None:
    """Check every clause. Raises AssertionError, naming the clause, for the first that does not hold."""
    for clause in CLAUSES:
        try:
            with anyio.fail_after(CLAUSE_TIMEOUT_S):
                await clause(open_harness)
        except TimeoutError as error:
            raise AssertionError(f"{clause.__name__}: not done within {CLAUSE_TIMEOUT_S} s") from error
        except AssertionError as error:
            raise AssertionError(f"{clause.__name__}: {error}") from error


class _raises:  # noqa: N801 - reads like pytest.raises, which a library cannot depend on
    """Asserts that its block raises ``kind``."""

    def __init__(self, kind: type[Exception]) -> None:
        self._kind = kind
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        self.error = error
        assert error is not None, f"{self._kind.__name__} was not raised"
        return isinstance(error, self._kind)

"""A rank is slow without notice: what it has not begun is moved to ranks that have nothing left to do."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import pytest
from helpers import kill
from team import Team, check_exact

import stream_balancer as sb
from stream_balancer.testing import MemoryNetwork, make_rollout

TOKEN_S = 0.01
CAP = 40


def knobs(dp_size: int, **more: object) -> sb.BalancerConfig:
    given = {"dp_size": dp_size, "batch_size": 12 * dp_size, "micro_batch_counts": "free"}
    return sb.BalancerConfig(**{**given, "max_tokens_per_micro_batch": CAP, **more})  # type: ignore[arg-type]


class LateTeam(Team):
    """``slow[rank]``: how many times as long a token takes on it; ``lost_at[rank]``: when its process is killed."""

    def __init__(
        self, transport: MemoryNetwork, slow: dict[int, float], lost_at: dict[int, float] | None = None
    ) -> None:
        super().__init__(transport)
        self.slow, self.lost_at = slow, lost_at or {}
        self.begun: Counter[tuple[int, int]] = Counter()
        """By step and rank, micro-batches."""
        self.planned: dict[tuple[int, int], int] = {}
        self.absent_s: dict[int, float] = {}
        self.met_at: dict[int, float] = {}

    async def train(self, rank: int, *, incarnation: int = 0, seconds: float = 1.0) -> None:
        with anyio.CancelScope(deadline=self.lost_at.pop(rank, math.inf)) as scope:
            await super().train(rank, incarnation=incarnation, seconds=seconds)
        if scope.cancelled_caught:
            kill(self.feeds[rank])

    async def work(self, rank: int, batch: sb.RankBatch, gradient: Counter[str], seconds: float) -> None:
        await anyio.sleep(self.absent_s.get(rank, 0.0))

    async def take_over(
        self, rank: int, batch: sb.RankBatch, gradient: Counter[str], seconds: float
    ) -> tuple[int, ...]:
        feed = self.feeds[rank]
        mine = feed.micro_batches(batch)
        async for micro_batch in mine:
            self.begun[batch.step, rank] += 1
            took_s = micro_batch.num_tokens * TOKEN_S * self.slow.get(rank, 1.0)
            await anyio.sleep(took_s)
            feed.add_compute_s(took_s)
            self.add(batch, micro_batch.rollouts, gradient)
        return mine.ranks

    async def meet(self, step: int, rank: int, ranks: tuple[int, ...], gradient: Counter[str]) -> bool:
        met = await super().meet(step, rank, ranks, gradient)
        if met:
            self.met_at.setdefault(step, anyio.current_time())
        return met


class Plans(sb.Observer):
    """Remembers how many micro-batches were planned for each rank."""

    def __init__(self, planned: dict[tuple[int, int], int]) -> None:
        self._planned = planned

    def dispatched(self, batch: sb.Batch) -> None:
        self._planned |= {(batch.step, one.rank): len(one.micro_batches) for one in batch.ranks}


async def run(balancer: sb.StreamBalancer, team: LateTeam, lengths: Sequence[int], **options: Any) -> None:
    balancer.observers.append(Plans(team.planned))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(sb.serve, **{"move_late": True, **options}), balancer, team.transport)
        for rank in range(team.transport.dp_size):
            tasks.start_soon(team.train, rank)
        for n, length in enumerate(lengths):
            await balancer.put(make_rollout(length, f"r{n}"))
        balancer.end()


async def step_seconds(lengths: Sequence[int], slow: dict[int, float], **options: Any) -> tuple[float, LateTeam]:
    """All of one step, on four ranks."""
    config = knobs(4, batch_size=len(lengths), capacity=4 * len(lengths))
    async with sb.StreamBalancer(config) as balancer, MemoryNetwork(dp_size=4) as transport:
        team = LateTeam(transport, slow)
        began_at = anyio.current_time()
        await run(balancer, team, lengths, **options)
        check_exact(balancer, team, len(lengths))
        return team.met_at[0] - began_at, team


async def test_others_take_over_what_a_slow_rank_has_not_begun() -> None:
    """Four micro-batches of four rollouts on each of four ranks, one of which takes 1.5 times as long."""
    lengths = [10] * 64
    planned, _ = await step_seconds(lengths, {2: 1.5}, move_late=False)
    moved, team = await step_seconds(lengths, {2: 1.5})
    ideal = 64 * 10 * TOKEN_S / (3 + 1 / 1.5)
    assert planned == pytest.approx(1.375 * ideal, rel=0.02)
    # at 1.6 s it has begun its third; the fourth is split among the others
    assert moved == pytest.approx(1.8, rel=0.02)
    assert moved < 1.04 * ideal
    assert team.begun[0, 2] == 3
    assert all(team.planned[0, rank] == 4 for rank in range(4))


@pytest.mark.parametrize("seed", range(5))
async def test_nothing_is_slower_where_no_rank_is_slow(seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.randint(1, CAP) for _ in range(64)]
    planned, _ = await step_seconds(lengths, {}, move_late=False)
    moved, _ = await step_seconds(lengths, {})
    assert moved <= 1.01 * planned


@pytest.mark.parametrize("seed", range(5))
async def test_it_is_never_slower_whoever_is_slow(seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.randint(1, CAP) for _ in range(64)]
    slow = {rank: chance.choice([1.0, 1.5, 3.0]) for rank in range(4)}
    planned, _ = await step_seconds(lengths, slow, move_late=False)
    moved, _ = await step_seconds(lengths, slow)
    assert moved <= 1.01 * planned


async def test_a_rank_that_begins_late_is_helped_too() -> None:
    """It was asked while its trainer was elsewhere, and gives back what it has not begun but for its share."""
    async with sb.StreamBalancer(knobs(4, batch_size=64)) as balancer, MemoryNetwork(dp_size=4) as transport:
        team = LateTeam(transport, {})
        team.absent_s = {3: 10.0}
        began_at = anyio.current_time()
        await run(balancer, team, [10] * 64)
        check_exact(balancer, team, 64)
        # two were waiting when it was asked: of the four that it has not begun, it keeps one
        assert (team.planned[0, 3], team.begun[0, 3]) == (4, 1)
        assert team.met_at[0] - began_at == pytest.approx(10.4, rel=0.01)


async def test_who_iterates_its_rank_batch_itself_keeps_it() -> None:
    async with sb.StreamBalancer(knobs(2)) as balancer, MemoryNetwork(dp_size=2) as transport:
        team = Team(transport)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, move_late=True), balancer, transport)
            for rank in range(2):
                tasks.start_soon(partial(team.train, rank, seconds=1.0 + 9.0 * rank))
            for n in range(48):
                await balancer.put(make_rollout(10, f"r{n}"))
            balancer.end()
        check_exact(balancer, team, 48)


@pytest.mark.parametrize("seed", range(30))
async def test_whoever_is_slow_and_whoever_is_lost_each_rollout_is_in_the_gradient_once(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.randint(2, 5)
    policy = chance.choice(["replan", "raise"])
    async with sb.StreamBalancer(knobs(size)) as balancer, MemoryNetwork(dp_size=size) as transport:
        team = LateTeam(transport, {rank: chance.choice([1.0, 1.5, 4.0]) for rank in range(size)})
        began_at = anyio.current_time()
        lost = chance.sample(range(1, size), chance.randint(0, size - 1))
        team.lost_at = {rank: began_at + chance.uniform(0.0, 10.0) for rank in lost}

        async def launch(rank: int) -> None:
            await team.train(rank)
            if rank in lost and policy == "raise":
                await anyio.sleep(chance.choice([0.0, 3.0]))
                await team.train(rank, incarnation=1)

        rejoin_timeout_s = 0.0 if policy == "replan" else math.inf
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                partial(sb.serve, move_late=True, on_rank_loss=policy, rejoin_timeout_s=rejoin_timeout_s),
                balancer,
                transport,
            )
            for rank in range(size):
                tasks.start_soon(launch, rank)
            for n in range(48 * size):
                await balancer.put(make_rollout(1 + 7 * n % CAP, f"r{n}"))
            await anyio.sleep(100.0)
            balancer.end()
        check_exact(balancer, team, 48 * size)


async def test_seconds_are_learned_from_what_each_rank_did() -> None:
    """A slow rank is learned as one, though it never does all of its share; the next steps give it less."""
    config = knobs(4, cost=sb.CalibratedCost(), batch_size=64, window=64)
    async with sb.StreamBalancer(config) as balancer, MemoryNetwork(dp_size=4) as transport:
        team = LateTeam(transport, {1: 1.5})
        chance = random.Random(0)
        await run(balancer, team, [min(1 + int(chance.lognormvariate(2.0, 0.8)), CAP) for _ in range(64 * 12)])
        check_exact(balancer, team, 64 * 12)
        moved = [team.planned[step, 1] - team.begun[step, 1] for step in range(12)]
        assert min(moved[:8]) > 0
        assert not any(moved[-3:]), "it is planned for"
        fit = balancer.statistics().cost_fit
        assert fit is not None
        assert fit.speeds[1] / fit.speeds[0] == pytest.approx(1 / 1.5, rel=0.15)


async def test_a_straggler_is_found_by_what_it_did() -> None:
    async with sb.StreamBalancer(knobs(4, batch_size=64, window=64)) as balancer:
        async with MemoryNetwork(dp_size=4) as transport:
            team = LateTeam(transport, {1: 1.5})
            await run(balancer, team, [10] * 64 * 8)
        straggler = balancer.straggler()
        assert straggler is not None
        assert (straggler.rank, straggler.slowdown) == (1, pytest.approx(1.5, rel=0.05))


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"micro_batch_counts": "equal"}, "micro_batch_counts='equal'"),
        ({"micro_batch_counts": "equal", "sync": "micro_batch"}, "sync='micro_batch'"),
        ({"mini_batches": 2}, "mini_batches=2"),
        ({"micro_batch_multiple": 2}, "micro_batch_multiple=2"),
        ({"groups": "same_rank", "group_size": 2}, "groups='same_rank'"),
    ],
    ids=str,
)
async def test_where_nothing_can_be_moved_it_is_refused(more: dict[str, Any], named: str) -> None:
    with pytest.raises(sb.ConfigError, match=f"move_late=True with .*{named}"):
        await sb.serve(sb.StreamBalancer(knobs(2, **more)), MemoryNetwork(dp_size=2), move_late=True)


async def test_micro_batches_are_those_of_the_batch_in_hand() -> None:
    async with (
        sb.StreamBalancer(knobs(1, batch_size=2)) as balancer,
        MemoryNetwork(dp_size=1) as transport,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(sb.serve, balancer, transport)
        for n in range(4):
            await balancer.put(make_rollout(30, f"r{n}"))
        balancer.end()
        feed = sb.RankFeed(transport.connect(0))
        first = await anext(feed)
        assert [one.num_tokens async for one in feed.micro_batches(first)] == [30, 30]
        assert [one async for one in feed.micro_batches(first)] == [], "begun before"
        second = await anext(feed)
        with pytest.raises(ValueError, match="of step 1; this one is of step 0"):
            feed.micro_batches(first)
        assert len([one async for one in feed.micro_batches(second)]) == 2
        assert [batch async for batch in feed] == []

"""A rank is slow without notice: what it has not begun is moved to ranks that have nothing left to do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest
from crew import Crew

import stream_balancer as sb
from stream_balancer.client.step import Step
from stream_balancer.testing import MemoryNetwork, make_rollout

TOKEN_S = 0.01
CAP = 40


def knobs(dp_size: int, **more: object) -> sb.BalancerConfig:
    given = {
        "dp_size": dp_size,
        "batch_size": 12 * dp_size,
        "micro_batches": {"max_tokens": CAP, "equal_number": False},
    }
    return sb.BalancerConfig(**{**given, **more})  # type: ignore[arg-type]


class LateCrew(Crew):
    """``slow[rank]``: how many times as long a token takes on it; ``absent_s[rank]``: before it begins with a step."""

    def __init__(self, network: MemoryNetwork, slow: dict[int, float]) -> None:
        super().__init__(network)
        self.slow = slow
        self.begun: Counter[tuple[int, int]] = Counter()
        """By step and rank, micro-batches."""
        self.planned: dict[tuple[int, int], int] = {}
        self.absent_s: dict[int, float] = {}
        self.met_at: dict[int, float] = {}

    async def train_step(self, rank: int, step: Step) -> None:
        await anyio.sleep(self.absent_s.get(rank, 0.0))
        await super().train_step(rank, step)

    async def work(self, rank: int, step: int, micro_batch: sb.rollouts.MicroBatch) -> None:
        self.begun[step, rank] += 1
        took_s = micro_batch.num_tokens * TOKEN_S * self.slow.get(rank, 1.0)
        await anyio.sleep(took_s)
        self.feeds[rank].add_compute_s(took_s)

    async def meet(self, step: int, rank: int, ranks: tuple[int, ...], gradient: Counter[tuple[str, int]]) -> bool:
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


async def run(
    balancer: sb.StreamBalancer, crew: LateCrew, lengths: Sequence[int], *others: Callable[[], Any], **options: Any
) -> None:
    balancer.observers.append(Plans(crew.planned))
    rollouts = [make_rollout(length, f"r{n}") for n, length in enumerate(lengths)]
    await crew.run(balancer, rollouts, *others, **{"move_late": True, **options})


async def step_seconds(
    lengths: Sequence[int], slow: dict[int, float], equal_number: bool = False, **options: Any
) -> tuple[float, LateCrew]:
    """All of one step, on four ranks."""
    micro_batches = {"max_tokens": CAP, "equal_number": equal_number}
    config = knobs(4, batch_size=len(lengths), capacity=4 * len(lengths), micro_batches=micro_batches)
    async with sb.StreamBalancer(config) as balancer, MemoryNetwork(dp_size=4) as transport:
        crew = LateCrew(transport, slow)
        began_at = anyio.current_time()
        await run(balancer, crew, lengths, **options)
        crew.check(balancer, len(lengths))
        return crew.met_at[0] - began_at, crew


@pytest.mark.parametrize("equal_number", [False, True])
async def test_others_take_over_what_a_slow_rank_has_not_begun(equal_number: bool) -> None:
    """Four micro-batches of four rollouts on each of four ranks, one of which takes 1.5 times as long. Equal counts are
    those of the plan."""
    lengths = [10] * 64
    planned, _ = await step_seconds(lengths, {2: 1.5}, equal_number, move_late=False)
    moved, crew = await step_seconds(lengths, {2: 1.5}, equal_number)
    ideal = 64 * 10 * TOKEN_S / (3 + 1 / 1.5)
    assert planned == pytest.approx(1.375 * ideal, rel=0.02)
    # at 1.6 s it has begun its third; the fourth is split among the others
    assert moved == pytest.approx(1.8, rel=0.02)
    assert moved < 1.04 * ideal
    assert crew.begun[0, 2] == 3
    assert all(crew.planned[0, rank] == 4 for rank in range(4))


@pytest.mark.parametrize("seed", range(5))
async def test_it_is_never_slower_whoever_is_slow(seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.randint(1, CAP) for _ in range(64)]
    slow = {rank: chance.choice([1.0, 1.5, 3.0]) for rank in range(4)} if seed else {}
    planned, _ = await step_seconds(lengths, slow, move_late=False)
    moved, _ = await step_seconds(lengths, slow)
    assert moved <= 1.01 * planned


async def test_a_rank_that_begins_late_is_helped_too() -> None:
    """It was asked while its trainer was elsewhere, and gives back what it has not begun but for its share."""
    async with sb.StreamBalancer(knobs(4, batch_size=64)) as balancer, MemoryNetwork(dp_size=4) as transport:
        crew = LateCrew(transport, {})
        crew.absent_s = {3: 10.0}
        began_at = anyio.current_time()
        await run(balancer, crew, [10] * 64)
        crew.check(balancer, 64)
        # two were waiting when it was asked: of the four that it has not begun, it keeps one
        assert (crew.planned[0, 3], crew.begun[0, 3]) == (4, 1)
        assert crew.met_at[0] - began_at == pytest.approx(10.4, rel=0.01)


async def test_seconds_are_learned_from_what_each_rank_did() -> None:
    """A slow rank is learned as one, though it never does all of its share."""
    config = knobs(4, cost=sb.cost.CalibratedCost(), batch_size=64, window=64)
    async with sb.StreamBalancer(config) as balancer, MemoryNetwork(dp_size=4) as transport:
        crew = LateCrew(transport, {1: 1.5})
        chance = random.Random(0)
        await run(balancer, crew, [min(1 + int(chance.lognormvariate(2.0, 0.8)), CAP) for _ in range(64 * 12)])
        crew.check(balancer, 64 * 12)
        moved = [crew.planned[step, 1] - crew.begun[step, 1] for step in range(12)]
        assert min(moved[:8]) > 0
        fit = balancer.statistics().cost_fit
        assert fit is not None
        assert fit.speeds[1] / fit.speeds[0] == pytest.approx(1 / 1.5, rel=0.15)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"micro_batches": {"equal_number": True}, "sync": "micro_batch"}, "sync='micro_batch'"),
        ({"mini_batches": 2}, "mini_batches=2"),
        ({"micro_batches": {"equal_number": False, "multiple_of": 2}}, "micro_batches.multiple_of=2"),
    ],
    ids=str,
)
async def test_where_nothing_can_be_moved_it_is_refused(more: dict[str, Any], named: str) -> None:
    with pytest.raises(sb.errors.ConfigError, match=f"move_late=True with .*{named}"):
        await sb.serve(sb.StreamBalancer(knobs(2, **more)), MemoryNetwork(dp_size=2), move_late=True)

"""Where the ranks' time goes, and who is slow since when: by hand on small steps, and sums that must add up."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from cores import learning_core
from hypothesis import given
from hypothesis import strategies as st

import stream_balancer as sb
from stream_balancer.core.in_flight import RolloutIds, StepTiming
from stream_balancer.core.machine import BalancerCore
from stream_balancer.learn.idle_time import IdleTimes
from stream_balancer.rollouts import Batch
from stream_balancer.testing import make_rollout

CONFIG = sb.BalancerConfig(dp_size=2, batch_size=2, window=4, deadline_s=10.0, cost="tokens")
SECONDS = st.floats(0.0, 100.0)


def core_with(config: sb.BalancerConfig, lengths: Sequence[int], *, at: Sequence[float] | None = None) -> BalancerCore:
    core = learning_core(config)
    for length, now in zip(lengths, at or [0.0] * len(lengths), strict=True):
        core.add(make_rollout(length), now)
    return core


def poll(core: BalancerCore, now: float, asked_at: float | None = None) -> Batch:
    batch = core.poll(now, asked_at)
    assert batch is not None
    return batch


def report(
    core: BalancerCore,
    batch: Batch,
    seconds: Sequence[float],
    *,
    waited_s: float | None = None,
    ready_s: float = 0.0,
    now: float = 0.0,
) -> None:
    for rank, one in enumerate(seconds):
        core.record_step(StepTiming(batch.step, rank, one, waited_s=waited_s, ready_s=ready_s), now)
    core.acknowledge(batch.step)


def causes(core: BalancerCore) -> dict[str, float]:
    return {cause: seconds for cause, seconds in core.statistics(100.0).idle_seconds.items() if seconds > 1e-9}


def test_imbalance_is_split_by_the_lower_bound() -> None:
    core = core_with(CONFIG.replace(window=2, deadline_s=None), [60, 10])
    batch = poll(core, 0.0)
    assert sorted(batch.loads) == [10.0, 60.0]
    assert batch.lower_bound == 60.0
    report(core, batch, [load / 10 for load in batch.loads])
    assert causes(core) == {"imbalance_unavoidable": pytest.approx(5.0)}
    light = batch.loads.index(10.0)
    of_rank = core.statistics(0.0).rank_idle_seconds
    assert of_rank[light]["imbalance_unavoidable"] == pytest.approx(5.0)
    assert sum(of_rank[1 - light].values()) == 0.0
    assert core.statistics(0.0).rank_busy_seconds[light] == 1.0

    core = core_with(CONFIG.replace(window=2, deadline_s=None), [30, 30])
    report(core, poll(core, 0.0), [3.0, 5.0])  # alike on paper
    assert causes(core) == {"imbalance_avoidable": pytest.approx(2.0)}


def test_seconds_of_a_step_that_was_planned_for_more_ranks_count() -> None:
    """Ranks go on with it after their controller was started again, for fewer."""
    before = core_with(CONFIG.replace(window=2, dp_size=2), [60, 10])
    poll(before, 0.0)
    core = learning_core(CONFIG.replace(window=2, dp_size=1))
    core.restore(before.snapshot(0.0), 0.0)
    batch = core.give_as_planned()
    assert batch is not None
    report(core, batch, [6.0, 1.0])
    assert core.statistics(0.0).rank_busy_seconds == (6.0, 1.0)


@pytest.mark.parametrize(
    ("at", "waited", "of_rank"),
    [
        ([1.0, 3.0, 6.0, 8.0], {}, {"no_data": 3.0, "window": 5.0}),
        ([0.0, 0.0, 0.0, 4.0], {"waited_s": 9.0, "ready_s": 3.0}, {"window": 4.0, "transport": 2.0}),
        ([0.0, 0.0, 0.0, 4.0], {"waited_s": 0.5}, {"window": 0.5}),  # the queue hid the rest
    ],
)
def test_a_rank_waits_for_data_then_for_the_window_then_for_other_ranks_then_for_its_share_to_come(
    at: list[float], waited: dict[str, float], of_rank: dict[str, float]
) -> None:
    core = core_with(CONFIG, [5] * 4, at=at)
    report(core, poll(core, at[-1], asked_at=0.0), [1.0, 1.0], **waited)
    assert causes(core) == pytest.approx({cause: 2 * seconds for cause, seconds in of_rank.items()})


def test_steps_that_a_rank_never_reports_cost_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RolloutIds, "remember", 1)
    core = core_with(CONFIG.replace(window=2, deadline_s=None, cost=sb.cost.CalibratedCost()), [])

    def after(steps: int) -> int:
        """Bytes that are held then."""
        for _ in range(steps):
            core.add_all([make_rollout(60), make_rollout(10)], 0.0)
            batch = poll(core, 0.0)
            core.record_step(StepTiming(batch.step, 0, 1.0), 0.0)
            core.acknowledge(batch.step)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    after(200)
    tracemalloc.start()
    first, later = after(100), after(300)
    tracemalloc.stop()
    assert later - first < 100 * 300, "bytes a step"


@given(
    st.lists(st.tuples(st.integers(1, 50), SECONDS, st.none() | SECONDS, SECONDS), min_size=2, max_size=6),
    SECONDS,
    SECONDS,
)
def test_every_second_has_one_cause(
    ranks: list[tuple[int, float, float | None, float]], asked_at: float, enough_at: float
) -> None:
    core = core_with(
        sb.BalancerConfig(dp_size=len(ranks), batch_size=len(ranks), window=len(ranks)), [one[0] for one in ranks]
    )
    batch = poll(core, 0.0)
    ledger, now = core.observers[1], 100.0
    assert isinstance(ledger, IdleTimes)
    ledger.left(batch, asked_at, enough_at, now)
    busy = [one[1] for one in ranks]
    ledger.timed(
        batch,
        [
            StepTiming(batch.step, rank, seconds, waited_s=waited, ready_s=ready)
            for rank, (_, seconds, waited, ready) in enumerate(ranks)
        ],
        now,
    )
    figures = core.statistics(now)
    for of_rank, (_, seconds, waited, ready) in zip(figures.rank_idle_seconds, ranks, strict=True):
        assert min(of_rank.values()) >= 0.0
        imbalance = of_rank["imbalance_avoidable"] + of_rank["imbalance_unavoidable"]
        assert imbalance == pytest.approx(max(busy) - seconds, abs=1e-6)
        for_rollouts = of_rank["no_data"] + of_rank["window"] + of_rank["deadline"]
        waited_s = now - asked_at if waited is None else waited
        assert for_rollouts == pytest.approx(min(waited_s, now - asked_at), abs=1e-6)
        assert of_rank["transport"] == pytest.approx(max(waited_s - for_rollouts - ready, 0.0), abs=1e-6)
    sums = {name: sum(of_rank[name] for of_rank in figures.rank_idle_seconds) for name in figures.idle_seconds}
    assert figures.idle_seconds == pytest.approx(sums)


# -- who is slow -------------------------------------------------------------------------------------------------------

NUM_RANKS = 4
IDS = torch.zeros(1000, dtype=torch.int64)


class Trainer:
    """Steps on four ranks, each as slow as told, a minute apart."""

    def __init__(self, **knobs: object) -> None:
        config = sb.BalancerConfig(dp_size=NUM_RANKS, batch_size=16, window=16)
        self.core = learning_core(config.replace(**knobs))
        self.noise = np.random.default_rng(0)
        self.now = 0.0

    def steps(self, count: int, slowdown: dict[int, float] | None = None, *, spread: float = 0.03) -> None:
        for _ in range(count):
            for length in self.noise.integers(100, 1000, 16).tolist():
                self.core.add(sb.Rollout(tokens={"input_ids": IDS[:length]}), self.now)
            batch = poll(self.core, self.now)
            self.now += 60.0
            work = [share.num_tokens * 1e-3 for share in batch.ranks]
            noise = np.exp(self.noise.normal(0.0, spread, NUM_RANKS))
            seconds = [w * n * (slowdown or {}).get(r, 1.0) for r, (w, n) in enumerate(zip(work, noise, strict=True))]
            report(self.core, batch, seconds, now=self.now)

    @property
    def straggler(self) -> object:
        return self.core.statistics(self.now).straggler


def test_a_slow_rank_is_named_with_how_slow_and_since_when() -> None:
    trainer = Trainer()
    trainer.steps(30)
    assert trainer.straggler is None
    trainer.steps(10, {2: 1.3})
    straggler = trainer.core.statistics(trainer.now + 5.0).straggler
    assert straggler is not None
    assert straggler.rank == 2
    assert straggler.slowdown == pytest.approx(1.3, rel=0.05)
    assert straggler.since_step in (29, 30)
    assert str(straggler).startswith("rank 2 takes 1.")
    assert straggler.since_s == pytest.approx(5.0 + 60.0 * (39 - straggler.since_step))


def test_a_slow_rank_is_named_by_what_was_learned() -> None:
    trainer = Trainer(cost=sb.cost.CalibratedCost(sb.cost.TokenCost()))
    trainer.steps(40)
    trainer.steps(60, {1: 1.4})
    statistics = trainer.core.statistics(trainer.now)
    assert statistics.straggler is not None
    assert statistics.straggler.rank == 1
    assert statistics.straggler.slowdown == pytest.approx(1.4, rel=0.1)
    assert 39 <= statistics.straggler.since_step <= 42
    assert statistics.cost_fit is not None
    assert statistics.cost_fit.speeds[1] < 0.8


@pytest.mark.parametrize(
    ("seconds", "steps", "found"),
    [((0.004, 0.006), 12, False), ((0.4, 0.6), 12, True), ((1, 9), 4, False), ((1, 9), 5, True)],
)
def test_neither_milliseconds_nor_a_few_slow_steps_are_a_straggler(
    seconds: tuple[float, float], steps: int, found: bool
) -> None:
    """A rank that costs the others less than a scheduler's time slice is nothing to report, however many times it."""
    core = core_with(CONFIG.replace(capacity=400), [100] * 80)
    for _ in range(steps):
        report(core, poll(core, 0.0), seconds)
    assert (core.statistics(0.0).straggler is not None) == found


def test_seconds_that_ranks_of_the_former_plan_reported_do_not_count() -> None:
    core = core_with(CONFIG.replace(window=6, dp_size=3, batch_size=6), [90] * 6)
    batch = poll(core, 0.0)
    core.record_step(StepTiming(batch.step, 0, 100.0), 0.0)
    core.nack(batch.step)
    core.reconfigure(core.config.replace(dp_size=2))
    assert core.poll(0.0) is not None
    core.record_step(StepTiming(batch.step, 1, 1.0), 0.0)
    assert not any(core.statistics(0.0).rank_busy_seconds)
    core.record_step(StepTiming(batch.step, 0, 3.0), 0.0)
    assert core.statistics(0.0).rank_busy_seconds[:2] == (3.0, 1.0)

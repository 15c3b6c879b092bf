"""What is learned while a run goes on: CalibratedCost from the ranks' seconds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from cores import learning_core, saved
from helpers import polled
from invariants import verify

import stream_balancer as sb
from stream_balancer.core.in_flight import StepTiming
from stream_balancer.core.machine import BalancerCore
from stream_balancer.learn.calibration import Calibration
from stream_balancer.statistics import CostFit

IDS = torch.zeros(8000, dtype=torch.int32)


class Machine:
    """Ranks whose seconds obey the law, with noise."""

    def __init__(
        self, seed: int = 0, a: float = 1e-5, b: float = 5e-9, c: float = 0.01, d: float = 0.02, noise: float = 0.02
    ) -> None:
        self.law = a, b, c, d
        self.noise = noise
        self.random = np.random.default_rng(seed)

    def work_s(self, micro_batches: list[np.ndarray]) -> float:
        """Of the lengths in each micro-batch."""
        a, b, c, d = self.law
        return sum(a * float(x.sum()) + b * float(x @ x) + c for x in micro_batches) + d

    def measured(self, seconds: np.ndarray) -> list[float]:
        return (seconds * np.exp(self.noise * self.random.standard_normal(len(seconds)))).tolist()


def lengths_in(share: sb.rollouts.RankBatch) -> list[np.ndarray]:
    return [np.array(mb.lengths, dtype=np.float64) for mb in share.micro_batches]


def feed(core: BalancerCore, machine: Machine, names: list[int]) -> sb.Batch:
    """Arrivals until a batch leaves."""
    while (batch := core.poll(0.0)) is None:
        length = int(np.clip(machine.random.lognormal(7, 1), 16, 7999))
        core.add(sb.Rollout(tokens={"input_ids": IDS[:length]}, rollout_id=f"r{len(names)}"), 0.0)
        names.append(length)
    return batch


def train(core: BalancerCore, machine: Machine, steps: int, speeds: Callable[[int], list[float]] | None = None) -> None:
    names: list[int] = [0] * core.statistics(0.0).accepted
    for step in range(steps):
        batch = feed(core, machine, names)
        work = np.array([machine.work_s(lengths_in(share)) for share in batch.ranks])
        speed = np.array([1.0] * len(work) if speeds is None else speeds(step))
        for rank, seconds in enumerate(machine.measured(work / speed)):
            core.record_step(StepTiming(batch.step, rank, seconds), 0.0)
        core.acknowledge(batch.step)
        verify(core)


def config(**knobs: object) -> sb.BalancerConfig:
    chosen = {
        "dp_size": 8,
        "batch_size": 32,
        "micro_batches": {"max_tokens": 8000},
        "sync": "step",
        "cost": sb.cost.CalibratedCost(sb.cost.QuadraticCost()),
    }
    return sb.BalancerConfig(**{**chosen, **knobs})  # type: ignore[arg-type]


def fit_of(core: BalancerCore) -> CostFit:
    fit = core.statistics(0.0).cost_fit
    assert fit is not None
    return fit


def slow_first(_: int) -> list[float]:
    return [1 / 1.5] + [1.0] * 7


def test_the_law_of_the_machine_is_found() -> None:
    core, machine = learning_core(config()), Machine()
    train(core, machine, 60)
    fit = fit_of(core)
    assert fit.steps == 59, "the first step does not count"
    assert fit.prediction_error < 0.05
    assert fit.seconds_per_token == pytest.approx(1e-5, rel=0.15)
    assert fit.seconds_per_token_pair == pytest.approx(5e-9, rel=0.15)
    assert fit.seconds_per_micro_batch + fit.seconds_per_step == pytest.approx(0.03, rel=0.3)
    assert fit.speeds == pytest.approx([1.0] * 8, abs=0.04)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_speed_of_a_slow_rank_is_learned(seed: int) -> None:
    core, machine = learning_core(config()), Machine(seed)
    train(core, machine, 60, slow_first)
    assert fit_of(core).speeds[0] == pytest.approx(1 / 1.5, rel=0.04)
    assert fit_of(core).prediction_error < 0.05, "of each rank by its speed"


def test_a_rank_that_becomes_slow_and_recovers_is_followed() -> None:
    core, machine = learning_core(config()), Machine(3)
    train(core, machine, 42, lambda step: slow_first(step) if step >= 25 else [1.0] * 8)
    assert fit_of(core).speeds[0] == pytest.approx(1 / 1.5, rel=0.06)
    train(core, machine, 20)
    assert fit_of(core).speeds[0] == pytest.approx(1.0, rel=0.06)


def test_seconds_that_include_waiting_teach_nothing() -> None:
    core, machine = learning_core(config(dp_size=2, batch_size=8)), Machine()
    for _ in range(5):
        batch = feed(core, machine, [0] * core.statistics(0.0).accepted)
        core.record_step(StepTiming(batch.step, 0, 1.0), 0.0)
        core.record_step(StepTiming(batch.step, 1, 1.0, own=False), 0.0)
        core.acknowledge(batch.step)
    assert fit_of(core).steps == 0
    assert core.statistics(0.0).measured_idle_fraction == 0.0


def test_a_rank_with_nothing_but_padding_copies_teaches_nothing() -> None:
    """What it is through with at once is no work."""
    core = learning_core(config(dp_size=2, batch_size=8))
    for _ in range(3):
        core.add(sb.Rollout(tokens={"input_ids": IDS[:100]}), 0.0)
        core.triggers.force_flush()
        batch = polled(core)
        is_padding = [share.rollouts[0].is_padding for share in batch.ranks]
        assert sorted(is_padding) == [False, True]
        for rank in range(2):
            core.record_step(StepTiming(batch.step, rank, 0.01 if is_padding[rank] else 1.0), 0.0)
        core.acknowledge(batch.step)
    assert fit_of(core).steps == 0


def test_rollouts_that_bring_their_own_cost_are_left_alone() -> None:
    core = learning_core(config(dp_size=2, batch_size=4, micro_batches=sb.MicroBatches(max_tokens=None), sync="step"))
    for step in range(12):
        for n in range(8 if step == 0 else 4):
            core.add(sb.Rollout(tokens={"input_ids": IDS[: n + 5]}, rollout_id=f"{step}-{n}", cost=7.0), 0.0)
        batch = core.poll(0.0)
        assert batch is not None
        assert sum(batch.loads) == 28.0
        for rank in range(2):
            core.record_step(StepTiming(batch.step, rank, 1.0 + rank), 0.0)
        core.acknowledge(batch.step)
    assert core.statistics(0.0).cost_fit == Calibration(sb.cost.CalibratedCost(), 2).fit()


def test_a_checkpoint_continues_where_it_was() -> None:
    core, machine = learning_core(config()), Machine(7)
    train(core, machine, 40, slow_first)
    again = learning_core(config())
    again.restore(saved(core), 0.0)
    verify(again)
    assert again.statistics(0.0).cost_fit == core.statistics(0.0).cost_fit
    now, before = (one.buffer.waiting(np.zeros(0, bool)).costs for one in (again, core))
    assert now == pytest.approx(before, rel=0.01), "what had moved by too little for another plan is in force"
    for _ in range(3):
        core.add(sb.Rollout(tokens={"input_ids": IDS[:99]}), 0.0)
    train(again, machine, 1, slow_first)
    assert fit_of(again).speeds[0] == pytest.approx(1 / 1.5, rel=0.06), "no second learning"


@pytest.mark.parametrize("how", ["restore", "reconfigure"])
def test_other_ranks_keep_the_law_and_not_the_speeds(how: str) -> None:
    core, machine = learning_core(config()), Machine(8)
    train(core, machine, 40, slow_first)
    before = fit_of(core)
    if how == "restore":
        again = learning_core(config(dp_size=4))
        again.restore(core.snapshot(0.0), 0.0)
    else:
        again = core
        again.reconfigure(core.config.replace(dp_size=4))
    after = fit_of(again)
    assert after.seconds_per_token == before.seconds_per_token
    assert after.speeds == (1.0,) * 4
    train(again, machine, 10, lambda _: [1.0] * 4)


def test_another_model_by_reconfigure_and_back() -> None:
    core, machine = learning_core(config()), Machine(9)
    train(core, machine, 20, slow_first)
    learned = core.statistics(0.0).cost_fit
    core.reconfigure(core.config.replace(deadline_s=5.0))
    assert core.statistics(0.0).cost_fit == learned, "another knob changed"
    core.reconfigure(core.config.replace(cost=sb.cost.TokenCost()))
    assert core.statistics(0.0).cost_fit is None
    train(core, machine, 2)
    core.reconfigure(core.config.replace(cost=sb.cost.CalibratedCost()))
    assert fit_of(core).steps == 0


def test_padded_micro_batches_are_priced_as_padded() -> None:
    learned = Calibration(sb.cost.CalibratedCost(sb.cost.PaddedCost()), 2)
    random = np.random.default_rng(1)
    for _ in range(60):
        shares = [[random.integers(1, 100, random.integers(1, 5))] for _ in range(2)]
        learned.observe(shares, [1e-3 * len(one) * int(one.max()) + 1e-2 for (one,) in shares])
    fit = learned.fit()
    assert fit.seconds_per_token == pytest.approx(1e-3, rel=0.05)
    assert fit.seconds_per_micro_batch + fit.seconds_per_step == pytest.approx(1e-2, rel=0.3)
    assert fit.prediction_error < 0.02


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prior": sb.cost.CalibratedCost()}, "does not learn itself"),
        ({"prior": 3}, "must be a cost model"),
        ({"half_life_steps": 0}, "half_life_steps"),
        ({"half_life_steps": float("nan")}, "half_life_steps"),
        ({"half_life_steps": True}, "half_life_steps"),
    ],
)
def test_priors_that_cannot_be_fitted_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sb.cost.CalibratedCost(**arguments)  # type: ignore[arg-type]


WINDOWED = sb.cost.LayerSumCost(
    flops_per_token=1e10, attention=(sb.cost.AttentionPairs(1e6), sb.cost.AttentionPairs(5e6, window=1024))
)


def test_pairs_within_a_window_are_learned() -> None:
    """Kernels compute attention at a third of the rate of matmuls: no other sum of tokens and L^2 fits."""
    true = sb.cost.LayerSumCost(
        flops_per_token=1e10, attention=(sb.cost.AttentionPairs(3e6), sb.cost.AttentionPairs(15e6, window=1024))
    )
    learned = Calibration(sb.cost.CalibratedCost(WINDOWED), 4)
    random = np.random.default_rng(0)
    for _ in range(60):
        shares = [[random.integers(100, 20000, 4)] for _ in range(4)]
        learned.observe(shares, [1e-15 * float(true(one).sum()) for (one,) in shares])
    lengths = np.array([100, 500, 1000, 2000, 8000, 20000])
    assert learned.in_force.model(lengths) / learned.in_force.model([4000]) == pytest.approx(
        true(lengths) / true(4000), rel=0.02
    )
    assert learned.fit().prediction_error < 1e-3
    assert learned.fit().seconds_per_token_pair == pytest.approx(1e-15 * true.flops_per_pair, rel=0.01)


@pytest.mark.parametrize("given", [None, 0.0])
def test_what_is_learned_of_micro_batches_is_planned_with_unless_it_is_given(given: float | None) -> None:
    knobs = {"micro_batches": {"max_tokens": 8000, "overhead_cost": given}, "sync": "step"}
    core, machine = learning_core(config(**knobs)), Machine(13, c=0.05, d=0.01, noise=0.01)
    train(core, machine, 60)
    learned = core.pricing.knobs.overhead_cost
    seconds = float(core.pricing.model(np.array([2000]))[0]) / (1e-5 * 2000 + 5e-9 * 2000**2)
    assert learned / seconds == (pytest.approx(0.05, rel=0.3) if given is None else 0.0)


def test_clocks_that_no_trainer_has_end_nothing() -> None:
    """Twelve orders of magnitude between two ranks leave digits for one of them only: the sums become singular."""
    learned = Calibration(sb.cost.CalibratedCost(sb.cost.TokenCost(), half_life_steps=2), 2)
    one = [np.array([1, 1])]
    for seconds in ([0.0, 1.0], [-1.0, 1.0], [float("nan"), 1.0], [float("inf"), 1.0]):
        assert not learned.observe([one, one], seconds)
    for seconds in [[1e-6, 1e-6], [1e-6, 1e-6], [1e-6, 1e6], [1e6, 1e-6]] * 5:
        learned.observe([one, one], seconds)
    fit = learned.fit()
    assert np.isfinite([fit.seconds_per_token, fit.seconds_per_micro_batch, fit.seconds_per_step]).all()

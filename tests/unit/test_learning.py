"""What is learned while a run goes on: CalibratedCost from the ranks' seconds, the auto window from the lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cores import learning_core, saved
from helpers import polled
from invariants import verify
from numpy.typing import NDArray

import stream_balancer as sb
from stream_balancer.core.in_flight import StepTiming
from stream_balancer.core.machine import BalancerCore
from stream_balancer.learn import attach, auto_window
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


def train(
    core: BalancerCore, machine: Machine, steps: int, speeds: Callable[[int], list[float]] | None = None
) -> list[float]:
    """-> for each step, the slowest rank's seconds over those of a perfect split."""
    names: list[int] = [0] * core.statistics(0.0).accepted
    ratios = []
    for step in range(steps):
        batch = feed(core, machine, names)
        work = np.array([machine.work_s(lengths_in(share)) for share in batch.ranks])
        speed = np.array([1.0] * len(work) if speeds is None else speeds(step))
        for rank, seconds in enumerate(machine.measured(work / speed)):
            core.record_step(StepTiming(batch.step, rank, seconds), 0.0)
        core.acknowledge(batch.step)
        verify(core)
        ratios.append(float((work / speed).max() / (work.sum() / speed.sum())))
    return ratios


def config(**knobs: object) -> sb.BalancerConfig:
    chosen = {
        "dp_size": 8,
        "batch_size": 32,
        "micro_batches": {"max_tokens": 8000},
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
    assert core.pricing.knobs.speeds is None, "noise does not make a rank slow"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_slow_rank_gets_less_until_all_finish_together(seed: int) -> None:
    core, machine = learning_core(config()), Machine(seed)
    ratios = train(core, machine, 60, slow_first)
    assert np.mean(ratios[:5]) > 1.3
    assert np.mean(ratios[30:]) < 1.05
    assert fit_of(core).speeds[0] == pytest.approx(1 / 1.5, rel=0.04)
    assert fit_of(core).prediction_error < 0.05, "of each rank by its speed"


def test_a_rank_that_becomes_slow_and_recovers_is_followed() -> None:
    core, machine = learning_core(config()), Machine(3)
    ratios = train(core, machine, 80, lambda step: slow_first(step) if 25 <= step < 50 else [1.0] * 8)
    assert np.mean(ratios[35:50]) < 1.06
    assert np.mean(ratios[62:]) < 1.04


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
    core = learning_core(config(dp_size=2, batch_size=4, micro_batches=sb.MicroBatches(max_tokens=None)))
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
    ratios = train(again, machine, 15, slow_first)
    assert np.mean(ratios) < 1.06, "no second learning"


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
    assert core.pricing.knobs.speeds is not None
    core.reconfigure(core.config.replace(cost=sb.cost.TokenCost()))
    assert core.statistics(0.0).cost_fit is None
    assert core.pricing.knobs.speeds is None
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
    knobs = {"micro_batches": {"max_tokens": 8000, "overhead_cost": given}}
    core, machine = learning_core(config(**knobs)), Machine(13, c=0.05, d=0.01, noise=0.01)
    train(core, machine, 60)
    learned = core.pricing.knobs.fixed_costs.micro_batch
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


ONE = torch.zeros(1, dtype=torch.uint8)


def auto(**knobs: Any) -> sb.BalancerConfig:
    return sb.BalancerConfig(
        **{"dp_size": 8, "batch_size": 32, "cost": sb.cost.QuadraticCost(), "window": "auto", **knobs}
    )


def core_of(**knobs: Any) -> BalancerCore:
    """Its partitions may be bad: they are not what is tested here, and they take most of the time."""
    core = BalancerCore(auto(**knobs), tolerance=0.05)
    attach(core)
    return core


def lognormal(count: int, sigma: float | NDArray[np.float64], seed: int, mu: float | NDArray[np.float64] = 7.6) -> Any:
    draw = np.exp(np.random.default_rng(seed).normal(mu, sigma, count))
    return np.clip(np.rint(draw), 32, 40_000).astype(np.int64)


def trace_of(lengths: NDArray[np.int64]) -> sb.Trace:
    """One after the other, a second apart."""
    count = lengths.size
    return sb.Trace(
        prompt_tokens=np.zeros(count, dtype=np.int64),
        output_tokens=lengths,
        group_ids=np.arange(count),
        arrival_s=np.arange(count, dtype=np.float64),
    )


def run(core: BalancerCore, lengths: NDArray[np.int64], start: int = 0) -> list[tuple[int, tuple[str, ...]]]:
    """[dispatch] the window in force after it, and what was in it."""
    told = []
    for number, length in enumerate(lengths.tolist(), start):
        core.add(sb.Rollout(tokens={"input_ids": ONE.expand(length)}, rollout_id=str(number)), float(number))
        while (batch := core.poll(float(number))) is not None:
            core.acknowledge(batch.step)
            told.append((core.config.window, tuple(sorted(r.rollout_id for r in batch.rollouts))))
    return told


class TestConfig:
    def test_windows_of_one_to_three_batches(self) -> None:
        c = auto()
        assert c.auto_windows == (32, 40, 48, 64, 96)
        assert (c.window, c.capacity, c.max_skips) == (64, 192, 16)
        assert sb.BalancerConfig(dp_size=8, batch_size=32).auto_windows == ()

    @pytest.mark.parametrize(
        ("knobs", "windows", "window"),
        [
            ({"capacity": 70}, (32, 40, 48, 64), 64),
            ({"capacity": 50}, (32, 40, 48), 48),
            ({"staleness": {"max_versions": 1}}, (32, 40, 48, 64), 64),
            ({"max_skips": 3}, (32, 40, 48, 64), 64),
            ({"max_skips": 2}, (32, 40, 48), 48),
            ({"batch_size": 32, "groups": {"size": 8}}, (32, 40, 48, 64, 96), 64),
            ({"batch_size": 24, "groups": {"size": 8}}, (24, 32, 40, 48, 72), 48),
            ({"batch_size": 24, "groups": {"size": 8, "keep": "free"}}, (24, 30, 36, 48, 72), 48),
            ({"batch_size": 24, "groups": {"size": 8}, "capacity": 47}, (24, 32, 40), 40),
        ],
    )
    def test_never_beyond_the_other_bounds(self, knobs: dict[str, Any], windows: tuple[int, ...], window: int) -> None:
        c = auto(**knobs)
        assert (c.auto_windows, c.window) == (windows, window)
        for one in windows:  # every one of them is a legal config, as a fixed window
            c.replace(window=one, capacity=c.capacity, max_skips=c.max_skips)

    @pytest.mark.parametrize(
        ("knobs", "said"),
        [
            (
                {"staleness": {"max_versions": 0}},
                "nothing to choose from: .* staleness.max_versions \\(0\\) leave no window above batch_size",
            ),
            ({"capacity": 33}, "nothing to choose from: capacity \\(33\\)"),
            ({"cost": sb.cost.PaddedCost()}, "window='auto' does not work with a padded cost"),
        ],
    )
    def test_what_cannot_work_is_refused(self, knobs: dict[str, Any], said: str) -> None:
        with pytest.raises(sb.errors.ConfigError, match=said):
            auto(**knobs)


class TestShadows:
    @pytest.mark.parametrize(
        ("seeds", "steps", "error"),
        [
            pytest.param((3,), 250, 0.04, marks=pytest.mark.slow),
            pytest.param((3, 5, 7), 400, 0.006, marks=pytest.mark.soak),
        ],
    )
    def test_they_foresee_what_a_fixed_window_idles(
        self, seeds: tuple[int, ...], steps: int, error: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In the mean of three streams: a shadow sees a part of each, and one stream's tail tells little."""
        monkeypatch.setattr(auto_window, "MEMORY", 1e9)
        foreseen: dict[int, list[float]] = defaultdict(list)
        fixed: dict[int, list[float]] = defaultdict(list)
        for seed in seeds:
            lengths = lognormal(32 * steps, 0.9, seed=seed)
            core = core_of()
            run(core, lengths)
            for window, idle in core.statistics(0.0).idle_by_window.items():
                foreseen[window].append(idle)
                report = sb.simulate(trace_of(lengths), auto(window=window, capacity=192), tolerance=0.05)
                fixed[window].append(report.overall.unavoidable_idle)
        assert len(foreseen) == 5
        for window, idles in foreseen.items():
            assert np.mean(idles) == pytest.approx(np.mean(fixed[window]), rel=0.2, abs=error), window


class TestChoice:
    def test_even_lengths_need_no_window(self) -> None:
        core = core_of()
        told = run(core, lognormal(32 * 120, 0.1, seed=0))
        assert {window for window, _ in told[:40]} == {64}, "eight fits in a row find the smaller one sure"
        assert told[-1][0] == 32
        assert core.statistics(0.0).window == 32

    def test_heavy_tails_need_a_wide_one(self) -> None:
        told = run(core_of(), lognormal(32 * 200, 1.2, seed=0))
        assert np.mean([window for window, _ in told[100:]]) > 56

    def test_it_follows_lengths_that_change(self) -> None:
        lengths = np.concatenate([lognormal(32 * 150, 0.1, seed=0), lognormal(32 * 250, 1.0, seed=1)])
        told = [window for window, _ in run(core_of(), lengths)]
        assert told[140] == 32
        assert min(told[-100:]) > 32


class TestState:
    def test_a_checkpoint_keeps_the_window(self) -> None:
        core = core_of()
        run(core, lognormal(32 * 120, 0.1, seed=0))
        restored = core_of()
        restored.restore(saved(core, 1.0), 1.0)
        assert restored.config == core.config
        assert restored.config.window == 32
        assert restored.statistics(0.0).idle_by_window == {}

    def test_knobs_that_change_live(self) -> None:
        core = core_of()
        run(core, lognormal(32 * 120, 0.1, seed=0))
        foreseen = core.statistics(0.0).idle_by_window
        core.reconfigure(core.config.replace(deadline_s=1000.0))
        assert core.config.window == 32, "what was learned stays"
        assert core.statistics(0.0).idle_by_window == foreseen
        core.reconfigure(core.config.replace(cost=sb.cost.TokenCost()))
        assert core.config.window == 32
        assert core.statistics(0.0).idle_by_window == {}, "other costs: it learns anew, from where it is"
        core.reconfigure(core.config.replace(window=50))
        assert (core.config.window, core.statistics(0.0).idle_by_window) == (50, {})
        core.reconfigure(core.config.replace(window="auto"))
        assert core.config.window == 48

"""window="auto": what it foresees is what fixed windows do, it follows the lengths, and it stays within the bounds."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from cores import saved
from numpy.typing import NDArray

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.learn import attach, auto_window

IDS = torch.zeros(1, dtype=torch.uint8)


def config(**knobs: Any) -> sb.BalancerConfig:
    return sb.BalancerConfig(
        **{"dp_size": 8, "batch_size": 32, "cost": sb.cost.QuadraticCost(), "window": "auto", **knobs}
    )


def core_of(**knobs: Any) -> BalancerCore:
    """Its partitions may be bad: they are not what is tested here, and they take most of the time."""
    core = BalancerCore(config(**knobs), tolerance=0.05)
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
        core.add(sb.Rollout(tokens={"input_ids": IDS.expand(length)}, rollout_id=str(number)), float(number))
        while (batch := core.poll(float(number))) is not None:
            core.acknowledge(batch.step)
            told.append((core.config.window, tuple(sorted(r.rollout_id for r in batch.rollouts))))
    return told


class TestConfig:
    def test_windows_of_one_to_three_batches(self) -> None:
        c = config()
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
        c = config(**knobs)
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
            config(**knobs)


class TestShadows:
    @pytest.mark.parametrize(
        ("seeds", "steps", "error"),
        [((3,), 250, 0.04), pytest.param((3, 5, 7), 400, 0.006, marks=pytest.mark.soak)],
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
                report = sb.simulate(trace_of(lengths), config(window=window, capacity=192), tolerance=0.05)
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

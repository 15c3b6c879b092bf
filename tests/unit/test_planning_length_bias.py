"""LengthBias: the running figures agree with the same figures computed at once."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stream_balancer.planning import LengthBias


def test_agrees_with_numpy():
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(8, 1, 20_000).round() + 1
    delays = rng.integers(0, 3, 20_000) + (lengths > np.quantile(lengths, 0.9)) * 2
    bias = LengthBias()
    for start in range(0, 20_000, 50):
        bias.record(lengths[start : start + 50], delays[start : start + 50])
    summary = bias.summary()
    assert summary.num_dispatched == 20_000
    assert summary.mean_delay == pytest.approx(delays.mean())
    assert summary.length_delay_correlation == pytest.approx(np.corrcoef(lengths, delays)[0, 1])
    deciles = [delays[part].mean() for part in np.array_split(np.argsort(lengths), 10)]
    assert summary.delay_per_decile == pytest.approx(deciles, abs=0.3)


def test_nothing_yet_is_nan():
    bias = LengthBias()
    bias.record([], [])
    assert math.isnan(bias.summary().mean_delay)
    assert all(map(math.isnan, bias.summary().delay_per_decile))
    bias.record([5, 5], [0, 1])
    assert math.isnan(bias.summary().length_delay_correlation)
    with pytest.raises(ValueError, match="alike"):
        bias.record([5, 6], [0])

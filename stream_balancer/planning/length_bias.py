"""Length bias: running figures on length against delay, in constant memory.

Short rollouts finish first, and a window that defers outliers delays long ones: both are biases a trainer should see.
Pure: the caller passes in what arrived and what was dispatched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .arrays import Floats

_PER_OCTAVE = 16
"""Histogram buckets per doubling of the length: quantiles are exact to 4.4 %."""

_NUM_BUCKETS = 32 * _PER_OCTAVE + 1
"""Lengths 1 .. 2**32."""

QUANTILES = (0.1, 0.5, 0.9, 0.99)
"""Which length quantiles a summary gives."""


@dataclass(frozen=True, slots=True)
class LengthBiasSummary:
    """Length against delay so far. NaN where nothing was seen yet."""

    num_dispatched: int
    """Rollouts."""
    num_batches: int
    mean_delay: float
    """Dispatches a rollout was passed over, on average."""
    delay_per_decile: tuple[float, ...]
    """[10] mean delay of the shortest tenth of the rollouts, the next tenth, ... (up to the histogram's 4.4 %)."""
    length_delay_correlation: float
    """Pearson's r of length and delay; 0 = blind to length."""
    arrived_quantiles: tuple[float, ...]
    """[len(QUANTILES)] lengths of what arrived."""
    dispatched_quantiles: tuple[float, ...]
    """[len(QUANTILES)] lengths of what was dispatched; below `arrived_quantiles` while long ones are held back."""
    batch_mean_spread: float
    """Standard deviation of the batches' mean lengths over what independent draws would give; 1 = like independent
    draws."""


class LengthBias:
    """Running figures on length against delay. O(n) per call, constant memory.

    Examples:
        >>> bias = LengthBias()
        >>> bias.arrived([100, 200, 400, 800, 1600, 3200])
        >>> bias.record([100, 200, 400], delays_dispatches=[0, 0, 0])  # the short ones left at once,
        >>> bias.record([1600, 800, 3200], delays_dispatches=[1, 0, 2])  # long ones were passed over
        >>> summary = bias.summary()
        >>> summary.mean_delay, round(summary.length_delay_correlation, 2)
        (0.5, 0.98)
        >>> [round(delay, 2) for delay in summary.delay_per_decile]  # the shortest tenth first
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.33, 1.0, 1.67, 2.0]
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything, e.g. after the warm-up, in which short rollouts come first."""
        self._arrived = np.zeros(_NUM_BUCKETS)
        self._dispatched = np.zeros(_NUM_BUCKETS)
        self._delays = np.zeros(_NUM_BUCKETS)
        # [3, 3] sums of products of (1, length, delay): whole numbers, so exact up to 2^53
        self._moments = np.zeros((3, 3))
        self._num_batches = 0
        self._batch_sum = 0.0
        self._batch_squares = 0.0
        self._batch_sizes = 0.0

    def arrived(self, lengths: ArrayLike) -> None:
        """Rollouts came in, of these lengths (tokens, >= 1)."""
        self._arrived += np.bincount(_bucket(np.asarray(lengths, dtype=np.float64)), minlength=_NUM_BUCKETS)

    def record(self, lengths: ArrayLike, delays_dispatches: ArrayLike) -> None:
        """A batch left.

        Args:
            lengths: [n] tokens of its rollouts.
            delays_dispatches: [n] dispatches that passed each over.
        """
        length = np.asarray(lengths, dtype=np.float64)
        delay = np.asarray(delays_dispatches, dtype=np.float64)
        if length.shape != delay.shape:
            raise ValueError(f"lengths {length.shape} and delays {delay.shape} must be alike: one of each per rollout.")
        if not length.size:
            return
        bucket = _bucket(length)
        self._dispatched += np.bincount(bucket, minlength=_NUM_BUCKETS)
        self._delays += np.bincount(bucket, weights=delay, minlength=_NUM_BUCKETS)
        columns = np.stack((np.ones(length.size), length, delay))
        self._moments += columns @ columns.T
        mean = float(length.mean())
        self._num_batches += 1
        self._batch_sum += mean
        self._batch_squares += mean * mean
        self._batch_sizes += 1.0 / length.size

    def summary(self) -> LengthBiasSummary:
        """The figures so far."""
        count, _, delay = self._moments[0].tolist()
        spread = self._moments - np.outer(self._moments[0], self._moments[0]) / max(count, 1.0)
        scale = math.sqrt(max(spread[1, 1] * spread[2, 2], 0.0))
        return LengthBiasSummary(
            num_dispatched=int(count),
            num_batches=self._num_batches,
            mean_delay=delay / count if count else math.nan,
            delay_per_decile=_delay_per_decile(self._dispatched, self._delays),
            length_delay_correlation=float(spread[1, 2]) / scale if scale else math.nan,
            arrived_quantiles=_quantiles(self._arrived),
            dispatched_quantiles=_quantiles(self._dispatched),
            batch_mean_spread=self._batch_mean_spread(float(spread[1, 1]) / max(count, 1.0)),
        )

    def _batch_mean_spread(self, variance_of_one: float) -> float:
        if self._num_batches < 2 or not variance_of_one > 0.0:
            return math.nan
        mean = self._batch_sum / self._num_batches
        variance = max(self._batch_squares / self._num_batches - mean * mean, 0.0)
        # Bessel's correction: the mean of the batches is taken from the same few batches
        variance *= self._num_batches / (self._num_batches - 1)
        independent = variance_of_one * self._batch_sizes / self._num_batches
        return math.sqrt(variance / independent)


def _bucket(lengths: Floats) -> NDArray[np.int64]:
    # logarithmic buckets: a tail of 100,000 tokens and answers of 100 at one relative precision, in fixed memory
    octaves: Floats = np.log2(np.maximum(lengths, 1.0))
    return np.clip(octaves * _PER_OCTAVE, 0, _NUM_BUCKETS - 1).astype(np.int64)


def _quantiles(histogram: Floats) -> tuple[float, ...]:
    """Lengths at QUANTILES; each bucket stands for its geometric middle."""
    total = float(histogram.sum())
    if not total:
        return (math.nan,) * len(QUANTILES)
    places = np.searchsorted(np.cumsum(histogram), np.array(QUANTILES) * total - 1e-9)
    return tuple(float(2.0 ** ((place + 0.5) / _PER_OCTAVE)) for place in places)


def _delay_per_decile(counts: Floats, delays: Floats) -> tuple[float, ...]:
    """Mean delay of each decile; a bucket that lies in two counts in both, in proportion."""
    total = float(counts.sum())
    if not total:
        return (math.nan,) * 10
    counts_so_far = np.concatenate(([0.0], np.cumsum(counts)))
    delays_so_far = np.concatenate(([0.0], np.cumsum(delays)))
    # interpolated, so that a bucket that lies in two deciles counts in both
    delay_so_far = np.interp(np.linspace(0.0, total, 11), counts_so_far, delays_so_far)
    return tuple((np.diff(delay_so_far) / (total / 10)).tolist())

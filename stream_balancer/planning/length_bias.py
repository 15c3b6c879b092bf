"""Length bias: running figures on length against delay, in constant memory.

Short rollouts finish first, and a window that defers outliers delays long ones. A trainer should see both biases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .arrays import Floats, Ints

# Histogram buckets per doubling of the length: quantiles are exact to 4.4 %. Buckets hold lengths 1 .. 2**32.
_PER_OCTAVE = 16
_NUM_BUCKETS = 32 * _PER_OCTAVE + 1


@dataclass(frozen=True, slots=True)
class LengthBiasSummary:
    """Length against delay so far. NaN where no rollout was seen yet."""

    num_dispatched: int
    """Rollouts."""
    mean_delay: float
    """Steps that left a rollout behind, on average."""
    delay_per_decile: tuple[float, ...]
    """[10] mean delay of the shortest tenth of the rollouts, the next tenth, ... (to the histogram's 4.4 %)."""
    length_delay_correlation: float
    """Pearson's r of length and delay; 0 = the delay does not depend on the length."""
    num_cut: int
    """Rollouts evicted because they took long ("late", "stale")."""
    cut_per_decile: tuple[float, ...]
    """[10] evicted rollouts with the lengths of the shortest tenth of the dispatched ones, the next tenth, ... (the
    last counts longer ones, too)."""
    length_shift: float
    """Mean length of the dispatched rollouts / mean length of the dispatched and evicted ones. 0.97 = the trainer sees
    rollouts that are 3 % shorter than the generated ones."""


class LengthBias:
    """Running figures on length against delay. O(n) per call, constant memory.

    Examples:
        >>> bias = LengthBias()
        >>> bias.record([100, 200, 400], delays_steps=[0, 0, 0])
        >>> bias.record([1600, 800, 3200], delays_steps=[1, 0, 2])  # long rollouts were left behind
        >>> summary = bias.summary()
        >>> summary.mean_delay, round(summary.length_delay_correlation, 2)
        (0.5, 0.98)
        >>> [round(delay, 2) for delay in summary.delay_per_decile]  # the shortest tenth first
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.33, 1.0, 1.67, 2.0]
    """

    def __init__(self) -> None:
        self._buckets = np.zeros((3, _NUM_BUCKETS))  # dispatched rollouts, their delays, evicted rollouts
        self._cut_tokens = 0
        self._moments = np.zeros((3, 3))  # sums of products of (1, length, delay), exact up to 2**53

    def record(self, lengths: ArrayLike, delays_steps: ArrayLike) -> None:
        """Rollouts left: [n] tokens, and [n] steps that left each rollout behind."""
        length, delay = np.asarray(lengths, np.float64), np.asarray(delays_steps, np.float64)
        if length.shape != delay.shape:
            raise ValueError(f"lengths {length.shape} and delays {delay.shape} must be alike: one of each per rollout.")
        bucket = _bucket_of(length)
        columns = np.stack((np.ones(length.size), length, delay))
        self._buckets[0] += np.bincount(bucket, minlength=_NUM_BUCKETS)
        self._buckets[1] += np.bincount(bucket, weights=delay, minlength=_NUM_BUCKETS)
        self._moments += columns @ columns.T

    def cut(self, lengths: Sequence[int]) -> None:
        """Rollouts with these lengths were evicted because they took long."""
        self._buckets[2] += np.bincount(_bucket_of(np.array(lengths, np.float64)), minlength=_NUM_BUCKETS)
        self._cut_tokens += sum(lengths)

    def summary(self) -> LengthBiasSummary:
        """The figures so far."""
        count, tokens, delay = self._moments[0].tolist()
        spread = self._moments - np.outer(self._moments[0], self._moments[0]) / max(count, 1.0)
        scale = math.sqrt(max(spread[1, 1] * spread[2, 2], 0.0))
        deciles = [math.nan] * 10  # one object: two summaries of nothing are equal
        cut_deciles, num_cut, shift = deciles, int(self._buckets[2].sum()), math.nan
        if count:
            so_far = np.pad(np.cumsum(self._buckets, axis=1), ((0, 0), (1, 0)))
            # Interpolated: a bucket that lies in two deciles counts in both, in proportion.
            edges = np.linspace(0.0, count, 11)
            deciles = (np.diff(np.interp(edges, *so_far[:2])) / (count / 10)).tolist()
            # Evicted rollouts below all dispatched lengths count in the first decile, those above in the last.
            cut = np.interp(edges, so_far[0], so_far[2])
            cut_deciles = np.diff([0.0, *cut[1:-1], num_cut]).tolist()
            shift = (tokens / count) / ((tokens + self._cut_tokens) / (count + num_cut)) if tokens else math.nan
        mean_delay = delay / count if count else math.nan
        correlation = float(spread[1, 2]) / scale if scale else math.nan
        cuts = num_cut, tuple(cut_deciles), shift
        return LengthBiasSummary(int(count), mean_delay, tuple(deciles), correlation, *cuts)


def _bucket_of(lengths: Floats) -> Ints:
    """[n] logarithmic buckets: 100 tokens and 100,000 tokens have the same relative precision."""
    octaves: Floats = np.log2(np.maximum(lengths, 1.0))
    return (octaves * _PER_OCTAVE).clip(0, _NUM_BUCKETS - 1).astype(np.int64)

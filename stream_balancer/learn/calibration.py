"""Calibration of the cost model by the ranks' seconds: work per token and token pair, and each rank's speed.

The seconds that a rank computed on its rank batch are taken to be

    seconds[rank] = (a * tokens + b * pairs + c * micro_batches + d) / speed[rank]

with the token pairs that the prior counts (``CalibratedCost.pairs``: those that a model's layers attend to, or L^2),
and ``a, b, c, d >= 0`` are fitted by recursive least squares with forgetting, in information form: the sums of products
fade by a constant factor per step, and a prior that does not fade (the FLOPs model's mix of a and b, weak c and d) is
added before each solve. So a direction that balanced rank batches never excite stays where the prior put it instead of
drifting off, which is how plain forgetting fails ("wind-up"; Astrom and Wittenmark, Adaptive Control, 2nd ed., 11.6).
Errors are relative, and an observation far outside the usual spread counts less (Huber's weights), so that one
checkpoint in the middle of a step does not spoil the fit. A rank's speed is the median of its last measured speeds.

What is learned moves a little with every step. Costs follow it only once it has moved by enough: other costs mean that
all that waits is priced anew.

Pure: seconds come in as an argument. What costs are for is decided elsewhere: :mod:`.costs` puts them in force.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from stream_balancer.core.pricing import Learned
from stream_balancer.cost import CalibratedCost, LayerSumCost
from stream_balancer.planning.arrays import Floats, Ints
from stream_balancer.statistics import CostFit

_FEATURES = 4  # tokens, token pairs, micro-batches, steps
_PRIOR_SPREAD = np.array([0.5, 0.5, 0.2, 0.2])
"""How far, in parts of a typical step, each of the four may lie from the prior."""
_HUBER = 1.5  # spreads; beyond, an observation pulls as if it lay here
_LEAST_SPREAD = 0.01  # no clock is better
_SPEED_WINDOW = 33  # of a rank's measured speeds, whose median counts
_SPEED_NEWS = 11  # but if the median of the last ones is another, they alone count: a change is followed in 6 steps
_MEDIAN_NOISE = 1.2533  # of a median, over that of a mean
_SPEED_STEPS = 5  # before that many, all ranks count as alike
_CHANGE = 0.005  # of the mix of a and b, of a micro-batch in parts of a step: less is not worth another plan
_DISTINGUISHED = 0.1  # of the prior's variance; where all ranks always run as many micro-batches, half of it stays
_ERROR_STEPS = 10  # whose prediction error is in the statistics
_PROBE = (1000, 30_000)  # tokens; priors that count as many pairs of these count pairs alike


class Calibration:
    """The learned part of a :class:`CalibratedCost`, for one balancer.

    ``observe`` what a step held and how long it took; ``in_force`` is what to plan with now.
    """

    def __init__(self, model: CalibratedCost, dp_size: int) -> None:
        self._model = model
        # FLOPs of each of the four by the prior, in which micro-batches and steps are free
        self._weights = np.array([model.prior.flops_per_token, model.prior.flops_per_pair, 0.0, 0.0])
        self._keep = 0.5 ** (1.0 / model.half_life_steps)
        self._steps = 0  # observed, the first included
        self._typical: Floats = np.zeros(_FEATURES)  # a rank's features at the first step that counted; 0 before it
        self._typical_s = 1.0  # and its seconds
        self._products = np.zeros((_FEATURES, _FEATURES))
        self._answers = np.zeros(_FEATURES)
        self._parts = np.zeros(_FEATURES)  # of a typical step's seconds
        self._spread = 0.1  # relative, of what is measured about what is predicted
        self._errors: list[float] = []  # of the last predictions
        self._log_speeds: Floats = np.zeros(dp_size)
        self._recent: list[Floats] = []  # of each step, the ranks' log speeds
        self._found: Floats = np.zeros(0)  # what is in force was made of; empty: the prior is in force
        self.in_force = Learned(model, 0.0)
        """Costs in the prior's unit: a typical rank batch costs what the prior says. Replaced once it is another."""

    # -- in ------------------------------------------------------------------------------------------------------------

    def observe(self, work: Sequence[Sequence[Ints]], seconds: Sequence[float]) -> Floats | None:
        """Every rank's seconds for a step. ``work[rank][micro_batch]``: the lengths of the rollouts. -> [ranks] log of
        each rank's slowdown, by the learned cost; None of a step that says nothing. O(rollouts)."""
        measured = np.array(seconds, dtype=np.float64)
        if not (np.isfinite(measured).all() and (measured > 0).all()):
            return None
        self._steps += 1
        if self._steps == 1:  # compilation, allocation, caches: says nothing about the next one
            return None
        features = np.array([self._features(micro_batches) for micro_batches in work])
        if not self._typical.any():
            # The unit of all that follows: with features and seconds near 1 the normal equations below are well
            # conditioned.
            self._typical = np.maximum(np.median(features, axis=0), 1.0)
            self._typical_s = float(np.median(measured))
            self._parts = self._prior()
        else:
            # how good the prediction was that stood before this step
            error = np.abs(self._predict(features) / np.exp(self._log_speeds) / measured - 1.0)
            self._errors = [*self._errors, float(error.mean())][-_ERROR_STEPS:]
        slowness: Floats = np.log(measured / self._predict(features))
        self._learn_speeds(slowness)
        self._learn_parts(features, measured)
        self._put_in_force()
        return slowness

    def _features(self, micro_batches: Sequence[Ints]) -> tuple[float, ...]:
        if self._model.padded:
            micro_batches = [np.full(one.size, one.max()) for one in micro_batches]
        lengths = np.concatenate(micro_batches)
        return float(lengths.sum()), float(self._model.prior.pairs(lengths).sum()), float(len(micro_batches)), 1.0

    # -- learning ------------------------------------------------------------------------------------------------------

    def _prior(self) -> Floats:
        """[4] parts of a typical step under the prior model."""
        parts: Floats = self._weights * self._typical / self._unit
        return parts

    @property
    def _unit(self) -> float:
        """Cost of a typical rank batch by the prior."""
        return float((self._weights * self._typical).sum())

    def _predict(self, features: Floats) -> Floats:
        """[ranks] seconds at speed 1."""
        seconds: Floats = self._typical_s * ((features / self._typical) @ self._parts)
        return seconds

    def _learn_speeds(self, slowness: Floats) -> None:
        self._recent = [*self._recent, -slowness][-_SPEED_WINDOW:]
        if len(self._recent) >= _SPEED_STEPS:
            # [ranks] medians, so that one slow step moves nothing: of the last steps where they say otherwise
            last = self._recent[-_SPEED_NEWS:]
            medians, news = np.median(self._recent, axis=0), np.median(last, axis=0)
            noise = 3.0 * _MEDIAN_NOISE * self._spread / math.sqrt(len(last))
            medians = np.where(np.abs(news - medians) > noise, news, medians)
            # relative to the median rank, since all of them being faster makes nobody fast
            self._log_speeds = medians - np.median(medians)

    def _learn_parts(self, features: Floats, measured: Floats) -> None:
        measured = measured * np.exp(self._log_speeds)  # at speed 1
        residuals = np.abs(np.log(measured / self._predict(features)))
        # a median deviation x 1.4826 is a normal standard deviation; one strange step must not widen it much
        usual = min(1.4826 * float(np.median(residuals)), 3.0 * self._spread)
        self._spread = max(0.9 * self._spread + 0.1 * usual, _LEAST_SPREAD)
        # [ranks] Huber: a rank far off its prediction counts by its direction, not by its size
        weights = np.minimum(1.0, _HUBER * self._spread / np.maximum(residuals, 1e-12))
        # [ranks, 4] scaled by the measured seconds, so that relative errors are minimised and the answer is 1 for each
        rows = features / self._typical * (self._typical_s / measured)[:, None]
        self._products = self._keep * self._products + (rows * weights[:, None]).T @ rows
        self._answers = self._keep * self._answers + weights @ rows
        # The prior as so many more rows: without them a stream of equal lengths could not tell tokens from pairs.
        certainty = np.diag((self._spread / _PRIOR_SPREAD) ** 2)
        parts = _non_negative(self._products + certainty, self._answers + certainty @ self._prior())
        if parts[0] + parts[1] > 0:  # else all seconds were fixed costs, and no cost would grow with length
            self._parts = parts

    # -- out -----------------------------------------------------------------------------------------------------------

    def _put_in_force(self) -> None:
        """Plan with what has been learned, if that makes a difference."""
        of_pairs, of_micro_batches = (self._parts[1:3] / self._parts[:2].sum()).tolist()
        if not self._distinguishes_micro_batches():
            of_micro_batches = 0.0
        found = np.array([of_pairs, of_micro_batches])
        if self._found.size and np.abs(found - self._found).max() <= _CHANGE:
            return
        self._found = found
        of_token, of_pair = np.array([1.0 - of_pairs, of_pairs]) * self._unit / self._typical[:2]
        self.in_force = Learned(
            partial(_cost, self._model.prior, float(of_token), float(of_pair)),
            of_micro_batches * self._unit / float(self._typical[2]),
        )

    def _distinguishes_micro_batches(self) -> bool:
        """Numbers of micro-batches have differed by enough to tell what one costs from what a step costs."""
        certainty = (self._spread / _PRIOR_SPREAD) ** 2
        # [4], of which [2] is the variance of a micro-batch's cost: that column of the inverse
        variances = _solve(self._products + np.diag(certainty), np.eye(_FEATURES)[2])
        return bool(0.0 < variances[2] * certainty[2] < _DISTINGUISHED)

    # -- record --------------------------------------------------------------------------------------------------------

    def fit(self) -> CostFit:
        """For the statistics."""
        typical = np.where(self._typical > 0, self._typical, 1.0)
        of_token, of_pair, of_micro_batch, of_step = (self._typical_s * self._parts / typical).tolist()
        return CostFit(
            steps=max(self._steps - 1, 0),
            prediction_error=float(np.mean(self._errors)) if self._errors else None,
            seconds_per_token=of_token,
            seconds_per_token_pair=of_pair,
            seconds_per_micro_batch=of_micro_batch,
            seconds_per_step=of_step,
            speeds=tuple(np.exp(self._log_speeds).tolist()),
        )

    def state(self) -> dict[str, Any]:
        """Everything learned, as numbers and lists of numbers, for a checkpoint."""
        learned = {name: np.asarray(getattr(self, name)).tolist() for name in _OF_THE_LAW + _OF_RANKS}
        return learned | {"_pairs": self._model.prior.pairs(_PROBE).tolist()}

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Continue from another's :meth:`state`; with another number of ranks, their speeds are learned anew. What was
        learned of other pairs (another model) is left."""
        if not np.allclose(state.get("_pairs", 0.0), self._model.prior.pairs(_PROBE)):
            return
        same_ranks = len(state["_log_speeds"]) == len(self._log_speeds)
        for name in _OF_THE_LAW + _OF_RANKS * same_ranks:
            is_array = isinstance(getattr(self, name), np.ndarray)
            setattr(self, name, np.array(state[name]) if is_array else state[name])
        if self._typical.any():
            self._put_in_force()


_OF_THE_LAW = ("_steps", "_typical", "_typical_s", "_products", "_answers", "_parts", "_spread", "_errors")
_OF_RANKS = ("_log_speeds", "_recent")


def _cost(prior: LayerSumCost, of_token: float, of_pair: float, lengths: ArrayLike) -> Floats:
    """``[n]`` lengths -> ``[n]`` float64 work."""
    x = np.asarray(lengths, dtype=np.float64)
    return of_token * x + of_pair * prior.pairs(x)


def _solve(products: Floats, answers: Floats) -> Floats:
    """[n] of [n, n] and [n]. Clocks that differ by twelve orders of magnitude leave digits for only one of them: then
    the shortest of all solutions, because a step's report must never end the controller."""
    return np.asarray(np.linalg.lstsq(products, answers, rcond=None)[0], dtype=np.float64)


def _non_negative(products: Floats, answers: Floats) -> Floats:
    """[4] least squares of which none is below 0: what is below it is left out, until nothing is."""
    free = np.ones(_FEATURES, dtype=np.bool_)
    while True:
        solved = np.zeros(_FEATURES)
        solved[free] = _solve(products[np.ix_(free, free)], answers[free])
        if (solved >= 0).all():
            return solved
        free &= solved > 0

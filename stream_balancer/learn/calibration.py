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

Where ranks share rollouts (``context_parallel``), tokens and pairs are those of a rank's parts, with the overhead that
the configuration gives.

Pure: seconds come in as an argument. What costs are for is decided elsewhere: :mod:`.costs` puts them in force.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from stream_balancer.cost import CalibratedCost
from stream_balancer.planning.arrays import Floats, Ints
from stream_balancer.planning.plan import part_cost
from stream_balancer.planning.rank_speeds import NO_FIXED_COSTS, FixedCosts
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
_SPEED_LEAST = 0.02  # ranks within this of each other are alike: noise is not a slow rank
_SPEED_CHANGE = 0.01  # a smaller change of a speed is not worth another plan
_MIX_CHANGE = 0.005  # nor is a smaller change of the mix of a and b, or of the fixed costs in parts of a step
_DISTINGUISHED = 0.1  # of the prior's variance; where all ranks always run as many micro-batches, half of it stays
_ERROR_STEPS = 10.0  # the prediction error in the statistics is that of about so many steps
_MOST_PENDING = 64  # steps whose seconds may be missing
_PROBE = (1000, 30_000)  # tokens; priors that count as many pairs of these count pairs alike


class Calibration:
    """The learned part of a :class:`CalibratedCost`, for one balancer.

    ``expect`` what a step holds, ``observe`` its seconds; ``cost`` and ``speeds`` are what to plan with now.
    """

    def __init__(
        self,
        model: CalibratedCost,
        num_ranks: int,
        speeds: Sequence[float] | None = None,
        *,
        cp_overhead: float = 0.0,
    ) -> None:
        self._model = model
        self._num_ranks = num_ranks
        self._cp_overhead = cp_overhead
        self._keep = 0.5 ** (1.0 / model.half_life_steps)
        self._pending: OrderedDict[int, Floats] = OrderedDict()
        given = np.log(np.ones(num_ranks) if speeds is None else np.array(speeds, dtype=np.float64))
        self._log_speeds: Floats = given - np.median(given)
        self._recent: list[deque[float]] = [deque(maxlen=_SPEED_WINDOW) for _ in range(num_ranks)]
        self._steps = 0  # observed, the first included
        self._typical: Floats = np.zeros(_FEATURES)  # a rank's features at the first step that counted; 0 before it
        self._typical_s = 1.0  # and its seconds
        self._products = np.zeros((_FEATURES, _FEATURES))
        self._answers = np.zeros(_FEATURES)
        self._parts = np.zeros(_FEATURES)  # of a typical step's seconds
        self._spread = 0.1  # relative, of what is measured about what is predicted
        self._error = self._error_weight = 0.0
        self._mix: float | None = None  # part of token pairs in the costs given out
        self.fixed_costs = NO_FIXED_COSTS
        """Costs of a step and of a micro-batch whatever is in them, in the unit of :meth:`cost`."""
        self.speeds: tuple[float, ...] | None = None if speeds is None else tuple(speeds)
        """Speeds of the ranks, mean 1. None = all alike."""
        self.slowness: Floats | None = None
        """[ranks] log of each rank's slowdown in the last step, by the learned cost; None where it says nothing of that
        step."""

    # -- in ------------------------------------------------------------------------------------------------------------

    def expect(self, step: int, rank_batches: Sequence[Sequence[Ints]], degrees: Sequence[Sequence[int]]) -> None:
        """A step leaves, with these lengths of whole rollouts: ``rank_batches[rank][micro_batch]``, each shared by
        ``degrees[rank][micro_batch]`` ranks. O(rollouts)."""
        self._pending[step] = np.array(
            [self._features(*of_rank) for of_rank in zip(rank_batches, degrees, strict=True)]
        )
        while len(self._pending) > _MOST_PENDING:
            self._pending.popitem(last=False)

    def expects(self, step: int) -> bool:
        """True if the seconds of this step will teach something."""
        return step in self._pending

    def _features(self, micro_batches: Sequence[Ints], degrees: Sequence[int]) -> tuple[float, ...]:
        padded = self._model.padded
        lengths = np.concatenate([np.full(one.size, one.max()) if padded else one for one in micro_batches])
        by = np.repeat(np.array(degrees, dtype=np.int64), [one.size for one in micro_batches])
        parts = part_cost(np.ones(by.size), by, self._cp_overhead)
        return float(parts @ lengths), float(parts @ self._model.pairs(lengths)), float(len(micro_batches)), 1.0

    def observe(self, step: int, seconds: Sequence[float]) -> bool:
        """Every rank's seconds for a step. True if ``cost`` or ``speeds`` are now others. O(ranks)."""
        self.slowness = None
        features = self._pending.pop(step, None)
        measured = np.array(seconds, dtype=np.float64)
        if features is None or not (np.isfinite(measured).all() and (measured > 0).all()):
            return False
        self._steps += 1
        if self._steps == 1:  # compilation, allocation, caches: says nothing about the next one
            return False
        if not self._typical.any():
            # The unit of all that follows: with features and seconds near 1 the normal equations below are well
            # conditioned.
            self._typical = np.maximum(np.median(features, axis=0), 1.0)
            self._typical_s = float(np.median(measured))
            self._parts = self._prior()
        else:
            self._note_error(features, measured)
        self._learn_speeds(features, measured)
        self._learn_parts(features, measured)
        return self._apply()

    # -- learning ------------------------------------------------------------------------------------------------------

    def _prior(self) -> Floats:
        """[4] parts of a typical step under the prior model."""
        linear = self._model.linear * self._typical[0]
        quadratic = self._model.quadratic * self._typical[1]
        parts: Floats = np.array([linear, quadratic, 0.0, 0.0]) / (linear + quadratic)
        return parts

    def _predict(self, features: Floats) -> Floats:
        """[ranks] seconds at speed 1."""
        seconds: Floats = self._typical_s * ((features / self._typical) @ self._parts)
        return seconds

    def _residuals(self, features: Floats, measured: Floats) -> Floats:
        return np.log(measured * np.exp(self._log_speeds) / self._predict(features))

    def _note_error(self, features: Floats, measured: Floats) -> None:
        """How good the prediction was that stood before this step."""
        predicted = self._predict(features) / np.exp(self._log_speeds)
        keep = 0.5 ** (1.0 / _ERROR_STEPS)
        self._error = keep * self._error + (1 - keep) * float(np.mean(np.abs(predicted - measured) / measured))
        self._error_weight = keep * self._error_weight + (1 - keep)

    def _learn_speeds(self, features: Floats, measured: Floats) -> None:
        speeds = np.log(self._predict(features) / measured)
        self.slowness = -speeds
        for recent, speed in zip(self._recent, speeds.tolist(), strict=True):
            recent.append(speed)
        if len(self._recent[0]) >= _SPEED_STEPS:
            self._forget_old_speeds()
            # [ranks] medians, so that one slow step moves nothing; relative to the median rank, since all of them being
            # faster makes nobody fast
            medians = np.array([np.median(recent) for recent in self._recent])
            self._log_speeds = medians - np.median(medians)

    def _forget_old_speeds(self) -> None:
        likely = 3.0 * _MEDIAN_NOISE * self._spread / math.sqrt(_SPEED_NEWS)
        for recent in self._recent:
            news = list(recent)[-_SPEED_NEWS:]
            if abs(float(np.median(news)) - float(np.median(recent))) > likely:
                recent.clear()
                recent.extend(news)

    def _learn_parts(self, features: Floats, measured: Floats) -> None:
        residuals = np.abs(self._residuals(features, measured))
        # a median deviation x 1.4826 is a normal standard deviation; one strange step must not widen it much
        usual = min(1.4826 * float(np.median(residuals)), 3.0 * self._spread)
        self._spread = max(0.9 * self._spread + 0.1 * usual, _LEAST_SPREAD)
        # [ranks] Huber: a rank far off its prediction counts by its direction, not by its size
        weights = np.minimum(1.0, _HUBER * self._spread / np.maximum(residuals, 1e-12))
        # [ranks, 4] scaled by the measured seconds, so that relative errors are minimised and the answer is 1 for each
        rows = features / self._typical * (self._typical_s / (measured * np.exp(self._log_speeds)))[:, None]
        self._products = self._keep * self._products + (rows * weights[:, None]).T @ rows
        self._answers = self._keep * self._answers + (rows * weights[:, None]).sum(axis=0)
        # The prior as so many more rows: without them a stream of equal lengths could not tell tokens from pairs.
        certainty = np.diag((self._spread / _PRIOR_SPREAD) ** 2)
        parts = _non_negative(self._products + certainty, self._answers + certainty @ self._prior())
        if parts[0] + parts[1] > 0:  # else all seconds were fixed costs, and no cost would grow with length
            self._parts = parts

    # -- out -----------------------------------------------------------------------------------------------------------

    def cost(self, lengths: ArrayLike) -> Floats:
        """``[n]`` lengths -> ``[n]`` float64 work in the prior's unit: a typical rank batch costs what
        the prior says."""
        if self._mix is None:
            return self._model(lengths)
        x = np.asarray(lengths, dtype=np.float64)
        tokens, pairs = x / self._typical[0], self._model.pairs(x) / self._typical[1]
        cost: Floats = self._unit * ((1.0 - self._mix) * tokens + self._mix * pairs)
        return cost

    @property
    def _unit(self) -> float:
        return float(self._model.linear * self._typical[0] + self._model.quadratic * self._typical[1])

    def _apply(self) -> bool:
        """Take over what has been learned, if it makes a difference."""
        work = float(self._parts[0] + self._parts[1])
        mix = float(self._parts[1]) / work
        changed = self._mix is None or abs(mix - self._mix) > _MIX_CHANGE
        if changed:
            self._mix = mix
        of_micro_batches, of_step = self._parts[2:].tolist()
        if not self._distinguishes_micro_batches():
            of_micro_batches, of_step = 0.0, of_micro_batches + of_step
        unit = self._unit
        fixed = FixedCosts(of_step * unit / work, of_micro_batches / float(self._typical[2]) * unit / work)
        if self.speeds is not None or math.dist(fixed, self.fixed_costs) > _MIX_CHANGE * unit:
            self.fixed_costs, changed = fixed, True
        return self._apply_speeds() or changed

    def _distinguishes_micro_batches(self) -> bool:
        """Numbers of micro-batches have differed by enough to tell what one costs from what a step costs."""
        certainty = (self._spread / _PRIOR_SPREAD) ** 2
        # [4], of which [2] is the variance of a micro-batch's cost: that column of the inverse
        variances = _solve(self._products + np.diag(certainty), np.eye(_FEATURES)[2])
        return bool(0.0 < variances[2] * certainty[2] < _DISTINGUISHED)

    def _apply_speeds(self) -> bool:
        if len(self._recent[0]) < _SPEED_STEPS:
            return False
        counted = np.array([len(recent) for recent in self._recent])
        clear = np.abs(self._log_speeds) > np.maximum(
            _SPEED_LEAST, 3.0 * _MEDIAN_NOISE * self._spread / np.sqrt(counted)
        )
        own = np.exp(np.where(clear, self._log_speeds, 0.0))
        after = own / own.mean()
        before = np.array(self.speeds or [1.0] * self._num_ranks)
        if np.abs(after * before.mean() / before - 1.0).max() <= _SPEED_CHANGE:
            return False
        self.speeds = tuple(after.tolist()) if clear.any() else None
        return True

    # -- record --------------------------------------------------------------------------------------------------------

    def fit(self) -> CostFit:
        """For the statistics."""
        typical = self._typical if self._typical.any() else np.ones(_FEATURES)
        coefficients = (self._typical_s * self._parts / typical).tolist()
        return CostFit(
            steps=max(self._steps - 1, 0),
            prediction_error=self._error / self._error_weight if self._error_weight else None,
            seconds_per_token=coefficients[0],
            seconds_per_token_pair=coefficients[1],
            seconds_per_micro_batch=coefficients[2],
            seconds_per_step=coefficients[3],
            speeds=tuple(np.exp(self._log_speeds).tolist()),
        )

    def state(self) -> dict[str, Any]:
        """Everything learned, as numbers and lists of numbers, for a checkpoint."""
        learned = {name: value for name, value in vars(self).items() if name not in _NOT_LEARNED}
        for name, value in learned.items():
            if isinstance(value, np.ndarray | tuple):
                learned[name] = np.asarray(value).tolist()
        return learned | {
            "_recent": [list(recent) for recent in self._recent],
            "_num_ranks": self._num_ranks,
            "_pairs": self._model.pairs(_PROBE).tolist(),
        }

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Continue from another's :meth:`state`; with another number of ranks, their speeds are learned anew. What was
        learned of other pairs (another model) is left."""
        if not np.allclose(state.get("_pairs", 0.0), self._model.pairs(_PROBE)):
            return
        same_ranks = state["_num_ranks"] == self._num_ranks
        for name in vars(self).keys() & state.keys() - _NOT_LEARNED - (frozenset() if same_ranks else _PER_RANK):
            is_array = isinstance(getattr(self, name), np.ndarray)
            setattr(self, name, np.array(state[name], dtype=np.float64) if is_array else state[name])
        self.fixed_costs = FixedCosts(*self.fixed_costs)
        self.speeds = None if self.speeds is None else tuple(self.speeds)
        if same_ranks:
            self._recent = [deque(recent, maxlen=_SPEED_WINDOW) for recent in state["_recent"]]


_PER_RANK = frozenset({"_log_speeds", "speeds"})
_NOT_LEARNED = frozenset({"_model", "_num_ranks", "_keep", "_pending", "_cp_overhead", "_recent", "slowness"})


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

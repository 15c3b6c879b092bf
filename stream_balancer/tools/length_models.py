"""Length traces drawn from a model: lognormal lengths with groups and a cap. Pure numpy, and seeded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from stream_balancer.errors import TraceError
from stream_balancer.tools.trace import MAX_TOKENS, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthModel:
    """ln(output tokens) = mu + N(0, sigma_between) per group + N(0, sigma_within) per rollout, cut at a cap where a
    spike stands.

    Siblings are alike: sigma_between^2 / (sigma_between^2 + sigma_within^2) of the variance is between groups
    (0.55-0.96 in the traces these were fitted to). Raises ValueError for numbers that describe no lengths.
    """

    mu: float
    """Mean of ln(output tokens): the median is exp(mu)."""
    sigma_between: float
    """Spread of ln(output tokens) between groups."""
    sigma_within: float
    """Spread of ln(output tokens) among siblings."""
    cap: int | None = None
    """Longest output, tokens; None = no cap."""
    cap_share: float = 0.0
    """Fraction of rollouts that end at the cap: the longest draws are raised to it until there are so many. Runaway
    generations."""
    floor: int = 1
    """Shortest output, tokens."""
    prompt_mu: float | None = None
    """Mean of ln(prompt tokens); None = no prompt: the length is the output."""
    prompt_sigma: float = 0.5
    """Spread of ln(prompt tokens) between groups; siblings share the prompt."""
    siblings: int = 1
    """Rollouts per group."""

    def __post_init__(self) -> None:
        spreads = self.sigma_between, self.sigma_within, self.prompt_sigma
        longest = math.inf if self.cap is None else self.cap
        for rule, holds in {
            "mu must be finite": math.isfinite(self.mu),
            "spreads must be finite and >= 0": all(0 <= spread < math.inf for spread in spreads),
            "siblings must be >= 1": self.siblings >= 1,
            "1 <= floor <= cap must hold": 1 <= self.floor <= longest,
            "cap_share must be in 0..1": 0.0 <= self.cap_share <= 1.0,
            "cap_share needs a cap to end at": self.cap_share == 0 or self.cap is not None,
        }.items():
            if not holds:
                raise ValueError(f"{rule}: {self}")


_LRM = LengthModel(mu=7.44, sigma_between=1.51, sigma_within=0.36, cap=30_000, siblings=5, prompt_mu=4.5)

PRESETS: Mapping[str, LengthModel] = {
    # Fits to the traces described in docs/tuning.md: mu, between-group and within-group sigma of ln(output), share
    # at cap.
    "rg": LengthModel(
        mu=4.98,
        sigma_between=1.12,
        sigma_within=0.52,
        cap=2048,
        cap_share=0.032,
        siblings=3,
        prompt_mu=5.2,
        prompt_sigma=0.7,
    ),
    "lrm": _LRM,
    # Cut at the 80th and at the 95th percentile: in training a fifth of the rollouts may end at the longest length.
    "lrm-truncated": replace(_LRM, cap=6_300, cap_share=0.2),
    "lrm-truncated-95": replace(_LRM, cap=21_900, cap_share=0.05),
    "misguided": LengthModel(mu=7.64, sigma_between=0.94, sigma_within=0.43, cap=40_000, siblings=3, prompt_mu=4.5),
    "tau": LengthModel(
        mu=7.59, sigma_between=0.66, sigma_within=0.60, cap=32_768, siblings=4, prompt_mu=7.15, prompt_sigma=0.05
    ),
    # Lognormal with mean 4096 before it is cut to 64..32768, every rollout on its own: the literature's textbook tail.
    "lognormal": LengthModel(mu=math.log(4096) - 0.5, sigma_between=0.0, sigma_within=1.0, cap=32_768, floor=64),
}
"""Length models by name, for :func:`generate_trace` and ``stream-balancer replay generate:NAME``."""


def generate_trace(num_rollouts: int, model: LengthModel | str = "lognormal", *, seed: int = 0) -> Trace:
    """A trace of ``num_rollouts`` drawn from a length model, groups one after another, no recorded arrivals.

    :param model: a :class:`LengthModel`, or the name of one of the :data:`PRESETS`.
    :param seed: the same seed gives the same trace.

    Raises :class:`TraceError` for an unknown name or fewer than 1 rollout.
    """
    if num_rollouts < 1:
        raise TraceError(f"a generated trace needs at least 1 rollout, not {num_rollouts}")
    if isinstance(model, str):
        if model not in PRESETS:
            raise TraceError(f"no length model is called {model!r}; use one of {', '.join(PRESETS)}")
        name, model = model, PRESETS[model]
    else:
        name = "generated"
    rng = np.random.default_rng(seed)
    groups = np.arange(num_rollouts) // model.siblings
    num_groups = int(groups[-1]) + 1
    level = model.mu + rng.normal(0.0, model.sigma_between, num_groups)[groups]
    # drawn for all at once, cut later: the same seed gives the same draw under any cap
    draw = level + rng.normal(0.0, model.sigma_within, num_rollouts)
    # e^40: no overflow, and far above MAX_TOKENS
    output = np.maximum(np.rint(np.exp(np.minimum(draw, 40.0))), model.floor)
    if model.cap is not None:
        output = np.minimum(output, model.cap)
        at_cap = round(model.cap_share * num_rollouts)
        if at_cap:
            output[np.argsort(draw, kind="stable")[-at_cap:]] = model.cap
    prompt = np.zeros(num_groups)
    if model.prompt_mu is not None:
        prompt = np.maximum(np.rint(np.exp(rng.normal(model.prompt_mu, model.prompt_sigma, num_groups))), 1)
    return Trace(
        prompt_tokens=prompt[groups].astype(np.int64),
        output_tokens=np.minimum(output, MAX_TOKENS).astype(np.int64),
        group_ids=groups.astype(np.int64),
        name=name,
    )

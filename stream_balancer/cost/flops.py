"""Work of a rollout as a sum over a model's layers: so much per token, so much per attended token pair. All cost models
are such sums, so there is one way to price a length, and calibration reads one form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

MATMUL_PASSES = 3.0  # forward, and the gradients of the input and of the weight
ATTENTION_PASSES = 3.5  # forward, and a backward of 2.5: flash kernels compute the scores a second time


@dataclass(frozen=True, slots=True)
class AttentionPairs:
    """Softmax attention of the layers that reach equally far.

    A token attends to itself and to those before it in its rollout: to all of them, to the last ``window`` of them
    (itself among them), or to those of its own chunk of ``chunk`` tokens.

    Examples:
        >>> lengths = [100, 500, 1000, 2000, 4000, 8000]
        >>> AttentionPairs(1.0)(lengths).astype(int).tolist()  # FLOPs per pair x pairs
        [5050, 125250, 500500, 2001000, 8002000, 32004000]
        >>> AttentionPairs(1.0, window=1000)(lengths).astype(int).tolist()
        [5050, 125250, 500500, 1500500, 3500500, 7500500]
        >>> AttentionPairs(1.0, chunk=1000)(lengths).astype(int).tolist()
        [5050, 125250, 500500, 1001000, 2002000, 4004000]
    """

    flops: float
    """FLOPs of a training step per attended pair of tokens, summed over these layers."""
    window: int | None = None
    """A token attends to the last ``window`` tokens. Also of sparse attention that chooses so many: the pairs are as
    many."""
    chunk: int | None = None
    """A token attends to those of its own chunk of so many tokens."""
    causal: bool = True
    """Count the pairs that the mask allows, as kernels that skip masked blocks do. False for kernels that do not:
    L^2 pairs, however far a layer reaches."""

    def __post_init__(self) -> None:
        check_flops("AttentionPairs.flops", self.flops)
        for name in ("window", "chunk"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"AttentionPairs.{name} must be an int >= 1 or None, not {value!r}")
        if self.window is not None and self.chunk is not None:
            raise ValueError(f"AttentionPairs: window ({self.window}) and chunk ({self.chunk}) exclude each other")

    def pairs(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """``[n]`` lengths -> ``[n]`` float64 attended pairs."""
        x = np.asarray(lengths, dtype=np.float64)
        # kernels that do not skip masked blocks compute them
        if not self.causal:
            return x * x
        if self.chunk is not None:
            rest = x % self.chunk
            return 0.5 * ((x - rest) * (self.chunk + 1) + rest * (rest + 1))
        # all tokens reach so many, but for the first ones: 1, 2, ...
        reached = x if self.window is None else np.minimum(x, self.window)
        return reached * (x - 0.5 * (reached - 1))

    def __call__(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """``[n]`` lengths -> ``[n]`` float64 FLOPs."""
        work: NDArray[np.float64] = self.flops * self.pairs(lengths)
        return work


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSumCost:
    """FLOPs of one training step (forward and backward) over a rollout of L tokens, summed over the model's layers:
    ``flops_per_token * L``, and for every reach of attention FLOPs per pair times the pairs within that reach.

    The other cost models are ways to make one: ``TransformerCost.from_hf_config`` of a model's configuration. Write
    your own for a model that it refuses: measure or count FLOPs per token and per pair. Only ratios matter, so any unit
    will do.

    Examples:
        >>> windowed = LayerSumCost(  # five layers of six reach 1024 tokens
        ...     flops_per_token=6e10, attention=(AttentionPairs(4e5), AttentionPairs(2e6, window=1024))
        ... )
        >>> (windowed([1000, 2000, 4000, 8000, 16000, 32000]) / 1e12).round(1)  # TFLOPs
        array([  61.2,  123.8,  250.3,  508.1, 1042.9, 2189.3])
    """

    flops_per_token: float
    """Per token of a rollout: 6 per weight that a token passes through, and whatever else is linear in L."""
    attention: tuple[AttentionPairs, ...] = ()
    """Pairs for every reach; none for a model without softmax attention."""

    padded = False
    """Rollouts are packed."""

    def __post_init__(self) -> None:
        check_flops(f"{type(self).__name__}.flops_per_token", self.flops_per_token)
        # else every partition would be balanced, and one rank may get all
        if self.flops_per_token + self.flops_per_pair <= 0:
            raise ValueError(f"{self!r}: all FLOPs are 0, so every rollout would cost nothing")

    @property
    def flops_per_pair(self) -> float:
        """Per pair of tokens that every layer attends to."""
        return sum(part.flops for part in self.attention)

    def attention_flops(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """``[n]`` lengths -> ``[n]`` float64 FLOPs of attention. O(n) per reach."""
        x = np.asarray(lengths, dtype=np.float64)
        return sum((part(x) for part in self.attention), start=np.zeros_like(x))

    def pairs(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """``[n]`` lengths -> ``[n]`` float64 token pairs that attention reaches, the mean over its layers by their
        FLOPs: work is ``flops_per_token * L + flops_per_pair * pairs(L)``. L^2 where attention costs nothing."""
        if not self.flops_per_pair:
            return np.square(np.asarray(lengths, dtype=np.float64))
        return self.attention_flops(lengths) / self.flops_per_pair

    def __call__(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """``[n]`` lengths -> ``[n]`` float64 work. O(n) per reach."""
        x = np.asarray(lengths, dtype=np.float64)
        work = self.flops_per_token * x
        # every put asks for one length: no more arrays than it takes
        for part in self.attention:
            work = work + part(x)
        return work


def check_flops(name: str, flops: float) -> None:
    if not (math.isfinite(flops) and flops >= 0):
        raise ValueError(f"{name} must be a finite number >= 0, not {flops!r}")

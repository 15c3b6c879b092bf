"""The cost models: tokens, tokens squared, FLOPs of a decoder, padded, calibrated. Pure numpy.

FLOP counts follow the usual accounting (2 FLOPs per multiply-add, backward = 2x forward), as in Narayanan et al.
2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", appendix, generalised to
grouped-query attention, gated MLPs and mixture-of-experts layers. The backward of attention counts 2.5x its forward,
as its kernels compute the scores a second time (Dao 2023, "FlashAttention-2", section 4.1).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stream_balancer.cost.flops import AttentionPairs, LayerSumCost
from stream_balancer.cost.hf_config import layer_sum_of
from stream_balancer.errors import ConfigError


@runtime_checkable
class CostModel(Protocol):
    """Predicted work by length, as the balancer asks for it."""

    @property
    def padded(self) -> bool:
        """True if micro-batches are padded: a micro-batch then costs rollouts x (cost of its longest), not a sum."""
        ...

    def __call__(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """Work per rollout, ``[n]`` float64, finite and >= 0, for ``[n]`` lengths in tokens. Must grow with length."""
        ...


class TokenCost(LayerSumCost):
    """Work = tokens. Right while attention is a small part: short rollouts, or wide models.

    Examples:
        >>> TokenCost()([100, 500, 1000, 2000, 4000])
        array([ 100.,  500., 1000., 2000., 4000.])
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(flops_per_token=1.0)


class QuadraticCost(LayerSumCost):
    """Work = linear * L + quadratic * L^2, in any unit: only the ratio of the two matters for balance. 24576 to 1 is a
    decoder layer of hidden size 4096 (6 * hidden), a 7B model.

    Examples:
        >>> QuadraticCost(linear=1000.0, quadratic=1.0)([100, 500, 1000, 2000, 4000])  # pairs: half of it at 1000
        array([  110000.,   750000.,  2000000.,  6000000., 20000000.])
    """

    __slots__ = ()

    def __init__(self, linear: float = 24576.0, quadratic: float = 1.0) -> None:
        """Weights of a token, and of a token pair."""
        super().__init__(flops_per_token=linear, attention=(AttentionPairs(quadratic, causal=False),))


class TransformerCost(LayerSumCost):
    """FLOPs of one training step (forward and backward) of a decoder whose layers are alike and attend to the whole
    rollout, of L tokens, by its sizes. For other models see :meth:`from_hf_config`, which names these sizes as a
    configuration has them where one is refused.

    Per layer and token, forward: 2 FLOPs per weight of the projections and the (active) MLP, and ``4 * heads *
    head_dim`` per attended token pair; L(L+1)/2 pairs under a causal mask. The vocabulary projection counts once per
    token. A training step is 3 times the forward pass, and 3.5 times for attention.

    Examples:
        >>> llama_8b = TransformerCost(
        ...     hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8,
        ...     intermediate_size=14336, vocab_size=128256,
        ... )
        >>> (llama_8b([1000, 2000, 4000, 8000, 32000]) / 1e12).round()  # TFLOPs: 32 times the tokens, 52 times the work
        array([  46.,   94.,  195.,  419., 2380.])
    """

    __slots__ = ()

    def __init__(
        self,
        *,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        intermediate_size: int,
        vocab_size: int,
        head_dim: int | None = None,
        active_experts: int = 1,
        gated_mlp: bool = True,
        causal: bool = True,
    ) -> None:
        """``num_kv_heads``: key/value heads (grouped-query attention); None = ``num_heads``. ``intermediate_size``:
        width of one MLP, or of one expert. ``head_dim``: None = ``hidden_size / num_heads``. ``active_experts``:
        experts each token passes through (top-k plus shared ones); 1 for a dense model. ``gated_mlp``: three MLP
        matrices (SwiGLU) instead of two. ``causal``: count half of the token pairs, as kernels that skip masked blocks
        do; False for kernels that do not."""
        sizes = {
            # a model type of layers alike, with an MLP of three matrices or of two
            "model_type": "llama" if gated_mlp else "gpt_neox",
            "hidden_size": hidden_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "intermediate_size": intermediate_size * active_experts,
            "vocab_size": vocab_size,
            "head_dim": head_dim,
        }
        made = layer_sum_of(sizes, causal=causal)
        super().__init__(flops_per_token=made.flops_per_token, attention=made.attention)

    @staticmethod
    def from_hf_config(config: Any, *, causal: bool = True) -> LayerSumCost:
        """The sum over the layers that a Hugging Face configuration describes, exact for the model types of
        bench/results/model_shapes.md: windows, chunks, latent, sparse and linear attention, state spaces, experts.

        ``config``: a ``PretrainedConfig``, or a dict of one; of a multimodal model its ``text_config`` is read. An
        object is the better source, as transformers fills in what a ``config.json`` leaves out. ``causal``: as the
        field of that name.

        Raises ValueError naming what it does not know; nothing is guessed. Images are not tokens of the decoder
        alone: a rollout with images brings its own ``Rollout(cost=...)``.

        Examples:
            >>> gpt_oss_20b = TransformerCost.from_hf_config({
            ...     "model_type": "gpt_oss", "hidden_size": 2880, "vocab_size": 201088, "num_hidden_layers": 24,
            ...     "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            ...     "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128,
            ...     "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4,
            ... })
            >>> [(part.window, part.flops) for part in gpt_oss_20b.attention]
            [(128, 688128.0), (None, 688128.0)]
            >>> (gpt_oss_20b([1000, 2000, 4000, 8000, 32000]) / 1e12).round(1)  # TFLOPs
            array([  22.1,   44.8,   92.4,  195.9, 1047.7])
        """
        return layer_sum_of(config, causal=causal)


class PaddedCost(TokenCost):
    """Work of a padded micro-batch: rollouts x the longest of them, so alike lengths belong together.

    Examples:
        >>> cost = PaddedCost()
        >>> cost([100, 500, 1000, 2000, 4000])  # of each by itself; together in a micro-batch they are 5 x 4000
        array([ 100.,  500., 1000., 2000., 4000.])
        >>> cost.padded
        True
    """

    __slots__ = ()

    padded = True
    """Micro-batches are padded to their longest rollout."""


@dataclass(frozen=True)
class CalibratedCost:
    """Work, learned from the seconds that ranks report.

    It starts as ``prior`` and from then on is fitted to the seconds that ranks report: work per token, per token pair,
    per micro-batch and per step, and a speed for each rank (``calibration`` has the method). The planner
    ignores the speeds; ``statistics().straggler`` names a slow rank. The balancer keeps what was learned, and shows it
    in ``statistics().cost_fit`` and in ``state_dict()``.

    Only seconds that a rank computed *by itself* teach anything: time spent waiting for other ranks in a collective
    makes all ranks look alike. So the trainer says what to time: ``with feed.timed(): ...`` around forward and backward
    passes, or :meth:`RankFeed.add_compute_s`, or ``balancer.record_step_seconds`` in a loop over ``batches()``.

    Examples:
        >>> cost = CalibratedCost(prior=QuadraticCost(linear=1000.0, quadratic=1.0), half_life_steps=30)
        >>> cost([100, 500, 1000, 2000, 4000])  # until the first seconds are in: the prior
        array([  110000.,   750000.,  2000000.,  6000000., 20000000.])
    """

    prior: LayerSumCost = field(default_factory=QuadraticCost)
    """Belief before the first measurements, and about directions that they do not show: ``TransformerCost`` for the
    FLOPs of your model, or any other model of ``sb.cost``."""
    half_life_steps: float = 30.0
    """A measurement counts half after this many steps. Shorter follows changes sooner, longer averages more noise."""

    def __post_init__(self) -> None:
        # below one step the last measurement alone would set the speed of a rank
        half_life = self.half_life_steps
        if isinstance(half_life, bool) or not isinstance(half_life, int | float) or not 1 <= half_life < math.inf:
            raise ValueError(f"CalibratedCost.half_life_steps must be a finite number >= 1, not {half_life!r}")
        if not isinstance(self.prior, LayerSumCost):
            raise ValueError(
                f"CalibratedCost.prior must be a cost model that does not learn itself, not {self.prior!r}; use "
                "QuadraticCost(), TransformerCost(...), LayerSumCost(...), TokenCost() or PaddedCost()"
            )

    @property
    def padded(self) -> bool:
        """True if the prior counts padding."""
        return self.prior.padded

    def __call__(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """``[n]`` lengths -> ``[n]`` float64 work before anything was learned: the prior's."""
        return self.prior(lengths)


def cost_of(text: str) -> CostModel:
    """The cost model that a text names. Raises ConfigError."""
    # a Windows path has a colon, too: it ends in .json, and is no name
    name, _, rest = text.partition(":")
    named: dict[str, Callable[..., CostModel]] = {
        "tokens": TokenCost,
        "quadratic": QuadraticCost,
        "padded": PaddedCost,
    }
    try:
        if name in named:
            return named[name](*(float(weight) for weight in rest.split(":") if rest))
        if text.endswith(".json"):
            return TransformerCost.from_hf_config(json.loads(Path(text).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"cost {text!r}: {error}") from None
    raise ConfigError(
        f"cost {text!r}: no such cost model. Use tokens, quadratic, quadratic:LINEAR:QUADRATIC, padded, or the path of "
        "a Hugging Face config.json"
    )

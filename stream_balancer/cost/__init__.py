"""Cost models: how much work a length is.

A cost model turns lengths (tokens) into predicted work, one float per rollout; ranks are balanced by the sum. Pure
numpy: no torch, no clock, no waiting. Write your own by giving a callable with the two members of :class:`CostModel`.

``models`` has the models, ``flops`` the sum over a decoder's layers, ``hf_config`` reads it off a configuration.
"""

from stream_balancer.cost.flops import AttentionPairs, LayerSumCost
from stream_balancer.cost.models import (
    CalibratedCost,
    CostModel,
    PaddedCost,
    QuadraticCost,
    TokenCost,
    TransformerCost,
    cost_of,
)

__all__ = [
    "AttentionPairs",
    "CalibratedCost",
    "CostModel",
    "LayerSumCost",
    "PaddedCost",
    "QuadraticCost",
    "TokenCost",
    "TransformerCost",
    "cost_of",
]

"""Planning: which rollouts go, on which rank, in which micro-batch. Pure numpy, positions in and out."""

from .bounds import lower_bound
from .choice import smallest_max_skips
from .length_bias import LengthBias, LengthBiasSummary
from .micro_batches import OversizeError, form_micro_batches
from .partition import split
from .plan import Plan, PlanKnobs, Waiting
from .planner import choose, plan_batch

__all__ = [
    "LengthBias",
    "LengthBiasSummary",
    "OversizeError",
    "Plan",
    "PlanKnobs",
    "Waiting",
    "choose",
    "form_micro_batches",
    "lower_bound",
    "plan_batch",
    "smallest_max_skips",
    "split",
]

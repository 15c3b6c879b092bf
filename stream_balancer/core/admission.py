"""What a rollout must be to be let in, whatever else is held. Pure; every refusal says what, why and what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from stream_balancer.config import BalancerConfig
from stream_balancer.errors import RolloutError
from stream_balancer.types import Rollout
from stream_balancer.values import MAX_COST

__all__ = ["Schema", "check_fits", "check_group", "check_schema", "cost_of", "costs_of", "schema_of", "with_loss_mask"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Schema = tuple[dict[str, tuple[object, tuple[int, ...]]], frozenset[str]]
"""Token columns with dtype and trailing shape, and names of scalars: alike for all rollouts of a balancer."""


def check_fits(rollout: Rollout, config: BalancerConfig) -> None:
    """Raise RolloutError for one that could never be dispatched, or never be let in."""
    if rollout.group_id is None and config.group_size is not None and config.groups != "free":
        raise RolloutError(
            f"config has group_size={config.group_size}, but rollout {rollout.rollout_id!r} has no group_id: it would "
            "count as a group of its own. Give the siblings of one prompt the same group_id, or leave group_size out"
        )
    cap = config.max_tokens_per_micro_batch
    if cap is not None and rollout.num_tokens > cap and config.oversize == "refuse":
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} has {rollout.num_tokens} tokens, above "
            f"max_tokens_per_micro_batch ({cap}). "
            "Raise the cap, truncate the rollout, or set oversize='alone' to run it in a micro-batch of its own"
        )
    limit = config.capacity_bytes
    if limit is not None and rollout.nbytes > limit:
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} has {rollout.nbytes} bytes of tensors, above capacity_bytes "
            f"({limit}): it could "
            "never be let in. Raise capacity_bytes"
        )


_LOOK_LIKE_MASKS = frozenset(
    {"response_mask", "completion_mask", "action_mask", "assistant_mask", "assistant_masks", "loss_masks", "labels"}
)


def with_loss_mask(rollout: Rollout, column: str | None) -> Rollout:
    """The rollout, its mask called ``loss_mask``. ``column``: what it was put under; None = there is none. O(1) where
    that is its name already.

    Raises RolloutError where it is not sure which tokens are trained on: a wrong guess is a wrong denominator, which
    nobody sees.
    """
    tokens = rollout.tokens
    if "loss_mask" in tokens:
        if column is not None and (column == "loss_mask" or column not in tokens):
            return rollout  # put as loss_mask, or renamed where it comes from
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} has a column 'loss_mask', but loss_mask_column is {column!r}: which "
            "tokens are trained on? Leave the column out, or the knob"
        )
    if column is not None and column in tokens:
        return rollout.with_loss_mask(column)
    if column not in (None, "loss_mask"):
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} has no column {column!r}, which loss_mask_column names; it has "
            f"{sorted(tokens)}. Give every rollout one, or set loss_mask_column=None if every token is trained on"
        )
    if column is not None and (found := sorted(_LOOK_LIKE_MASKS.intersection(tokens))):
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} has no 'loss_mask', so every token would be trained on, but it has "
            f"{found[0]!r}. "
            + (
                "Give it a loss_mask: labels != -100"
                if found[0] == "labels"
                else f"If that says which tokens are trained on, set BalancerConfig(loss_mask_column={found[0]!r})"
            )
            + "; if every token is, loss_mask_column=None"
        )
    return rollout


def cost_of(rollout: Rollout, model: Callable[[Ints], Floats]) -> float:
    """Its own cost, else the model's. Raises RolloutError if that is no number from 0 to 1e100."""
    if rollout.cost is not None:
        return rollout.cost
    cost = float(model(np.array([rollout.num_tokens], dtype=np.int64))[0])
    if not 0 <= cost <= MAX_COST:  # not NaN either
        raise RolloutError(
            f"the cost model gave {cost} for rollout {rollout.rollout_id!r} ({rollout.num_tokens} tokens); a cost must "
            f"be a finite number >= 0 and at most {MAX_COST:g}. Mend {model!r}, or give the rollout a cost of its own"
        )
    return cost


def costs_of(rollouts: Sequence[Rollout], model: Callable[[Ints], Floats]) -> list[float]:
    """:func:`cost_of` for each, asking the model once."""
    if len(rollouts) == 1 or any(rollout.cost is not None for rollout in rollouts):
        return [cost_of(rollout, model) for rollout in rollouts]
    costs = np.asarray(model(np.array([rollout.num_tokens for rollout in rollouts], dtype=np.int64)), dtype=np.float64)
    if not ((costs >= 0) & (costs <= MAX_COST)).all():
        return [cost_of(rollout, model) for rollout in rollouts]  # raises, and names one
    found: list[float] = costs.tolist()
    return found


def check_group(rollouts: Sequence[Rollout]) -> None:
    """Raise RolloutError unless they are siblings."""
    if not rollouts:
        raise RolloutError("put_group() takes at least one rollout")
    ids = {r.group_id for r in rollouts}
    if len(ids) != 1 or None in ids:
        raise RolloutError(f"put_group() takes siblings that share one group_id, not {sorted(map(str, ids))}")


def schema_of(rollout: Rollout) -> Schema:
    columns: dict[str, tuple[object, tuple[int, ...]]] = {
        name: (column.dtype, tuple(column.shape[1:])) for name, column in rollout.tokens.items()
    }
    return columns, frozenset(rollout.scalars)


def check_schema(rollout: Rollout, schema: Schema) -> None:
    """Raise RolloutError for one whose columns or scalars are not those. O(columns)."""
    if _has_schema(rollout, *schema):
        return
    columns, scalars = schema_of(rollout)
    if columns != schema[0]:
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} has token columns {_describe(columns)}, but the first rollout had "
            f"{_describe(schema[0])}: they could not share a batch. Give every rollout the same columns, dtypes "
            "and trailing shapes"
        )
    if scalars != schema[1]:
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} has scalars {sorted(scalars)}, but the first rollout had "
            f"{sorted(schema[1])}: they "
            "could not share a batch. Give every rollout the same scalars, or use metadata for what only some have"
        )


def _has_schema(rollout: Rollout, columns: dict[str, tuple[object, tuple[int, ...]]], scalars: frozenset[str]) -> bool:
    """Without building what a message needs: every put comes here."""
    if len(rollout.tokens) != len(columns) or rollout.scalars.keys() != scalars:
        return False
    for name, column in rollout.tokens.items():
        like = columns.get(name)
        if like is None or column.dtype is not like[0]:
            return False
        if (column.ndim > 1 or like[1]) and column.shape[1:] != like[1]:
            return False
    return True


def _describe(columns: dict[str, tuple[object, tuple[int, ...]]]) -> str:
    def one(dtype: object, shape: tuple[int, ...]) -> str:
        return f"{str(dtype).removeprefix('torch.')}[{', '.join(['L', *map(str, shape)])}]"

    return "{" + ", ".join(f"{name}: {one(*column)}" for name, column in sorted(columns.items())) + "}"

"""Plans that several adapters ask for, in the terms of ``stream_balancer.planning``. No trainer is known here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from stream_balancer import planning


class UnplannableError(ValueError, AssertionError):
    """A batch that cannot be dealt as asked. Trainers' own functions assert, and their callers may expect that."""


def in_lockstep(lengths: ArrayLike, work: ArrayLike, num_ranks: int, max_tokens: int) -> list[list[list[int]]] | None:
    """``[rank][micro_batch]`` positions for ranks that meet at every micro-batch, each of at most ``max_tokens``. None
    where there are too few items for as many micro-batches on every rank."""
    plan = planning.form_micro_batches(lengths, work, num_ranks, max_tokens=max_tokens, sync="micro_batch")
    # a rank that runs fewer would leave the others waiting in a collective
    if len({len(of_rank) for of_rank in plan}) > 1:
        return None
    return [[micro_batch.tolist() for micro_batch in of_rank] for of_rank in plan]


def fewest(
    tokens: np.ndarray[Any, Any], work: np.ndarray[Any, Any], cap: int, *, multiple_of: int = 1, at_least: int = 1
) -> list[list[int]] | None:
    """Positions in as few groups as were found, a multiple of ``multiple_of``: alike in ``work``, each of at most
    ``cap`` tokens, none empty. None if that takes more groups than there are items."""
    # no fewer groups can hold the tokens, so the search begins there
    least = max(at_least, -(-int(tokens.sum()) // cap))
    for number in range(-(-least // multiple_of) * multiple_of, tokens.size + 1, multiple_of):
        for weight in (work, tokens):  # nearly full: only exchanges find a way
            found = planning.partition(weight, number)
            if all(one.size and tokens[one].sum() <= cap for one in found):
                return [one.tolist() for one in found]
        # a partition balances work and knows no cap: where it fails, packing may still find a way
        (packed,) = planning.form_micro_batches(np.maximum(tokens, 1), work, 1, max_tokens=cap, multiple_of=number)
        if len(packed) == number and all(tokens[one].sum() <= cap for one in packed):
            return [one.tolist() for one in packed]
    return None


def choose_groups(
    lengths: Sequence[ArrayLike],
    costs: Sequence[np.ndarray[Any, Any]],
    count: int,
    num_ranks: int,
    *,
    skips: Sequence[int],
    max_skips: int,
    step: int,
    due: Sequence[bool] | None = None,
    counts: Literal["equal", "free"] = "free",
) -> list[int]:
    """Places of ``count`` groups whose rollouts balance over the ranks, ascending.

    ``lengths`` and ``costs``: of each group's rollouts. ``skips``: batches that passed each group over. ``due``: groups
    that must go now, as far as there is room.
    """
    # the planner counts rollouts, so groups that lack some get weightless stand-ins
    size = max(1, *(len(of_group) for of_group in costs))
    cost, tokens = np.zeros((len(lengths), size)), np.ones((len(lengths), size), dtype=np.int64)
    for place, of_group in enumerate(costs):
        cost[place, : len(of_group)] = of_group
        tokens[place, : len(of_group)] = np.maximum(lengths[place], 1)
    positions = planning.choose(
        tokens.ravel(),
        cost.ravel(),
        dp_size=min(num_ranks, count * size),
        batch_size=count * size,
        max_skips=max_skips,
        skips=np.repeat(skips, size),
        due=None if due is None else np.repeat(due, size),
        groups=np.repeat(np.arange(len(lengths)), size),
        counts=counts,
        step=step,
    )
    places: list[int] = np.unique(positions // size).tolist()
    return places

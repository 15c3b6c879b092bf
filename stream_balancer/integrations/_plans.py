"""Plans that several adapters ask for, in the terms of ``stream_balancer.planning``. No trainer is known here."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from stream_balancer import planning

Group = TypeVar("Group", bound=Hashable)


class UnplannableError(ValueError, AssertionError):
    """A batch that cannot be dealt as asked. Trainers' own functions assert, and their callers may expect that."""


def packed(
    tokens: np.ndarray[Any, Any], work: np.ndarray[Any, Any], cap: int, *, multiple_of: int = 1, at_least: int = 1
) -> list[list[int]] | None:
    """Positions in as few groups as were found, ``at_least`` so many and a multiple of ``multiple_of``: alike in
    ``work``, each of at most ``cap`` tokens, or of one item. None if that takes more groups than there are items."""
    tokens, number = np.maximum(tokens, 1), -(-at_least // multiple_of) * multiple_of
    # what fits in fewer is spread over so many
    for multiple in (multiple_of, number):
        (found,) = planning.form_micro_batches(tokens, work, 1, max_tokens=cap, multiple_of=multiple, oversize="alone")
        if len(found) >= number:
            break
    fewer = len(found) - multiple_of
    if number <= fewer and tokens.sum() <= fewer * cap:  # nearly full: only exchanges find a way
        exchanged = planning.split(tokens, fewer)
        if all(tokens[one].sum() <= cap for one in exchanged):
            found = exchanged
    return [one.tolist() for one in found] if number <= len(found) and len(found) % multiple_of == 0 else None


def choose_groups(
    groups: Mapping[Group, Sequence[int]],
    cost: Callable[[Any], ArrayLike],
    count: int,
    dp_size: int,
    *,
    skips: Mapping[Group, int],
    max_skips: int,
    step: int,
    due: Container[Group] = (),
    equal_rollouts: bool = False,
) -> list[Group]:
    """``count`` of the groups that wait, in their order, whose rollouts balance over the ranks.

    ``groups``: tokens of each one's rollouts, oldest group first. ``skips``: batches that passed a group over. ``due``:
    groups that must go now, as far as there is room.
    """
    sizes = np.array([len(of_group) for of_group in groups.values()])
    of_all = np.array([length for of_group in groups.values() for length in of_group], dtype=np.int64)
    size = max(1, int(sizes.max()))
    # the planner counts rollouts, so groups that lack some get weightless stand-ins
    work, tokens = np.zeros((sizes.size, size)), np.ones((sizes.size, size), dtype=np.int64)
    is_there = np.arange(size) < sizes[:, None]
    # of all at once: a cost model is numpy, and a call for one group takes as long as for thousands
    work[is_there], tokens[is_there] = cost(of_all), np.maximum(of_all, 1)
    positions = planning.choose(
        tokens.ravel(),
        work.ravel(),
        dp_size=min(dp_size, count * size),
        batch_size=count * size,
        max_skips=max_skips,
        skips=np.repeat([skips.get(group, 0) for group in groups], size),
        due=np.repeat([group in due for group in groups], size),
        groups=np.repeat(np.arange(sizes.size), size) if size > 1 else None,
        equal_rollouts=equal_rollouts,
        step=step,
    )
    names = list(groups)
    return [names[place] for place in np.unique(positions // size)]

"""Executions: one run of an agent, which may become several training samples. Who belongs together, and how much of it
a step holds. Pure counting over rollouts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from stream_balancer.planning.arrays import Ints
from stream_balancer.rollouts import Denominators, ExecutionSize, Rollout

ExecutionKey: TypeAlias = str | tuple[str | None, str]
"""A rollout that is one by itself; or group and ``execution_id``, which is unique within its group."""


def execution_of(rollout: Rollout) -> ExecutionKey:
    """The execution that a rollout is a sample of. O(1)."""
    return rollout.rollout_id if rollout.execution_id is None else (rollout.group_id, rollout.execution_id)


def labels_of(keys: Iterable[Hashable]) -> Ints:
    """[n] a small number for each key, the same for equal ones; -1 for None. O(n)."""
    numbers: dict[Hashable, int] = {None: -1}
    return np.array([numbers.setdefault(key, len(numbers) - 1) for key in keys], dtype=np.int64)


def num_executions(rollouts: Sequence[Rollout]) -> int:
    """Number of executions among these rollouts. O(n)."""
    # most runs know no executions
    if all(rollout.execution_id is None for rollout in rollouts):
        return len(rollouts)
    return len({execution_of(rollout) for rollout in rollouts})


def denominators_of(rollouts: Sequence[Rollout]) -> Denominators:
    """Denominators of these rollouts, none of which is a padding copy. O(n)."""
    return Denominators(
        len(rollouts),
        sum([rollout.num_tokens for rollout in rollouts]),
        sum([rollout.num_loss_tokens for rollout in rollouts]),
        num_executions(rollouts),
    )


def sizes_of(rollouts: Iterable[Rollout]) -> dict[ExecutionKey, ExecutionSize]:
    """How much of each execution is among these rollouts; not of rollouts that are one by themselves. O(n)."""
    sizes: dict[ExecutionKey, ExecutionSize] = {}
    # most rollouts are executions by themselves: these have no entry
    for rollout in rollouts:
        if rollout.execution_id is not None:
            samples, tokens = sizes.get(execution_of(rollout), (0, 0))
            sizes[execution_of(rollout)] = ExecutionSize(samples + 1, tokens + rollout.num_loss_tokens)
    return sizes


def sizes_in(
    sizes: Mapping[ExecutionKey, ExecutionSize], rollouts: Sequence[Rollout]
) -> tuple[ExecutionSize, ...] | None:
    """[n] of the execution of each rollout; None where all of a step are one by themselves. O(n)."""
    if not sizes:
        return None
    return tuple(sizes.get(execution_of(rollout), ExecutionSize(1, rollout.num_loss_tokens)) for rollout in rollouts)

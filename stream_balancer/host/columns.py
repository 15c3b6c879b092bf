"""Columns that roles compute of a step, kept by rollout until the trainer's micro-batches are sent with them.

::

    role  --done(item, columns)-->  split by rollout  -->  joined to a micro-batch of the trainer
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from msgspec import Raw
from torch import Tensor

from stream_balancer.errors import WireError
from stream_balancer.rollouts import MicroBatch, Rollout
from stream_balancer.wire.codec import decode_columns
from stream_balancer.wire.payload import Memory

MOST_COLUMNS = 64
_NOT_LATE = frozenset({"input_ids", "loss_mask", "versions"})  # what a step is planned and divided by


class Columns:
    """Columns of all steps in flight. Kept nowhere else: another controller asks for them again."""

    def __init__(self, roles: Mapping[str, Sequence[str]]) -> None:
        """``roles``: the columns of each."""
        self.names = {role: sorted(names) for role, names in roles.items()}
        self._given: dict[int, dict[str, dict[str, Tensor]]] = {}  # by step, rollout, and name

    def add(self, step: int, role: str, micro_batch: MicroBatch, header: Raw, memory: Memory | None) -> None:
        """A rank has computed these, perhaps again. Raises WireError for others than were asked for."""
        # checked against the item that it was sent: a rank cannot say how long its columns are
        columns = decode_columns(header, memory, micro_batch.num_tokens)
        if sorted(columns) != self.names[role]:
            raise WireError(f"role {role!r} is to give the columns {self.names[role]}, not {sorted(columns)}")
        given = self._given.setdefault(step, {})
        for name, column in columns.items():
            # a copy: the memory of a connection must not be held until the step is done
            parts = torch.split(column.clone(), list(micro_batch.lengths))
            for rollout, part in zip(micro_batch.rollouts, parts, strict=True):
                given.setdefault(rollout.rollout_id, {})[name] = part

    def joined(self, step: int, micro_batch: MicroBatch) -> MicroBatch:
        """A micro-batch of the trainer with its columns. Shares all tensors. O(rollouts)."""
        given = self._given.get(step)
        if given is None:
            return micro_batch
        # made anew, and not changed: other ranks, and a redelivery, may be sent the one without columns
        rollouts = [_with_columns(rollout, given) for rollout in micro_batch.rollouts]
        return MicroBatch.of(rollouts, micro_batch.execution_sizes)

    def drop(self, step: int) -> None:
        """The step needs them no more."""
        self._given.pop(step, None)

    def check_new(self, rollout: Rollout) -> None:
        """Raise ValueError if a role is to give what rollouts have already."""
        for role, names in self.names.items():
            for name in names:
                if name in rollout.tokens or name in rollout.scalars:
                    raise ValueError(
                        f"role {role!r} is to give {name!r}, which rollout {rollout.rollout_id!r} has already. "
                        "Give the column another name in serve(roles=)"
                    )


def _with_columns(rollout: Rollout, given: Mapping[str, Mapping[str, Tensor]]) -> Rollout:
    if rollout.is_padding:
        # it weighs nothing; and of a copy that was made when others took over no role has seen anything
        columns = next(iter(given.values()))
        return rollout.with_late_columns({name: one.new_zeros(rollout.num_tokens) for name, one in columns.items()})
    return rollout.with_late_columns(given.get(rollout.rollout_id, {}))


def check_roles(roles: Mapping[str, Iterable[str]]) -> None:
    """Raises ValueError for names that nobody could use."""
    names = [name for columns in roles.values() for name in columns]
    for role, columns in roles.items():
        if not role or isinstance(columns, str) or not 0 < len([*columns]) <= MOST_COLUMNS:
            raise ValueError(
                f"roles={{{role!r}: {columns!r}}}: a role has a name, and a list of 1 to {MOST_COLUMNS} names of "
                'columns: serve(roles={"ref": ["ref_logprobs"]})'
            )
    if len(set(names)) != len(names):
        raise ValueError(f"roles={dict(roles)!r} give one column twice")
    if reserved := sorted(_NOT_LATE.intersection(names)):
        raise ValueError(f"roles={dict(roles)!r}: {reserved} cannot come late: the step is planned by them")

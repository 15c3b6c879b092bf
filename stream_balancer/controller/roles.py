"""Roles: other consumers of a step, which compute columns of it before the trainer's ranks get it.

::

    batches() --Roles.add--> Delivery of each role --(columns of all their ranks)--> joined --> the trainer's Delivery

A role has the trainer's plan, ranks of its own, and a queue for each, in a Delivery like the trainer's
(:mod:`stream_balancer.controller.delivery`): it delivers again, and waits for a lost rank. What its ranks acknowledge
is not the balancer's step but a step held here. Ranks of a role work in order, so steps leave in order. Columns are
kept nowhere else: whoever serves next asks for them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import anyio
import torch
from torch import Tensor

from stream_balancer.controller.delivery import Delivery
from stream_balancer.controller.open_steps import Source
from stream_balancer.core.diagnosis import RankState
from stream_balancer.core.step_times import StepTiming
from stream_balancer.errors import RankLostError, rank_name
from stream_balancer.transport import Link
from stream_balancer.types import Batch, MicroBatch, RankBatch, Rollout
from stream_balancer.types.shared import join_column
from stream_balancer.wire.messages import MAX_LATE_COLUMNS, MissingRollout
from stream_balancer.wire.partial_batch import RemoteRollout

__all__ = ["Role", "Roles", "check_roles"]

_NOT_LATE = frozenset({"input_ids", "loss_mask", "versions"})  # what a step is planned and divided by


@dataclass
class _HeldStep:
    """A step that waits for columns."""

    batch: Batch
    all_ready_at: float
    since: float
    """When it was given to the roles."""
    waits_for: set[str]
    """Roles."""
    columns: list[dict[str, Tensor]]
    """[T] each, of every rank."""
    gone: dict[str, str] = field(default_factory=dict)
    """Rollouts whose payload a rank could not fetch, so that it has computed nothing of them; and why."""


class Role:
    """What its delivery asks of a balancer."""

    def __init__(self, name: str, columns: Sequence[str], roles: Roles, balancer: Source) -> None:
        self.name, self.columns, self.balancer = name, tuple(columns), balancer
        self._roles = roles

    def in_flight(self) -> tuple[Batch, ...]:
        return self._roles.in_flight()

    def record_step(self, timing: StepTiming) -> None:
        """The trainer's ranks are what is measured."""

    def give(self, step: int, position: int, columns: Mapping[str, Tensor]) -> None:
        """Columns of the rank batch at this position. Raises ValueError for others than were asked for."""
        if set(columns) != set(self.columns):
            raise ValueError(f"role {self.name!r} is to give the columns {list(self.columns)}, not {list(columns)}")
        self._roles.give(step, position, columns)

    def missed(self, step: int, missing: Sequence[MissingRollout]) -> None:
        """Payloads that are gone."""
        self._roles.missed(step, missing)

    def acknowledge(self, step: int) -> None:
        """All ranks of the role have given theirs."""
        self._roles.done(step, self.name)


class Roles:
    """All roles of one run of ``serve``."""

    def __init__(
        self,
        columns: Mapping[str, Sequence[str]],
        balancer: Source,
        make_delivery: Callable[[Role], Delivery],
        on_joined: Callable[[Batch, float, float], None],
    ) -> None:
        """``columns``: of each role. ``on_joined``: called with each step that has all of them, when all ranks were
        ready for it, and how many seconds it was with the roles."""
        self._roles = [Role(name, names, self, balancer) for name, names in columns.items()]
        self._on_joined = on_joined
        self._held: dict[int, _HeldStep] = {}
        self.deliveries = {role.name: make_delivery(role) for role in self._roles}
        """By role."""

    @property
    def num_held(self) -> int:
        """Steps that wait for columns, each of which the trainer's ranks must have room for."""
        return len(self._held)

    def in_flight(self) -> tuple[Batch, ...]:
        """These steps."""
        return tuple(held.batch for held in self._held.values())

    def add(self, batch: Batch, all_ready_at: float) -> None:
        """A step leaves: for the roles, and then for the trainer; at once where there is no role."""
        if not self._roles:
            self._on_joined(batch, all_ready_at, 0.0)
            return
        self._check_names(batch)
        columns: list[dict[str, Tensor]] = [{} for _ in batch.ranks]
        self._held[batch.step] = _HeldStep(batch, all_ready_at, anyio.current_time(), set(self.deliveries), columns)
        for delivery in self.deliveries.values():
            delivery.add(batch, all_ready_at)

    def _check_names(self, batch: Batch) -> None:
        rollout = batch.ranks[0].micro_batches[0].rollouts[0]
        for role in self._roles:
            for name in role.columns:
                if name in rollout.tokens or name in rollout.scalars:
                    raise ValueError(
                        f"role {role.name!r} is to give {name!r}, which rollout {rollout.rollout_id!r} has already. "
                        "Give the column another name in serve(roles=)"
                    )

    def end(self) -> None:
        """No more steps."""
        for delivery in self.deliveries.values():
            delivery.end()

    def states(self) -> list[RankState]:
        """Of the ranks of all roles."""
        return list(chain.from_iterable(delivery.states() for delivery in self.deliveries.values()))

    def owing(self) -> list[str]:
        """After :meth:`end`: who is not finished."""
        return [rank_name(rank, role) for role, delivery in self.deliveries.items() for rank in delivery.owing or ()]

    def why_held(self) -> str:
        """Whose columns the oldest step waits for; ``""`` if none is held."""
        if not self._held:
            return ""
        step = min(self._held)
        owing = [rank_name(state.rank, state.role) for state in self.states() if state.step == step]
        return f"step {step} waits for the columns of {', '.join(owing)}"

    def not_asked(self, link: Link) -> RankLostError:
        """For a rank with another role."""
        return RankLostError(
            f"{rank_name(link.rank, link.role)} is asked for nothing: serve() has the roles {list(self.deliveries)}"
            ". Name it in serve(roles=), with its columns",
            rank=link.rank,
            cause="nobody asks for its columns",
        )

    # what the deliveries of roles report

    def give(self, step: int, position: int, columns: Mapping[str, Tensor]) -> None:
        """A rank has computed these; perhaps again."""
        self._held[step].columns[position].update(columns)

    def missed(self, step: int, missing: Sequence[MissingRollout]) -> None:
        """A rank could not fetch these payloads. No rank of the trainer shall, or it would train on columns that are of
        nothing."""
        self._held[step].gone |= {one.rollout_id: one.cause for one in missing}

    def done(self, step: int, role: str) -> None:
        """A role is through with a step."""
        held = self._held[step]
        held.waits_for.discard(role)
        if not held.waits_for:
            del self._held[step]
            self._on_joined(_joined(held), held.all_ready_at, anyio.current_time() - held.since)


def _joined(held: _HeldStep) -> Batch:
    """The step with its late columns. Shares all tensors. O(rollouts)."""
    given: dict[str, list[Mapping[str, Tensor]]] = {}  # by rollout: columns of each rank that has a part of it
    for rank_batch, columns in zip(held.batch.ranks, held.columns, strict=True):
        lengths = [rollout.num_tokens for rollout in rank_batch.rollouts]
        parts = {name: iter(torch.split(column, lengths)) for name, column in columns.items()}
        for rollout in rank_batch.rollouts:
            given.setdefault(rollout.rollout_id, []).append({name: next(part) for name, part in parts.items()})
    whole = {
        rollout.rollout_id: _joined_rollout(rollout, given[rollout.rollout_id], held.gone)
        for rollout in held.batch.rollouts
    }
    return replace(held.batch, ranks=tuple(_joined_rank(rank_batch, whole) for rank_batch in held.batch.ranks))


def _joined_rank(rank_batch: RankBatch, whole: Mapping[str, Rollout]) -> RankBatch:
    return replace(rank_batch, micro_batches=tuple(_joined_micro_batch(one, whole) for one in rank_batch.micro_batches))


def _joined_micro_batch(micro_batch: MicroBatch, whole: Mapping[str, Rollout]) -> MicroBatch:
    its = [whole[rollout.rollout_id] for rollout in micro_batch.rollouts]
    if micro_batch.cp_group:
        return MicroBatch.shared(its, micro_batch.cp_group, micro_batch.cp_rank, micro_batch.execution_sizes)
    return MicroBatch.of(its, micro_batch.lengths, micro_batch.execution_sizes)


def _joined_rollout(rollout: Rollout, given: Sequence[Mapping[str, Tensor]], gone: Mapping[str, str]) -> Rollout:
    """``given``: of each rank that has a part of it, in the order of their places."""
    if rollout.rollout_id in gone and isinstance(rollout, RemoteRollout):
        rollout = replace(rollout, gone=gone[rollout.rollout_id])
    if len(given) == 1:
        return rollout.with_late_columns(given[0])
    return rollout.with_late_columns(
        {name: join_column([one[name] for one in given], rollout.num_tokens) for name in given[0]}
    )


def check_roles(roles: Mapping[str, Sequence[str]]) -> None:
    """Raises ValueError for names that nobody could use."""
    names = [name for columns in roles.values() for name in columns]
    for role, columns in roles.items():
        if not role or isinstance(columns, str) or not 0 < len(columns) <= MAX_LATE_COLUMNS:
            raise ValueError(
                f"roles={{{role!r}: {columns!r}}}: a role has a name, and a list of 1 to {MAX_LATE_COLUMNS} names of "
                'columns: serve(roles={"ref": ["ref_logprobs"]})'
            )
    if len(set(names)) != len(names):
        raise ValueError(f"roles={dict(roles)!r} give one column twice")
    if reserved := sorted(_NOT_LATE.intersection(names)):
        raise ValueError(f"roles={dict(roles)!r}: {reserved} cannot come late: the step is planned by them")

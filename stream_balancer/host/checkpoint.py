"""A balancer's state as plain data: a :class:`Snapshot` <-> a dict of tensors and numbers, which are all its rows.

``torch.save`` (read back with ``weights_only=True``) and torch.distributed.checkpoint take the dict as it is. Pure, so
it may run in any thread: a gigabyte takes a few hundred milliseconds to flatten, which no event loop should wait for.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stream_balancer.core.snapshot import Snapshot
from stream_balancer.host.records import FORMAT, Attempt, Fact, PeerFact, Records, facts_of, held_of, write_row

_ROLLOUTS_TOGETHER = 64  # an event loop beside the thread that writes gets its turn between

_log = logging.getLogger("stream_balancer.snapshot")


def state_dict(snapshot: Snapshot, facts: Sequence[Fact] = ()) -> dict[str, Any]:
    """A dict of tensors, numbers, strings, and lists and dicts of these. O(bytes held).

    Raises RolloutError, naming it, for a rollout that was changed after it was put; ValueError where producers keep the
    payloads.
    """
    # times are kept as ages: the next process has another clock
    held = list(held_of(snapshot, 0.0))
    # the bytes are not here, and whoever has them may be gone when the checkpoint is read
    away = [one.rollout.rollout_id for one in held if one.rollout.tokens["input_ids"].is_meta]
    if away:
        raise ValueError(
            f"{len(away)} rollouts (the first: {away[0]!r}) are kept by their producers (hand_over='direct'), so a "
            "checkpoint of the controller cannot hold them. Take it when none waits or is in flight, or put through "
            "the balancer"
        )
    # Where checkpoints are kept there is a checksum of columns: torch.save has one, as most disks have.
    rows = [
        write_row(_name(first), held[first : first + _ROLLOUTS_TOGETHER], sealed=False)
        for first in range(0, len(held), _ROLLOUTS_TOGETHER)
    ]
    return {
        "format": FORMAT,
        "rollouts": [torch.frombuffer(row, dtype=torch.uint8) for row in rows],
        "facts": torch.frombuffer(write_row("facts", [*facts_of(snapshot), *facts]), dtype=torch.uint8),
        "calibration": snapshot.calibration,
    }


def read_state_dict(state: Mapping[str, Any]) -> tuple[Snapshot, list[Fact]]:
    """The snapshot and the rows that a :func:`state_dict` was made of; rollouts are views of the dict's tensors.

    What is damaged does not spoil the rest: it is left out, and named in ``set_aside`` and in the log. Where a rollout
    of a batch in flight is damaged, the others of the batch wait again. Raises ValueError for a dict that is not one,
    or is of another version's format.
    """
    found = state.get("format") if isinstance(state, Mapping) else None
    if found != FORMAT:
        raise ValueError(
            f"not a state_dict this version can read: format is {found!r}, expected {FORMAT}. "
            "Load it with the stream_balancer that wrote it"
        )
    if missing := [name for name in ("rollouts", "facts") if name not in state]:
        raise ValueError(f"the state_dict has no {missing[0]!r}: it was cut, or is not a balancer's")
    records = Records()
    # one bad row of many is no reason to refuse a checkpoint, which may be the last one
    records.take("facts", state["facts"].numpy())
    for number, row in enumerate(state["rollouts"]):
        records.take(_name(number * _ROLLOUTS_TOGETHER), row.numpy(), sealed=False)
    snapshot = records.snapshot(0.0, state.get("calibration"))
    # an error each, since rollouts that were accepted are gone
    for sentence in snapshot.set_aside:
        _log.error("checkpoint: set aside: %s", sentence)
    return snapshot, [one for one in records.facts if isinstance(one, Attempt | PeerFact)]


def _name(first: int) -> str:
    return f"rollouts {first} to {first + _ROLLOUTS_TOGETHER - 1}"

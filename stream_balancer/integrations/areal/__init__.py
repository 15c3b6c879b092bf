"""AReaL: its allocation seam, and its trajectory dicts in and out of rollouts.

::

    patch()                                              # "balanced" beside "ffd" and "kk"
    spec = MicroBatchSpec(max_tokens_per_mb=32768, packing_algorithm="balanced")

    for rollout in rollouts_from(trajectories):          # list[dict] of [bs, S, ...], as workflows return them
        await balancer.put(rollout)
    ...
    data = trajectories_from(rank_batch.rollouts)        # a rank's list[dict], as train engines take it

A dict's rows are siblings: they get one ``group_id``, and rows of one group that come to one rank leave it in one dict
again, in their order. Siblings may lie on different ranks: normalise advantages over a group before
``rollouts_from``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

import stream_balancer as sb
from stream_balancer.integrations import _rows
from stream_balancer.integrations._plans import packed
from stream_balancer.integrations.partitions import replace

__all__ = ["ALGORITHM", "allocate", "patch", "rollouts_from", "trajectories_from"]

ALGORITHM = "balanced"
"""The name under which :func:`patch` registers :func:`allocate`."""


# --- the allocation seam ----------------------------------------------------------------------------------------------


def allocate(
    values: ArrayLike, capacity: int, min_groups: int | None = None, n_groups_divisor: int = 1
) -> list[list[int]]:
    """Indices of ``values`` in groups with sums alike and at most ``capacity``: AReaL's ``ffd_allocate`` by planning.

    The number of groups is at least ``min_groups``, a multiple of ``n_groups_divisor``, and the least that was found.
    If the next multiple is more than there are values, every value is a group of its own, as AReaL's ``kk_allocate``
    has it. None is empty. Deterministic, so ranks that allocate the same values agree.

    Raises ValueError (AReaL: RuntimeError) if a value is larger than ``capacity``, or there are fewer values than
    ``min_groups`` or ``n_groups_divisor``.
    """
    work = np.asarray(values, dtype=np.float64)
    if work.size and work.max() > capacity:
        raise ValueError(f"a sequence of {int(work.max())} tokens does not fit into a capacity of {capacity}. Raise it")
    asked = max(min_groups or 1, n_groups_divisor)
    if work.size < asked:
        raise ValueError(
            f"{work.size} sequences cannot be put into at least {asked} groups, none of them empty. Lower n_mbs or "
            "n_mbs_divisor, or give more sequences"
        )
    tokens = np.ceil(work).astype(np.int64)
    found = packed(tokens, work, max(int(capacity), 1), multiple_of=n_groups_divisor, at_least=asked)
    return [[index] for index in range(work.size)] if found is None else found


def patch() -> Callable[[], None]:
    """Have AReaL know the algorithm ``"balanced"``: ``MicroBatchSpec(packing_algorithm="balanced")`` then allocates
    both ranks and micro-batches with :func:`allocate`. In every process that trains, before its first batch:
    ``stream_balancer.integrations.areal.worker`` does it in workers that AReaL starts.

    Returns a function that undoes it.
    """
    from areal.utils import seqpack

    original = seqpack.get_allocate_fn

    def get_allocate_fn(algorithm: str = seqpack.PACKING_ALGORITHM_FFD) -> Callable[..., list[list[int]]]:
        return allocate if algorithm == ALGORITHM else original(algorithm)

    undo = ExitStack()
    undo.callback(replace(seqpack, "get_allocate_fn", get_allocate_fn))
    # MicroBatchSpec checks names against it when it is made
    seqpack.PACKING_ALGORITHMS.add(ALGORITHM)
    undo.callback(seqpack.PACKING_ALGORITHMS.discard, ALGORITHM)
    return undo.close


# --- trajectories in --------------------------------------------------------------------------------------------------


def rollouts_from(trajectories: Iterable[Mapping[str, Any]]) -> list[sb.Rollout]:
    """Rollouts, one per row, of AReaL's trajectory dicts as a workflow returns them, padded on either side.

    ``[bs, S, ...]`` tensors become ``tokens``; float32 ``[bs]`` (``rewards``) ``scalars``; other ``[bs, ...]`` and what
    ``multi_modal_input`` holds ``tensors``; anything else ``metadata``. AReaL's column ``versions`` is ours, and says
    ``version``. A dict of several rows is a group.

    Raises ValueError for a dict without ``input_ids`` and ``attention_mask``, or a mask with holes; RolloutError for
    what a Rollout refuses.
    """
    return [rollout for trajectory in trajectories for rollout in _rows_of(trajectory)]


def _rows_of(trajectory: Mapping[str, Any]) -> list[sb.Rollout]:
    if missing := {"input_ids", "attention_mask"} - trajectory.keys():
        raise ValueError(f"a trajectory has no {sorted(missing)}; it has {sorted(trajectory)}")
    mask = trajectory["attention_mask"]
    count = len(mask)
    entries: dict[str, Any] = {}
    each: list[dict[str, Any]] = [{} for _ in mask]
    shared = {}
    for key, value in trajectory.items():
        if key == "attention_mask":
            continue
        # one entry a row, by its length: AReaL's dicts say nothing else of what belongs to whom
        if isinstance(value, Tensor) and value.ndim and len(value) == count:
            entries[key] = value
        elif not (isinstance(value, list) and len(value) == count):
            shared[key] = value
        elif all(isinstance(item, Mapping) for item in value):
            entries |= {f"{key}.{inner}": [torch.as_tensor(item[inner]) for item in value] for inner in value[0]}
        else:
            for of_row, item in zip(each, value, strict=True):
                of_row[key] = item
    entries |= {"each": each, "shared": [shared] * count}
    return _rows.rollouts_of(entries, _rows.spans(mask), mask.shape[1], group_size=count if count > 1 else None)


# --- trajectories out -------------------------------------------------------------------------------------------------


def trajectories_from(rollouts: Iterable[sb.Rollout]) -> list[dict[str, Any]]:
    """AReaL's trajectory dicts of a rank's rollouts (``rank_batch.rollouts``, or ``mb.rollouts``), right-padded with
    zeros.

    Siblings of a group that are here share one dict, in the order they had in :func:`rollouts_from`; groups come in the
    order of their first. A padding copy is a dict of its own, with a zero ``loss_mask``: it is nobody's sibling.
    """
    groups: dict[str, list[sb.Rollout]] = {}
    for rollout in rollouts:
        alone = rollout.group_id is None or rollout.is_padding
        # two kinds of names: a rollout may be called as a group is
        groups.setdefault(f"rollout {rollout.rollout_id}" if alone else f"group {rollout.group_id}", []).append(rollout)
    return [_trajectory(sorted(rows, key=_place)) for rows in groups.values()]


def _place(rollout: sb.Rollout) -> int:
    """Row of the rollout in the dict that it came in; rollouts that came from elsewhere keep their order."""
    number = rollout.rollout_id.rpartition("/")[2]
    return int(number) if number.isdecimal() else 0


def _trajectory(rows: list[sb.Rollout]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, entry in _rows.entries_of(rows, "right", dtypes=dict.fromkeys(rows[0].scalars, torch.float32)).items():
        key, dot, inner = name.partition(".")
        if dot:
            for inputs, tensor in zip(out.setdefault(key, [{} for _ in rows]), entry.unbind(), strict=True):
                inputs[inner] = tensor
        else:
            out[name] = entry
    each = [row.metadata.get("each", {}) for row in rows]
    return {
        **out,
        **{name: [of_row[name] for of_row in each] for name in each[0]},
        **rows[0].metadata.get("shared", {}),
    }

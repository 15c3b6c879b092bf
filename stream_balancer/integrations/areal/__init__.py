"""AReaL: its allocation seam, and its trajectory dicts in and out of rollouts.

::

    patch()                                              # "balanced" beside "ffd" and "kk"
    spec = MicroBatchSpec(max_tokens_per_mb=32768, packing_algorithm="balanced")

    for rollout in rollouts_from(trajectories):          # list[dict] of [bs, S, ...], as workflows return them
        await balancer.put(rollout)
    ...
    data = trajectories_from(rank_batch.rollouts)        # a rank's list[dict], as train engines take it

A dict's rows are siblings: they get one ``group_id``, and rows of one group that come to one rank leave it in one dict
again, in their order. Advantages that AReaL normalises over a group need ``BalancerConfig(group_size=...,
groups="same_rank")``.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from stream_balancer import planning
from stream_balancer.integrations import _rows
from stream_balancer.integrations.partitions import replace
from stream_balancer.types import Rollout

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
    at_least = max(asked, -(-int(work.sum()) // int(capacity)))
    for groups in range(-(-at_least // n_groups_divisor) * n_groups_divisor, work.size + 1, n_groups_divisor):
        shares = planning.partition(work, groups)
        if max(float(work[share].sum()) for share in shares) > capacity:
            (shares,) = planning.form_micro_batches(
                np.maximum(work, 1), work, 1, max_tokens=max(int(capacity), 1), multiple_of=groups
            )  # a tight cap is a packing problem, not a balancing one
        if len(shares) == groups and max(float(work[share].sum()) for share in shares) <= capacity:
            return [share.tolist() for share in shares]
    return [[index] for index in range(work.size)]


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

    put_name_back = replace(seqpack, "get_allocate_fn", get_allocate_fn)
    seqpack.PACKING_ALGORITHMS.add(ALGORITHM)

    def put_back() -> None:
        put_name_back()
        seqpack.PACKING_ALGORITHMS.discard(ALGORITHM)

    return put_back


# --- trajectories in --------------------------------------------------------------------------------------------------


def rollouts_from(
    trajectories: Iterable[Mapping[str, Any]], *, group_ids: Sequence[str | None] | None = None
) -> list[Rollout]:
    """One rollout per row of AReaL's trajectory dicts: what a workflow returns, padded on either side.

    ``[bs, S, ...]`` tensors become ``tokens``; float32 ``[bs]`` (``rewards``) ``scalars``; other ``[bs, ...]`` and what
    ``multi_modal_input`` holds ``tensors``; anything else ``metadata``. AReaL's column ``versions`` is ours, and says
    ``version``. ``group_ids``: one per dict; by default a dict of several rows gets a fresh
    one.

    Raises ValueError for a dict without ``input_ids`` and ``attention_mask``, or a mask with holes; RolloutError for
    what a Rollout refuses.
    """
    trajectories = list(trajectories)
    if group_ids is None:
        group_ids = [None] * len(trajectories)
    pairs = zip(trajectories, group_ids, strict=True)
    return list(chain.from_iterable(_rows_of(trajectory, group_id) for trajectory, group_id in pairs))


def _rows_of(trajectory: Mapping[str, Any], group_id: str | None) -> list[Rollout]:
    if missing := {"input_ids", "attention_mask"} - trajectory.keys():
        raise ValueError(f"a trajectory has no {sorted(missing)}; it has {sorted(trajectory)}")
    where = _rows.spans(trajectory["attention_mask"])
    shape = tuple(trajectory["attention_mask"].shape)
    name = group_id or uuid.uuid4().hex
    rows: list[dict[str, Any]] = [
        {
            "tokens": {},
            "scalars": {},
            "tensors": {},
            "metadata": {},
            "rollout_id": f"{name}/{index}",
            "group_id": group_id or (name if len(where) > 1 else None),
        }
        for index in range(len(where))
    ]
    for key, value in trajectory.items():
        if key != "attention_mask":
            kind, values = _sorted_out(value, where, shape)
            for row, of_row in zip(rows, values, strict=True):
                if kind == "inputs":
                    row["tensors"] |= {f"{key}.{inner}": torch.as_tensor(t) for inner, t in of_row.items()}
                elif kind in ("each", "shared"):
                    row["metadata"].setdefault(kind, {})[key] = of_row
                else:
                    row[kind][key] = of_row
    return [Rollout(**row) for row in rows]


def _sorted_out(value: Any, where: list[slice], shape: tuple[int, ...]) -> tuple[str, Sequence[Any]]:
    """Part of a rollout that a dict's entry becomes, row by row."""
    if isinstance(value, Tensor) and value.shape[:2] == shape:
        return "tokens", _rows.cut(value, where)
    if isinstance(value, Tensor) and value.ndim and value.shape[0] == len(where):
        if value.ndim == 1 and value.dtype is torch.float32:
            return "scalars", value.tolist()
        return "tensors", [row.clone() for row in value]
    if isinstance(value, list) and len(value) == len(where):
        return ("inputs" if all(isinstance(item, Mapping) for item in value) else "each"), value
    return "shared", [value] * len(where)


# --- trajectories out -------------------------------------------------------------------------------------------------


def trajectories_from(rollouts: Iterable[Rollout]) -> list[dict[str, Any]]:
    """AReaL's trajectory dicts of a rank's rollouts (``rank_batch.rollouts``, or ``mb.rollouts``), right-padded with
    zeros.

    Siblings of a group that are here share one dict, in the order they had in :func:`rollouts_from`; groups come in the
    order of their first. A padding copy is a dict of its own, with a zero ``loss_mask``: it is nobody's sibling.
    """
    groups: dict[str, list[Rollout]] = {}
    for rollout in _rows.unshared(rollouts):
        alone = rollout.group_id is None or rollout.is_padding
        groups.setdefault(f"rollout {rollout.rollout_id}" if alone else f"group {rollout.group_id}", []).append(rollout)
    return [_trajectory(sorted(rows, key=_place)) for rows in groups.values()]


def _place(rollout: Rollout) -> int:
    """Its row in the dict it came in; rollouts that came from elsewhere keep their order."""
    number = rollout.rollout_id.rpartition("/")[2]
    return int(number) if number.isdecimal() else 0


def _trajectory(rows: list[Rollout]) -> dict[str, Any]:
    first = _rows.same_columns(rows)
    lengths = [row.num_tokens for row in rows]
    width = max(lengths)
    out: dict[str, Any] = {name: _rows.padded([r.tokens[name] for r in rows], width, "right") for name in first.tokens}
    out["attention_mask"] = _rows.mask_of(lengths, width, "right")
    for name in first.scalars:
        out[name] = torch.tensor([row.scalars[name] for row in rows], dtype=torch.float32)
    for name in first.tensors:
        key, dot, inner = name.partition(".")
        if dot:
            inputs = out.setdefault(key, [{} for _ in rows])
            for of_row, row in zip(inputs, rows, strict=True):
                of_row[inner] = row.tensors[name]
        else:
            out[name] = _rows.stacked([row.tensors[name] for row in rows])
    for name in first.metadata.get("each", {}):
        out[name] = [row.metadata["each"][name] for row in rows]
    out |= first.metadata.get("shared", {})
    return out

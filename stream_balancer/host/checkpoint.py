"""What a balancer's state is as plain data: :class:`Snapshot` <-> a dict of tensors, numbers and strings.

Rollouts are written by the wire's codec, so a checkpoint holds flat columns and msgpack, and reading one is as safe as
reading from a link: every size is checked, nothing is unpickled. ``torch.save`` (read back with
``weights_only=True``) and torch.distributed.checkpoint take the dict as it is. Pure, so it may run in any thread: a
gigabyte takes a few hundred milliseconds to flatten, which no event loop should wait for.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from stream_balancer.core.snapshot import Snapshot
from stream_balancer.errors import RolloutError
from stream_balancer.types import (
    Batch,
    Denominators,
    MicroBatch,
    MiniBatchSize,
    RankBatch,
    Reason,
    Rollout,
    SharedRollout,
)  # fmt: skip
from stream_balancer.types.shared import join_rollout
from stream_balancer.wire import codec
from stream_balancer.wire.payload import Memory

__all__ = ["bytes_of_rollout", "read_rollouts", "read_state_dict", "state_dict"]

FORMAT = 2
"""Version of the dict below."""
_ROLLOUTS_TOGETHER = 64

_log = logging.getLogger("stream_balancer.snapshot")


def state_dict(snapshot: Snapshot) -> dict[str, Any]:
    """A dict of tensors, numbers, strings, and lists and dicts of these. O(bytes held).

    A rollout that cannot be written (it was changed after it was made) is left out, and named in the log.
    """
    # Asked before anything is written, so that the error is the real one and not of some tensor that has no bytes.
    _check_here(list(chain(snapshot.waiting, *(batch.rollouts for batch in snapshot.in_flight))))
    try:
        return _write(snapshot)
    except Exception:  # noqa: BLE001 - whatever a changed rollout may raise
        return _write(_without_unwritable(snapshot))


def _write(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "waiting": _write_many(snapshot.waiting),
        "waited_s": torch.from_numpy(np.ascontiguousarray(snapshot.waited_s)),
        "skips": torch.from_numpy(np.ascontiguousarray(snapshot.skips)),
        "in_flight": [_write_batch(batch) for batch in snapshot.in_flight],
        "group_arrivals": dict(snapshot.group_arrivals),
        "group_sizes": dict(snapshot.group_sizes),
        "closed_groups": dict(snapshot.closed_groups),
        "past_ids": list(snapshot.past_ids),
        "version": snapshot.version,
        "next_step": snapshot.next_step,
        "counts": dict(snapshot.counts),
        "calibration": None if snapshot.calibration is None else dict(snapshot.calibration),
        "auto_window": _as_tensors(snapshot.auto_window),
    }


def read_state_dict(state: Mapping[str, Any]) -> Snapshot:
    """The snapshot a :func:`state_dict` was made of; its rollouts are views of the dict's tensors.

    What is damaged does not spoil the rest: it is left out, and named in ``set_aside`` and in the log. Where a rank
    batch in flight is damaged, the rollouts of the others wait again. Raises ValueError for a dict that is not one,
    or of a later format; WireError for rollouts in another version's format.
    """
    if state.get("format") != FORMAT:
        raise ValueError(
            f"not a state_dict this version can read: format is {state.get('format')!r}, expected {FORMAT}. "
            "Load it with the stream_balancer that wrote it"
        )
    try:
        waiting, rows, bad = _read_many(state["waiting"], len(state["waited_s"]))
        in_flight, void = [], []
        for written in state["in_flight"]:
            batch, rollouts, its_bad = _read_batch(written)
            bad += its_bad
            void += rollouts
            if batch is not None:
                in_flight.append(batch)
        snapshot = Snapshot(
            waiting=tuple(waiting),
            waited_s=state["waited_s"].numpy()[rows],
            skips=state["skips"].numpy()[rows],
            in_flight=tuple(in_flight),
            group_arrivals=state["group_arrivals"],
            group_sizes=state.get("group_sizes", {}),  # these two not before they could be declared
            closed_groups=state.get("closed_groups", {}),
            past_ids=tuple(state["past_ids"]),
            version=state["version"],
            next_step=state["next_step"],
            counts=state["counts"],
            calibration=state.get("calibration"),
            auto_window=_as_arrays(state.get("auto_window")),
            set_aside=tuple(bad),
        )
    except KeyError as error:
        raise ValueError(f"the state_dict has no {error.args[0]!r}: it was cut, or is not a balancer's") from None
    for sentence in bad:
        _log.error("checkpoint: set aside: %s", sentence)
    return _recounted(snapshot, void) if bad else snapshot


def _recounted(snapshot: Snapshot, void: Sequence[Rollout]) -> Snapshot:
    """With rollouts of batches that cannot be given again waiting as the oldest, and totals that add up."""
    oldest = float(snapshot.waited_s.max()) if len(snapshot.waited_s) else 0.0
    counts = dict(snapshot.counts)
    # what was set aside was never accepted here, or the totals would not add up again
    counts["accepted"] = (
        len(snapshot.waiting)
        + len(void)
        + sum(batch.num_rollouts for batch in snapshot.in_flight)
        + counts["acknowledged"]
        + sum(counts["evicted"].values())
    )
    return replace(
        snapshot,
        # In front: they had been dispatched, so they came before all that wait.
        waiting=(*void, *snapshot.waiting),
        waited_s=np.concatenate([np.full(len(void), oldest), snapshot.waited_s]),
        skips=np.concatenate([np.zeros(len(void), dtype=np.int64), snapshot.skips]),
        counts=counts,
    )


def _without_unwritable(snapshot: Snapshot) -> Snapshot:
    """That all of a rollout can be written was checked when it was made; but what its fields hold can be changed."""
    bad: list[str] = []
    rows = [row for row, rollout in enumerate(snapshot.waiting) if _is_writable(rollout, bad)]
    in_flight, void = [], []
    for batch in snapshot.in_flight:
        before = len(bad)
        good = [rollout for rollout in batch.rollouts if _is_writable(rollout, bad)]
        if len(bad) == before:
            in_flight.append(batch)
        else:
            void += [rollout for rollout in good if not rollout.is_padding]
    if not bad:
        return snapshot
    for sentence in bad:
        _log.error("checkpoint: left out: %s", sentence)
    kept = replace(
        snapshot,
        waiting=tuple(snapshot.waiting[row] for row in rows),
        waited_s=snapshot.waited_s[rows],
        skips=snapshot.skips[rows],
        in_flight=tuple(in_flight),
    )
    return _recounted(kept, void)


def _as_tensors(value: Any) -> Any:
    """Arrays in dicts and lists of numbers -> tensors."""
    if isinstance(value, Mapping):
        return {name: _as_tensors(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_as_tensors(item) for item in value]
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _as_arrays(value: Any) -> Any:
    """The way back."""
    if isinstance(value, Mapping):
        return {name: _as_arrays(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_as_arrays(item) for item in value]
    return value.numpy() if isinstance(value, Tensor) else value


def bytes_of_rollout(rollout: Rollout) -> bytes:
    """A rollout as :func:`read_rollouts` reads it."""
    return _bytes_of([rollout])


def _bytes_of(rollouts: Sequence[Rollout]) -> bytes:
    _check_here(rollouts)
    return codec.to_bytes(codec.encode_rollouts(rollouts))


def _as_tensor(written: bytes) -> Tensor:
    """[n] uint8."""
    return torch.frombuffer(bytearray(written), dtype=torch.uint8)


def _is_writable(rollout: Rollout, bad: list[str]) -> bool:
    try:
        _bytes_of([rollout])
    except Exception as error:  # noqa: BLE001 - named, and left out
        bad.append(f"rollout {rollout.rollout_id!r} cannot be written: {error}")
        return False
    return True


def _write_many(rollouts: Sequence[Rollout]) -> list[Tensor]:
    """A few rollouts at a time: an event loop beside the thread that writes gets its turn between."""
    return [
        _as_tensor(_bytes_of(rollouts[first : first + _ROLLOUTS_TOGETHER]))
        for first in range(0, len(rollouts), _ROLLOUTS_TOGETHER)
    ]


def read_rollouts(written: Memory) -> dict[str, Rollout | str]:
    """What was written, by id, as views of it; instead of what no Rollout may be, a sentence.

    Raises WireError where the bytes are damaged.
    """
    read: dict[str, Rollout | str] = {}
    for rollout in codec.decode(*codec.from_bytes(written)).rollouts:
        try:
            read[rollout.rollout_id] = replace(rollout)  # with every check there is
        except RolloutError as error:
            read[rollout.rollout_id] = str(error)
    return read


def _read_many(tensors: Sequence[Tensor], count: int) -> tuple[list[Rollout], list[int], list[str]]:
    """Rollouts, their places among all ``count`` that were written, and sentences about the others."""
    rollouts: list[Rollout] = []
    rows: list[int] = []
    bad: list[str] = []
    for number, written in enumerate(tensors):
        first = number * _ROLLOUTS_TOGETHER
        try:
            read = read_rollouts(written.numpy())
        except codec.OtherFormatError:
            raise
        except Exception as error:  # noqa: BLE001 - damaged bytes may be anything
            last = min(first + _ROLLOUTS_TOGETHER, count) - 1
            bad.append(f"waiting rollouts {first} to {last}, counted from the oldest, cannot be read: {error}")
            continue
        for row, one in enumerate(read.values(), first):
            if isinstance(one, str):
                bad.append(one)
            else:
                rollouts.append(one)
                rows.append(row)
    return rollouts, rows, bad


def _check_here(rollouts: Sequence[Rollout]) -> None:
    away = [r.rollout_id for r in rollouts if r.tokens["input_ids"].is_meta]
    if away:
        raise ValueError(
            f"{len(away)} rollouts (the first: {away[0]!r}) lie with their producers (hand_over='direct'), so a "
            "checkpoint of the controller cannot hold them. Take it when none waits or is in flight, or put through "
            "the balancer"
        )


def _write_rank_batch(rank_batch: RankBatch) -> dict[str, Any]:
    _check_here(rank_batch.rollouts)
    return {
        "dp_size": rank_batch.dp_size,
        "load": float(rank_batch.load),
        "denominators": None if rank_batch.denominators is None else list(rank_batch.denominators),
        "mini_batches": [list(size) for size in rank_batch.mini_batch_sizes],
        "micro_batches": _as_tensor(codec.to_bytes(codec.encode(rank_batch.micro_batches))),
    }


def _read_rank_batch(step: int, rank: int, written: Mapping[str, Any]) -> RankBatch:
    decoded = codec.decode(*codec.from_bytes(written["micro_batches"].numpy()))
    denominators = written["denominators"]
    return RankBatch(
        step=step,
        rank=rank,
        dp_size=written["dp_size"],
        micro_batches=decoded.micro_batches,
        load=written["load"],
        denominators=None if denominators is None else Denominators(*denominators),
        mini_batch_sizes=tuple(MiniBatchSize(*size) for size in written["mini_batches"]),
    )


def _write_batch(batch: Batch) -> dict[str, Any]:
    return {
        "step": batch.step,
        "reason": batch.reason,
        "loads": list(batch.loads),
        "finish": batch.finish,
        "lower_bound": batch.lower_bound,
        "num_padding": batch.num_padding,
        "incomplete_groups": list(batch.incomplete_groups),
        "ranks": [_write_rank_batch(rank_batch) for rank_batch in batch.ranks],
    }


def _read_batch(written: Mapping[str, Any]) -> tuple[Batch | None, list[Rollout], list[str]]:
    """The batch; or None, the rollouts of it that can be read, and sentences about the others."""
    rank_batches: list[RankBatch] = []
    rollouts: list[Rollout] = []
    bad: list[str] = []
    for rank, of_rank in enumerate(written["ranks"]):
        try:
            rank_batches.append(_read_rank_batch(written["step"], rank, of_rank))
            rollouts += rank_batches[-1].rollouts
        except codec.OtherFormatError:
            raise
        except Exception as error:  # noqa: BLE001 - damaged bytes may be anything
            bad.append(f"step {written['step']}, rank {rank}: its rank batch cannot be read: {error}")
    if not bad:
        try:
            rank_batches = _joined(rank_batches)
        except ValueError as error:
            bad.append(f"step {written['step']}: the parts of a shared rollout cannot be joined: {error}")
    if bad:
        # parts of shared ones are of no use without the others
        alone = [one for one in rollouts if not one.is_padding and not isinstance(one, SharedRollout)]
        return None, alone, bad
    return (
        Batch(
            step=written["step"],
            reason=cast("Reason", written["reason"]),
            ranks=tuple(rank_batches),
            num_rollouts=rank_batches[0].global_num_rollouts,
            num_tokens=rank_batches[0].global_num_tokens,
            loads=tuple(written["loads"]),
            finish=written["finish"],
            lower_bound=written["lower_bound"],
            num_padding=written["num_padding"],
            incomplete_groups=tuple(written["incomplete_groups"]),
        ),
        [],
        [],
    )


def _joined(rank_batches: list[RankBatch]) -> list[RankBatch]:
    """With each shared rollout whole again: its parts are all that was written. O(tokens of these)."""
    parts: dict[str, list[SharedRollout]] = {}
    for rollout in chain.from_iterable(one.rollouts for one in rank_batches):
        if isinstance(rollout, SharedRollout):
            parts.setdefault(rollout.rollout_id, []).append(rollout)
    if not parts:
        return rank_batches
    wholes = {name: join_rollout(its) for name, its in parts.items()}
    return [
        replace(one, micro_batches=tuple(_with_wholes(micro_batch, wholes) for micro_batch in one.micro_batches))
        for one in rank_batches
    ]


def _with_wholes(micro_batch: MicroBatch, wholes: Mapping[str, Rollout]) -> MicroBatch:
    if not micro_batch.cp_group:
        return micro_batch
    its = [wholes[rollout.rollout_id] for rollout in micro_batch.rollouts]
    return MicroBatch.shared(its, micro_batch.cp_group, micro_batch.cp_rank, micro_batch.execution_sizes)

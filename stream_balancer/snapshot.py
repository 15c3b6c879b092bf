"""What a balancer's state is as plain data: :class:`Snapshot` <-> a dict of tensors, numbers and strings.

Rollouts are written in the wire's own format, so a checkpoint holds flat columns and msgpack, and reading one is as
safe as reading from a link: every size is checked, nothing is unpickled. ``torch.save`` (read back with
``weights_only=True``) and torch.distributed.checkpoint take the dict as it is. Pure, so it may run in any thread: a
gigabyte takes a few hundred milliseconds to flatten, which no event loop should wait for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from stream_balancer import wire
from stream_balancer.types import Batch, MicroBatch, RankBatch, Reason, Rollout, Snapshot

__all__ = ["read_rollouts", "read_state_dict", "state_dict", "write_rollouts"]

FORMAT = 1
"""Version of the dict below; a later library reads all earlier ones."""
_ROLLOUTS_PER_SHARE = 64


def state_dict(snapshot: Snapshot) -> dict[str, Any]:
    """A dict of tensors, numbers, strings, and lists and dicts of these. O(bytes held)."""
    return {
        "format": FORMAT,
        "waiting": _write_many(snapshot.waiting),
        "waited_s": torch.from_numpy(np.ascontiguousarray(snapshot.waited_s)),
        "skips": torch.from_numpy(np.ascontiguousarray(snapshot.skips)),
        "in_flight": [_write_batch(batch) for batch in snapshot.in_flight],
        "group_arrivals": dict(snapshot.group_arrivals),
        "past_ids": list(snapshot.past_ids),
        "version": snapshot.version,
        "next_step": snapshot.next_step,
        "counts": dict(snapshot.counts),
        "knobs": dict(snapshot.knobs),
        "calibration": None if snapshot.calibration is None else dict(snapshot.calibration),
        "auto_window": _as_tensors(snapshot.auto_window),
    }


def read_state_dict(state: Mapping[str, Any]) -> Snapshot:
    """The snapshot a :func:`state_dict` was made of; its rollouts are views of the dict's tensors.

    Raises ValueError for a dict that is not one, or of a later format; WireError where its bytes are damaged.
    """
    if state.get("format") != FORMAT:
        raise ValueError(
            f"not a state_dict this version can read: format is {state.get('format')!r}, expected {FORMAT}. "
            "Load it with the stream_balancer that wrote it"
        )
    try:
        return Snapshot(
            waiting=read_rollouts(state["waiting"]),
            waited_s=state["waited_s"].numpy(),
            skips=state["skips"].numpy(),
            in_flight=tuple(_read_batch(batch) for batch in state["in_flight"]),
            group_arrivals=state["group_arrivals"],
            past_ids=tuple(state["past_ids"]),
            version=state["version"],
            next_step=state["next_step"],
            counts=state["counts"],
            knobs=state["knobs"],
            calibration=state.get("calibration"),
            auto_window=_as_arrays(state.get("auto_window")),
        )
    except KeyError as error:
        raise ValueError(f"the state_dict has no {error.args[0]!r}: it was cut, or is not a balancer's") from None


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


def write_rollouts(rollouts: Sequence[Rollout]) -> list[Tensor]:
    """No tensors for no rollouts, else frame and slab of a share that holds them all."""
    _check_here(rollouts)
    if not rollouts:
        return []
    share = RankBatch(
        step=0,
        rank=0,
        dp_size=1,
        micro_batches=(MicroBatch.of(rollouts),),
        load=0.0,
        global_num_rollouts=len(rollouts),
        global_num_tokens=0,
        global_num_loss_tokens=0,
    )
    return _write_share(share)


def _write_many(rollouts: Sequence[Rollout]) -> list[Tensor]:
    """Share after share, each of a few rollouts: an event loop beside the thread that writes gets its turn between."""
    some = (rollouts[first : first + _ROLLOUTS_PER_SHARE] for first in range(0, len(rollouts), _ROLLOUTS_PER_SHARE))
    return [tensor for few in some for tensor in write_rollouts(few)]


def read_rollouts(tensors: Sequence[Tensor]) -> tuple[Rollout, ...]:
    """What :func:`write_rollouts` wrote, once or several times, as views of it. Raises WireError where bytes are
    damaged."""
    shares = zip(tensors[::2], tensors[1::2], strict=True)
    return tuple(chain.from_iterable(_read_share(share).rollouts for share in shares))


def _write_share(share: RankBatch) -> list[Tensor]:
    """[frame [16] int64, slab [bytes] uint8]. Not narrowed: what is read back is a view of it."""
    _check_here(share.rollouts)
    encoded = wire.encode(share, narrow=False)
    slab = torch.empty(encoded.frame.wire_bytes, dtype=torch.uint8)
    for _ in encoded.fill(slab):
        pass
    return [encoded.frame.pack(), slab]


def _check_here(rollouts: Sequence[Rollout]) -> None:
    away = [r.rollout_id for r in rollouts if r.tokens["input_ids"].is_meta]
    if away:
        raise ValueError(
            f"{len(away)} rollouts (the first: {away[0]!r}) lie with their producers (hand_over='direct'), so a "
            "checkpoint of the controller cannot hold them. Take it when none waits or is in flight, or put through "
            "the balancer"
        )


def _read_share(tensors: Sequence[Tensor]) -> RankBatch:
    frame, slab = tensors
    return wire.decode(wire.read_frame(frame), slab)


def _write_batch(batch: Batch) -> dict[str, Any]:
    return {
        "step": batch.step,
        "reason": batch.reason,
        "loads": list(batch.loads),
        "lower_bound": batch.lower_bound,
        "num_padding": batch.num_padding,
        "incomplete_groups": list(batch.incomplete_groups),
        "ranks": [_write_share(share) for share in batch.ranks],
    }


def _read_batch(written: Mapping[str, Any]) -> Batch:
    shares = tuple(_read_share(tensors) for tensors in written["ranks"])
    return Batch(
        step=written["step"],
        reason=cast("Reason", written["reason"]),
        ranks=shares,
        num_rollouts=shares[0].global_num_rollouts,
        num_tokens=shares[0].global_num_tokens,
        loads=tuple(written["loads"]),
        lower_bound=written["lower_bound"],
        num_padding=written["num_padding"],
        incomplete_groups=tuple(written["incomplete_groups"]),
    )

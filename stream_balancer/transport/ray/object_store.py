"""Rollouts in Ray's object store: how they are written there, described, and fetched. No actor calls, no event loop.

::

    producer    write_bundle(rollouts)  --> controller  read_bundle() -> rollouts whose tokens stay in the store
    controller  write_share(share)      --> rank        complete() -> the slab to train from

Puts that travel together lie in one object, as the slab that ``wire`` makes of them. On the controller a rollout's
columns are on torch's meta device, and its lease is the object: once nobody holds a rollout of it, the object goes. A
rank reads the store's memory where it lies and copies once, into the slab it trains from: the store's memory is
read-only, and is given back at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_balancer.types import SUPPORTED_DTYPES, MicroBatch, RankBatch, Rollout
from stream_balancer.wire.messages import Owner
from stream_balancer.wire.partial_share import Lease, RemoteRollout, Skeleton, _Skeleton, payload
from stream_balancer.wire.share import (
    _DECODER,
    _ENCODER,
    FRAME_BYTES,
    Encoded,
    Frame,
    _Meta,
    _Plan,
    _plan,
    decode,
    encode,
    read_frame,
)

__all__ = ["Place", "Share", "Stored", "complete", "read_bundle", "read_whole", "write_bundle", "write_share"]

Span = tuple[int, int, bool]
"""(first byte, bytes, whether it is int32 that was int64) in a slab."""


class Stored:
    """An object in the store, for as long as anybody needs it."""

    __slots__ = ("__weakref__", "plan", "ref")

    def __init__(self, ref: Any) -> None:
        self.ref = ref
        self.plan: _Plan | None = None
        """What lies where in it."""


class Place(Lease):
    """Where in which object a rollout's payload lies."""

    __slots__ = ("index", "length", "row", "stored")

    def __init__(self, stored: Stored, index: int, row: int, length: int) -> None:
        self.stored, self.index, self.row, self.length = stored, index, row, length

    def spans(self) -> tuple[Span, ...]:
        """Its bytes, in the order of :func:`stream_balancer.wire.partial_share.payload`."""
        plan = self.stored.plan
        assert plan is not None
        found = [
            (p.start + self.row * p.what.wire_row_bytes, self.length * p.what.wire_row_bytes, p.restored != p.start)
            for _, p in sorted(plan.columns[0].items())
        ]
        found += [(piece.start, piece.what.row_bytes, False) for _, piece in sorted(plan.tensors[self.index].items())]
        return tuple(span for span in found if span[1])


# --- producer to controller ------------------------------------------------------------------------------------------


def write_bundle(rollouts: Sequence[Rollout], slab_of_size: Callable[[int], Tensor]) -> tuple[bytes, Tensor]:
    """All but the slab, and the slab. Raises RolloutError if they do not share one set of columns."""
    encoded = encode(_share_of(rollouts))
    slab = slab_of_size(encoded.frame.wire_bytes)
    fill(encoded, slab)
    return encoded.frame.pack().numpy().tobytes() + encoded._meta, slab[: encoded.frame.wire_bytes]


def fill(encoded: Encoded, slab: Tensor) -> None:
    """Write it all."""
    for _ in encoded.fill(slab):
        pass


def _share_of(rollouts: Sequence[Rollout]) -> RankBatch:
    return RankBatch(
        step=0,
        rank=0,
        dp_size=1,
        micro_batches=(MicroBatch.of(rollouts),),
        load=0.0,
        global_num_rollouts=len(rollouts),
        global_num_tokens=0,
        global_num_loss_tokens=0,
    )


def _described(described: bytes) -> tuple[Frame, _Meta, _Plan]:
    """Not checked again: it was where the rollouts were made, and whoever can call an actor can run code in it."""
    frame = frame_of(described)
    meta = _DECODER.decode(memoryview(described)[FRAME_BYTES:])
    return frame, meta, _plan(meta, frame.meta_bytes, frame.total_bytes)


def frame_of(described: bytes) -> Frame:
    """The frame that something begins with."""
    return read_frame(torch.frombuffer(bytearray(described[:FRAME_BYTES]), dtype=torch.int64))


def read_whole(described: bytes, slab: Tensor) -> list[Rollout]:
    """The rollouts of a bundle whose slab is at hand, as views of it."""
    frame = frame_of(described)
    if frame.total_bytes > slab.numel():  # narrowed columns are widened behind it
        slab = torch.cat([slab, torch.empty(frame.total_bytes - slab.numel(), dtype=torch.uint8)])
    return list(decode(frame, slab).rollouts)


_NOTHING: dict[str, Any] = {}  # one for all: fewer objects for the garbage collector


def read_bundle(described: bytes, stored: Stored, holder: Owner) -> list[Rollout]:
    """The rollouts of a bundle, without their tokens. O(rollouts x columns)."""
    _, meta, stored.plan = _described(described)
    longest = max(meta.lengths)
    columns = {c.name: _meta_tensor(c.dtype, (longest, *c.shape)) for c in meta.columns}
    starts = list(accumulate(meta.lengths, initial=0))
    padding = frozenset(meta.padding)
    rollouts: list[Rollout] = []
    for index, length in enumerate(meta.lengths):
        rollouts.append(
            _stored_rollout(
                tokens={name: column[:length] for name, column in columns.items()},
                scalars=meta.scalars[index] or _NOTHING,
                tensors={t.name: _meta_tensor(t.dtype, t.shape) for t in meta.tensors[index]} or _NOTHING,
                metadata=meta.metadata[index] or _NOTHING,
                rollout_id=meta.ids[index],
                group_id=meta.group_ids[index],
                version=meta.versions[index],
                cost=meta.costs[index],
                is_padding=index in padding,
                num_tokens=length,
                num_loss_tokens=meta.loss_tokens[index],
                loss_tokens=meta.loss_tokens[index],
                holder=holder,
                key=0,
                lease=Place(stored, index, starts[index], length),
            )
        )
    return rollouts


def _stored_rollout(**fields: object) -> RemoteRollout:
    """A rollout from a description that was checked: no second validation."""
    rollout = RemoteRollout.__new__(RemoteRollout)
    for name, value in fields.items():
        object.__setattr__(rollout, name, value)
    return rollout


def _meta_tensor(dtype: int, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=SUPPORTED_DTYPES[dtype], device="meta")


# --- controller to rank ----------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """What travels to a rank."""

    described: bytes
    """Frame and description of the whole share."""
    sources: list[tuple[int, tuple[Span, ...]]]
    """Per rollout: the object it lies in, and where; object -1: its payload is in ``here``. Empty: the whole share
    lies in ``here``."""
    objects: list[Any]
    """ObjectRefs."""
    holders: list[str]
    """Who put each object."""
    here: NDArray[np.uint8]
    """``[n]``."""


def write_share(share: RankBatch, *, max_bytes: int) -> Callable[[], Share]:
    """Describes ``share`` now; the function it returns, for any thread, copies the bytes that must travel. Raises like
    :func:`stream_balancer.wire.share.encode`."""
    rollouts = share.rollouts
    remote = any(isinstance(rollout, RemoteRollout) for rollout in rollouts)
    encoded = encode(share, max_bytes=max_bytes, narrow=not remote)
    described = encoded.frame.pack().numpy().tobytes() + encoded._meta

    def whole() -> Share:
        slab = torch.empty(encoded.frame.wire_bytes, dtype=torch.uint8)
        fill(encoded, slab)
        return Share(described, [], [], [], slab.numpy())

    def in_parts() -> Share:
        numbers: dict[Stored, int] = {}
        holders: list[str] = []
        sources: list[tuple[int, tuple[Span, ...]]] = []
        here: list[Tensor] = []
        for rollout in rollouts:
            if isinstance(rollout, RemoteRollout) and isinstance(rollout.lease, Place):
                place = rollout.lease
                number = numbers.setdefault(place.stored, len(numbers))
                if number == len(holders):
                    holders.append(rollout.holder.label)
                sources.append((number, place.spans()))
            else:
                here += payload(rollout)
                sources.append((-1, ()))
        body = torch.cat(here).numpy() if here else np.empty(0, np.uint8)
        return Share(described, sources, [stored.ref for stored in numbers], holders, body)

    return in_parts if remote else whole


class Lost(NamedTuple):
    """A rollout of a share whose tokens are gone."""

    place: int
    rollout_id: str
    holder: str
    cause: str


Fetch = Callable[[Sequence[Any]], "list[NDArray[np.uint8] | Exception]"]


def complete(share: Share, *, fetch: Fetch, lend: Callable[[int], Tensor]) -> tuple[Frame, Tensor, list[Lost]]:
    """The BATCH frame and the slab to decode. A rollout whose object is gone is left in its place as a padding copy
    without tokens to train on, so that all ranks keep the plan. Blocks while objects are fetched."""
    if not share.sources:
        frame = frame_of(share.described)
        slab = lend(frame.total_bytes)
        np.copyto(slab.numpy()[: frame.wire_bytes], share.here)
        return frame, slab, []
    found = fetch(share.objects)
    frame, meta, plan = _described(share.described)
    lost = [
        Lost(place, meta.ids[place], share.holders[number], f"{type(gone).__name__}")
        for place, (number, _) in enumerate(share.sources)
        if number >= 0 and isinstance(gone := found[number], Exception)
    ]
    packed = share.described[FRAME_BYTES:]
    if lost:
        frame, packed, meta, plan = _without(frame, meta, [one.place for one in lost])
    sources = [(number, 0) for number, _ in share.sources]
    skeleton = Skeleton(cast("Any", frame), torch.tensor(share.here), _Skeleton(packed, [], sources), meta, plan)
    slab = lend(frame.total_bytes)
    for place, (number, spans) in enumerate(share.sources):
        if number >= 0:
            _write(skeleton.targets(slab, [place]), found[number], spans)
    skeleton.finish(slab)
    return frame, slab, lost


def _write(targets: list[Tensor], source: NDArray[np.uint8] | Exception, spans: tuple[Span, ...]) -> None:
    if isinstance(source, Exception):
        for target in targets:
            target.zero_()
        return
    for target, (start, size, narrowed) in zip(targets, spans, strict=True):
        piece = source[start : start + size]
        if narrowed:
            np.copyto(target.numpy().view(np.int64), piece.view(np.int32))
        else:
            np.copyto(target.numpy(), piece)


def _without(frame: Frame, meta: _Meta, places: Sequence[int]) -> tuple[Frame, bytes, _Meta, _Plan]:
    meta.padding = sorted({*meta.padding, *places})
    for place in places:
        meta.loss_tokens[place] = 0
    packed = _ENCODER.encode(meta)
    plan = _plan(meta, len(packed), 2**62)
    frame = frame._replace(
        meta_bytes=len(packed), meta_crc=zlib.crc32(packed), wire_bytes=plan.wire_bytes, total_bytes=plan.total_bytes
    )
    return frame, packed, meta, plan

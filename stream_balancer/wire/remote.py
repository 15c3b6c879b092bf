"""Rollouts whose payload lies elsewhere: what the controller holds of them, and how their owners hear of its end.

::

    producer    encode_rollouts(rollouts, handles=...)  --> controller  RemoteRollout: all but the payload
    controller  encode(micro_batches)                   --> rank        a hole for each; see Decoded.holes()
    controller  the last reference dies                 --> owner       Notify.dropped

Columns of a RemoteRollout are tensors on torch's meta device: name, dtype and shape without a byte behind them, so that
planning, limits and checks see no difference.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from stream_balancer.errors import RolloutError
from stream_balancer.rollouts import Rollout
from stream_balancer.wire.header import Owner

# of one message
_MAX_KEYS = 2**16


class Handle(NamedTuple):
    """Where a payload lies."""

    owner: Owner
    key: int
    """The owner's number of it."""


class _Lease:
    """Dies with the last rollout that refers to the payload; copies share it."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RemoteRollout(Rollout):
    """A rollout whose tokens and tensors an owner keeps; here they are on the meta device."""

    handle: Handle = field(repr=False)
    lease: object = field(default=None, repr=False)
    """Must live as long as the payload is needed."""

    def with_loss_mask(self, column: str) -> Rollout:
        """Refused: the mask is to be counted, and has its place in the payload by its name."""
        raise RolloutError(
            f"rollout {self.rollout_id!r} stays with its producer, which must know that {column!r} says which tokens "
            f"are trained on: connect(..., hand_over='direct', loss_mask_column={column!r})"
        )


class Leases:
    """Payloads of one owner that the controller needs."""

    def __init__(self) -> None:
        self._tell: Callable[[tuple[int, ...]], object] | None = None
        self._soon: Callable[[Callable[[], None]], object] | None = None
        # weak: a lease lives as long as a rollout that refers to the payload, and nothing else keeps it
        self._held: dict[int, weakref.ref[_Lease]] = {}
        self._dropped: deque[int] = deque()
        self._is_queued = False

    def attach(self, tell: Callable[[tuple[int, ...]], object], soon: Callable[[Callable[[], None]], object]) -> None:
        """The owner is there, perhaps again. ``tell`` is called with keys that are needed no more, also with those that
        were not before; ``soon`` runs a function later, from any thread and without waiting: a last reference may die
        inside a garbage collection."""
        self._tell, self._soon, self._is_queued = tell, soon, True
        soon(self._flush)

    @property
    def keys(self) -> Collection[int]:
        """Payloads that are needed."""
        # a copy: a lease may end at any time
        return self._held.copy()

    def hold(self, key: int) -> object:
        """A lease: the payload of this key is needed while it lives. A rollout that is put again has the same."""
        there = self._held.get(key)
        lease = None if there is None else there()
        if lease is None:
            lease = _Lease()
            # not weakref.finalize, which costs a put of many rollouts a tenth of its time
            self._held[key] = weakref.ref(lease, partial(self._on_released, key))
        return lease

    def needs(self, key: int) -> bool:
        """True while a rollout refers to this payload."""
        there = self._held.get(key)
        return there is not None and there() is not None

    def _on_released(self, key: int, gone: weakref.ref[_Lease]) -> None:
        # another one may have been made meanwhile; at exit the owner sees the connection end, and needs no list
        if self._held.get(key) is not gone or sys.is_finalizing():
            return
        # no lock: this may run inside a garbage collection
        del self._held[key]
        self._dropped.append(key)
        if self._soon is not None and not self._is_queued:
            self._is_queued = True
            self._soon(self._flush)

    def _flush(self) -> None:
        # Before anything is taken: whoever sees True has appended already, and whoever sees False queues another call.
        self._is_queued = False
        while self._tell is not None and self._dropped:
            self._tell(tuple(self._dropped.popleft() for _ in range(min(len(self._dropped), _MAX_KEYS))))

"""A rank's end over Ray: it reads payloads from the object store, and waits for an actor that is started again.

The conversation is that of every other transport (:mod:`stream_balancer.transport.rank_port`). What is here: an actor
with a journal comes back and delivers what it does not know to be done. A rank that has such a step already trains on
it once, and says again what it had said.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from stream_balancer.transport.rank_port import Decode, RankPort
from stream_balancer.transport.ray.bundles import ObjectStore
from stream_balancer.transport.ray.caller import ActorLostError, CallingChannel
from stream_balancer.types import RankBatch
from stream_balancer.wire.messages import Batch, JoinRank, Message, PartialBatch, StepHeld, StepReport
from stream_balancer.wire.share import decode

__all__ = ["RayRankPort"]

_MAX_REPORTED = 1000  # reports that may be asked for again, far above what is in flight

logger = logging.getLogger("stream_balancer.transport")


class RayRankPort(RankPort):
    """A rank's port, for ``RankFeed``."""

    def __init__(
        self,
        actor: Any,
        *,
        rank: int,
        dp_size: int,
        depth: int = 2,
        incarnation: int = 0,
        max_batch_bytes: int = 4 * 2**30,
        restarts: bool = False,
        linger_s: float = 5.0,
        decode: Decode = decode,
        pinned: bool = False,
    ) -> None:
        """Connect at once. ``actor``: a handle of the actor that hosts the balancer. ``restarts``: should the actor
        die, it comes back and knows what it had accepted."""
        self._actor, self._restarts = actor, restarts
        self._request = JoinRank(rank, dp_size, incarnation, depth, max_batch_bytes)
        self._delivered: set[int] = set()  # by the present actor, and not done
        self._reported: dict[int, StepReport | StepHeld] = {}
        super().__init__(
            self._connected(),
            self._request,
            decode=decode,
            pinned=pinned,
            payloads=ObjectStore(),
            linger_s=linger_s,
        )
        self.start()

    def _connected(self) -> CallingChannel:
        return CallingChannel(self._actor, self._request, name=f"sb-ray-rank-{self._request.rank}")

    def take(self) -> RankBatch | None:
        with self._lock:
            batch = super().take()
            if batch is not None and batch.step not in self._delivered:
                self._taken -= 1  # a former actor gave it, so the present one waits for no credit
            return batch

    def report(self, done: StepReport | StepHeld) -> None:
        """What the present actor has not delivered is reported once it
        delivers it."""
        with self._lock:
            self._reported[done.step] = done
            if len(self._reported) > _MAX_REPORTED:
                self._reported.pop(next(iter(self._reported)))
            if done.step in self._delivered:
                super().report(done)
                if isinstance(done, StepReport):
                    self._delivered.discard(done.step)

    # in the channel's thread

    def ended(self, error: Exception) -> None:
        lost = isinstance(error, ActorLostError) and not error.for_good
        with self._lock:
            if lost and self._restarts and self._end is None:
                logger.warning("rank %d waits for its controller to be started again: %s", self.rank, error)
                self._delivered.clear()
                self._arrived = self._taken = 0
                self._taken_is_queued = False
                self._channel = self._connected()
                self._channel.start(self)
                return
        super().ended(error)

    def admit(self, message: Message, sizes: Sequence[int]) -> Sequence[int]:
        if isinstance(message, Batch) and self._is_known(message.step):
            return (message.total_bytes,)
        return super().admit(message, sizes)

    def receive(self, message: Message, buffers: Sequence[Tensor], references: Sequence[object]) -> None:
        if isinstance(message, Batch) and self._is_known(message.step):
            self._on_delivered_again(message.step)
            return
        if isinstance(message, Batch | PartialBatch):
            with self._lock:
                self._delivered.add(message.step)
        super().receive(message, buffers, references)

    def _is_known(self, step: int) -> bool:
        """Whether a former actor delivered it, and the present one has not."""
        return self._restarts and step <= self._newest_step and step not in self._delivered

    def _on_delivered_again(self, step: int) -> None:
        with self._lock:
            self._delivered.add(step)
            self._arrived += 1
            if all(arriving.step != step for arriving in self._queue):
                self._taken += 1
                self._channel.send(self._taken_so_far)
            if (reported := self._reported.get(step)) is not None:
                self.report(reported)

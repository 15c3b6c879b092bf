"""The actor: one process whose event loop runs the balancer and ``serve``. Only the handle calls it."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from stream_balancer.config import BalancerConfig
from stream_balancer.controller.balancer import StreamBalancer
from stream_balancer.controller.serve import serve
from stream_balancer.core.accept import Accept
from stream_balancer.errors import BrokenResourceError
from stream_balancer.types import EvictReason, Rollout
from stream_balancer.wire.partial_batch import RemoteRollout

if TYPE_CHECKING:
    from stream_balancer.transport.sockets.acceptor import MeetingPoint
    from stream_balancer.transport.sockets.joiner import Entry
    from stream_balancer.wire.messages import PayloadsFetched

__all__ = ["Host", "LostRollout", "Options"]

_MAX_LOST = 100_000  # names kept

logger = logging.getLogger("stream_balancer.ray")


class LostRollout(NamedTuple):
    """An accepted rollout that will not be trained on, because its tokens are gone."""

    rollout_id: str
    holder: str
    """Who had put it: host, process and Ray node."""
    step: int | None
    """The step it was dispatched in; None if it still waited."""


@dataclass(frozen=True)
class Options:
    """What :func:`host` was given."""

    config: BalancerConfig
    journal: str | None
    rejoin_timeout_s: float
    report_after_s: float
    staged_bytes: int
    max_put_bytes: int
    accept: Accept | None
    num_producers: int | None
    roles: Mapping[str, Sequence[str]] | None


class Host:
    """The actor, as Ray makes it."""

    def __init__(self, options: Options) -> None:
        from stream_balancer.transport.ray.transport import RayTransport

        # A hundred thousand waiting rollouts are a million objects without cycles: looking through them again and again
        # takes three times as long as making them.
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)
        self._options = options
        self._balancer = StreamBalancer(
            options.config,
            journal=options.journal,
            on_evict=self._on_evict,
            accept=options.accept,
            num_producers=options.num_producers,
        )
        self._transport = RayTransport(
            dp_size=options.config.dp_size,
            staged_bytes=options.staged_bytes,
            max_put_bytes=options.max_put_bytes,
        )
        self._transport.on_missing = self._on_missing
        self._lost: dict[str, LostRollout] = {}
        self._serving: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._peers: MeetingPoint | None = None
        self._failure: Exception | None = None

    async def _ready(self) -> None:
        """Begin with the first call, after a restart too."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        await self._up.wait()

    async def _serve(self) -> None:
        options = self._options
        try:
            async with self._balancer as balancer, self._transport as transport:
                self._up.set()
                await serve(
                    balancer,
                    transport,
                    rejoin_timeout_s=options.rejoin_timeout_s,
                    report_after_s=options.report_after_s,
                    roles=options.roles,
                )
        except Exception as error:
            self._failure = error
            logger.exception("the balancer stopped")
        finally:
            self._up.set()

    def _on_evict(self, rollout: Rollout, reason: EvictReason) -> None:
        if reason == "lost" and isinstance(rollout, RemoteRollout):
            self._name_lost(LostRollout(rollout.rollout_id, rollout.owner.label, None))

    def _on_missing(self, fetched: PayloadsFetched) -> None:
        for one in fetched.missing:
            self._name_lost(LostRollout(one.rollout_id, one.owner, fetched.step))

    def _name_lost(self, lost: LostRollout) -> None:
        if len(self._lost) < _MAX_LOST:
            self._lost.setdefault(lost.rollout_id, lost)

    def _peer_entry(self) -> Entry:
        """Where a rank's leader and its model-parallel peers find each other. Batches go from one to the other by gloo,
        whose ends meet over a connection of their own; without a mesh no port is opened."""
        import ray

        from stream_balancer.transport.sockets.acceptor import MeetingPoint

        if self._peers is None:
            self._peers = MeetingPoint(ray.util.get_node_ip_address())
        return self._peers.entry

    async def _join(self, *call: Any) -> Any:
        await self._ready()
        return await self._transport.channels.join(*call)

    async def _exchange(self, *call: Any) -> Any:
        return await self._transport.channels.exchange(*call)

    async def _poll(self, *call: Any) -> Any:
        return await self._transport.channels.poll(*call)

    async def _hold(self, *call: Any) -> None:
        await self._transport.channels.hold(*call)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        await self._ready()
        if method == "lost_rollouts":
            return list(self._lost.values())
        if method == "about":
            config = self._balancer.config
            return config.dp_size, config.loss_mask_column, self._options.journal is not None
        if method == "producers":
            return self._transport.producers
        if method == "peer_entry":
            return self._peer_entry()
        if self._failure is not None:
            raise BrokenResourceError(f"the balancer stopped: {self._failure}")
        answer = getattr(self._balancer, method)(*args, **kwargs)
        return await answer if asyncio.iscoroutine(answer) else answer

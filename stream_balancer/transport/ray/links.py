"""In the actor: the controller's ends of the ways to a rank and to a producer. Who they are is ``ray``'s business."""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import torch

from stream_balancer.errors import (
    BrokenResourceError,
    ClosedResourceError,
    EndOfStream,
    RankLostError,
    WireError,
    WouldBlock,
    to_raise,
)
from stream_balancer.transport import Report
from stream_balancer.transport.producer_session import Offer
from stream_balancer.transport.put_ledger import Limits, Mode, reason_of
from stream_balancer.transport.ray.channel import Message, Peer, cause_of
from stream_balancer.transport.ray.object_store import Lost, Share, Stored, read_bundle, read_whole, write_share
from stream_balancer.types import RankBatch, Rollout
from stream_balancer.wire.messages import Cancel, Denominators, Owner, StepHeld, StepReport

__all__ = ["RayIntake", "RayLink"]

_THREAD_BYTES = 2**20  # a larger share is packed in a thread, beside the event loop


class RayLink:
    """The controller's end of the way to a rank."""

    def __init__(self, peer: Peer, rank: int, incarnation: int, depth: int, max_bytes: int) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self._peer = peer
        self._max_bytes = max_bytes
        self._granted = depth
        self._reports: deque[Report] = deque()
        self._error: Exception | None = None
        self._ended = False
        self._callback: Callable[[], None] = lambda: None
        self.on_lost_rollouts: Callable[[int, list[Lost]], None] = lambda step, lost: None
        peer.handle = self._handle

    @property
    def credits(self) -> int:
        """Shares the rank has room for now."""
        return 0 if self._error is not None or self._ended else self._granted

    @property
    def live(self) -> bool:
        """False once lost or closed."""
        return self._error is None

    def subscribe(self, callback: Callable[[], None]) -> None:
        """See :class:`~stream_balancer.transport.Link`."""
        self._callback = callback

    def denominators(self, message: Denominators) -> None:
        """Not yet: a rank masks what is gone, and nobody asks the others."""

    def send(self, share: RankBatch, *, confirm: bool = False) -> None:
        """See :class:`~stream_balancer.transport.Link`."""
        if self._error is not None:
            raise to_raise(self._error)
        if self._ended:
            raise ClosedResourceError
        if self._granted == 0:
            raise WouldBlock
        write = write_share(share, max_bytes=self._max_bytes)
        self._granted -= 1
        self._peer.put(partial(_packed, write, share.num_tokens))

    def report(self) -> Report | None:
        """See :class:`~stream_balancer.transport.Link`."""
        if self._reports:
            return self._reports.popleft()
        if self._error is not None:
            raise to_raise(self._error)
        return None

    def end(self) -> None:
        """See :class:`~stream_balancer.transport.Link`."""
        if not self._ended:
            self._ended = True
            self._peer.put(("end",))

    async def aclose(self) -> None:
        """See :class:`~stream_balancer.transport.Link`."""
        self.part("its link was closed")
        self.fail(ClosedResourceError())
        await anyio.lowlevel.checkpoint()

    def part(self, cause: str) -> None:
        """Tell the rank that it has no controller any more. Idempotent."""
        self._peer.put(("lost", cause))
        self._peer.finish()

    def lost(self, cause: str) -> None:
        """The rank is gone."""
        self.fail(RankLostError(f"rank {self.rank} was lost: {cause}. Restart it", rank=self.rank, cause=cause))
        self._peer.finish()

    def fail(self, error: Exception) -> None:
        """The first reason counts."""
        if self._error is None:
            self._error = error
            self._callback()

    def _handle(self, message: Message) -> None:
        if self._error is not None:
            return
        match message:
            case ("taken",):
                self._granted += 1
            case ("done", int(step), float(seconds), float() | None as compute_s, float(waited_s)):
                self._reports.append(StepReport(step, seconds, compute_s, waited_s))
            case ("held", int(step)):
                self._reports.append(StepHeld(step, 0.0))
            case ("lacks", int(step), list(lost)):
                self.on_lost_rollouts(step, [Lost(*one) for one in lost])
            case ("bye",):
                if self._ended:
                    self.fail(EndOfStream())
                    self._peer.finish()
                else:
                    self.lost("the rank closed its feed")
        self._callback()


async def _packed(write: Callable[[], Share], num_tokens: int) -> Message:
    if num_tokens * 16 < _THREAD_BYTES:
        return ("share", *write())
    return ("share", *await anyio.to_thread.run_sync(write))


class RayIntake:
    """The controller's end of the way to a producer."""

    def __init__(self, peer: Peer, label: str, node: str, limits: Limits, *, direct: bool, restarts: bool) -> None:
        self.name = label
        self.owner = Owner(node, 0, secrets.token_hex(8), label) if direct else None
        """Whose tokens stay in the store."""
        self._peer = peer
        self._inbox: deque[Offer | Cancel] = deque()
        self._given: dict[int, Offer] = {}  # taken, without a verdict
        self._waiting: deque[Message] = deque()
        self._fetching: asyncio.Task[None] | None = None
        self._stored: set[int] = set()
        self._error: Exception | None = None
        self._ended = False
        self._callback: Callable[[], object] = lambda: None
        self._loop = asyncio.get_running_loop()
        peer.handle = self._handle
        peer.put(("limits", *limits, direct, restarts))

    @property
    def live(self) -> bool:
        """False once it left or was lost."""
        return self._error is None

    @property
    def keeps_payloads(self) -> bool:
        """Whether objects that this producer owns are still needed."""
        return self.owner is not None and bool(self._stored)

    def subscribe(self, callback: Callable[[], object] = lambda: None, at_once: object = None) -> None:
        """See :class:`~stream_balancer.transport.producer_session.ProducerSession`."""
        self._callback = callback
        self._inbox.extendleft(reversed(self._given.values()))
        self._given.clear()

    def take(self) -> Offer | Cancel | None:
        """See :class:`~stream_balancer.transport.producer_session.ProducerSession`."""
        if self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Offer):
                self._given[item.number] = item
            return item
        if self._error is not None:
            raise to_raise(self._error)
        return None

    def answer(self, number: int, error: Exception | None) -> None:
        """See :class:`~stream_balancer.transport.producer_session.ProducerSession`."""
        self._given.pop(number, None)
        self._peer.put(("verdict", number, None if error is None else reason_of(error)))

    def end(self) -> None:
        """See :class:`~stream_balancer.transport.producer_session.ProducerSession`."""
        if not self._ended:
            self._ended = True
            self._peer.put(("end",))

    async def aclose(self) -> None:
        """See :class:`~stream_balancer.transport.producer_session.ProducerSession`."""
        if not self._ended:
            self._peer.put(("lost", "its link was closed"))
        self._peer.finish()
        if self._fetching is not None:
            self._fetching.cancel()
        await anyio.lowlevel.checkpoint()

    def lost(self, cause: str) -> None:
        """The producer is gone."""
        self._fail(BrokenResourceError(f"producer {self.name} was lost: {cause}"))
        self._peer.finish()

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._callback()

    def _handle(self, message: Message) -> None:
        self._waiting.append(message)
        if self._fetching is None:
            self._go_on()

    def _go_on(self) -> None:
        """Take in messages, in order, up to one whose tokens must be fetched first."""
        while self._waiting and self._error is None:
            match self._waiting.popleft():
                case ("puts", list(tickets), list(bundles)):
                    if self.owner is None and any(isinstance(payload, list) for _, _, payload in bundles):
                        self._fetching = asyncio.create_task(self._fetch(tickets, bundles))
                        return
                    self._take_in(tickets, [self._read(*bundle) for bundle in bundles])
                case ("cancel", int(number)):
                    self._inbox.append(Cancel(number))
                case ("bye",):
                    self._fail(EndOfStream())
                    self._peer.finish()
        self._callback()

    async def _fetch(self, tickets: list[tuple[int, int, int]], bundles: list[tuple[bytes, int, Any]]) -> None:
        try:
            read = []
            for described, key, payload in bundles:
                if isinstance(payload, list):
                    slab = torch.tensor(await payload[0])
                    read.append(read_whole(described, slab))
                    self._peer.put(("drop", [key]))
                else:
                    read.append(self._read(described, key, payload))
            self._take_in(tickets, read)
        except Exception as error:  # noqa: BLE001 - Ray's errors come in many kinds
            self.lost(cause_of(error))
        self._fetching = None
        self._go_on()

    def _read(self, described: bytes, key: int, payload: bytes | list[Any]) -> list[Rollout]:
        if isinstance(payload, bytes):
            return read_whole(described, torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        assert self.owner is not None
        stored = Stored(payload[0])
        self._stored.add(key)
        weakref.finalize(stored, self._on_released, key).atexit = False
        return read_bundle(described, stored, self.owner)

    def _take_in(self, tickets: list[tuple[int, int, int]], bundles: list[list[Rollout]]) -> None:
        rollouts = [rollout for bundle in bundles for rollout in bundle]
        if sum(count for _, _, count in tickets) != len(rollouts):
            raise WireError(f"producer {self.name} put {len(rollouts)} rollouts, and announced another number")
        at = 0
        for number, mode, count in tickets:
            self._inbox.append(Offer(number, Mode(mode), tuple(rollouts[at : at + count])))
            at += count

    def _on_released(self, key: int) -> None:
        """Runs wherever the last reference dies, perhaps inside a garbage collection: takes no lock."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._drop, key)

    def _drop(self, key: int) -> None:
        self._stored.discard(key)
        self._peer.put(("drop", [key]))

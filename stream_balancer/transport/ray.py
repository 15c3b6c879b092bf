"""Ranks and producers of a balancer that lives in a Ray actor. The only file of this room that names Ray.

::

    in the actor      RayTransport: what ``serve`` needs; the actor's _exchange, _poll and _hold are its own
    in a trainer      RayPort, for RankFeed
    in a worker       RayOutlet, for Producer

Payloads lie in the object store of the node where they were put, each object owned by the process that put it; the
actor gets descriptions, and a rank fetches what its share needs. ``integrations/ray.py`` starts the actor.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Any, Self

import anyio
import anyio.lowlevel
import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_balancer.errors import (
    AlreadyInUseError,
    BrokenResourceError,
    ClosedResourceError,
    EndOfStream,
    RankLostError,
    WireError,
    WouldBlock,
)
from stream_balancer.handover import Holder
from stream_balancer.transport import StepDone
from stream_balancer.transport._loop import Arrivals
from stream_balancer.transport._puts import (
    ENDED,
    Limits,
    Mode,
    Offer,
    PutLedger,
    Ticket,
    Withdrawal,
    Withdrawn,
    error_of,
    reason_of,
)
from stream_balancer.transport._ray_channel import Caller, Message, Peer, cause_of
from stream_balancer.transport._ray_store import (
    Lost,
    Share,
    Stored,
    complete,
    frame_of,
    read_bundle,
    read_whole,
    write_bundle,
    write_share,
)
from stream_balancer.transport._slabs import SlabPool
from stream_balancer.types import RankBatch, Rollout
from stream_balancer.wire import Frame, decode

__all__ = ["RayLink", "RayOutlet", "RayPort", "RayTransport"]

INLINE_BYTES = 64 * 1024  # below that an object costs more than its bytes; Ray's own limit for arguments is 100 KiB
BUNDLE_BYTES = 16 * 2**20
BUNDLE_PUTS = 1024
_MAX_LEAVING = 1000  # peers that are over; each asks a last time within milliseconds
_MAX_DONE = 1000  # steps that a rank may have acknowledged in vain, far above what is in flight
_RETRY_S = 0.1  # between attempts to write into a full store
_THREAD_BYTES = 2**20  # a larger share is packed in a thread, beside the event loop

logger = logging.getLogger("stream_balancer.transport")


# --- the controller --------------------------------------------------------------------------------------------------


class RayLink:
    """The controller's end of the way to a rank."""

    def __init__(self, peer: Peer, rank: int, incarnation: int, depth: int, max_bytes: int) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self._peer = peer
        self._max_bytes = max_bytes
        self._granted = depth
        self._reports: deque[StepDone] = deque()
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

    def send(self, share: RankBatch) -> None:
        """See :class:`~stream_balancer.transport.Link`."""
        if self._error is not None:
            raise self._error
        if self._ended:
            raise ClosedResourceError
        if self._granted == 0:
            raise WouldBlock
        write = write_share(share, max_bytes=self._max_bytes)
        self._granted -= 1
        self._peer.put(partial(_packed, write, share.num_tokens))

    def report(self) -> StepDone | None:
        """See :class:`~stream_balancer.transport.Link`."""
        if self._reports:
            return self._reports.popleft()
        if self._error is not None:
            raise self._error
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
                self._reports.append(StepDone(step, seconds, compute_s, waited_s))
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
        self.holder = Holder(node, 0, secrets.token_hex(8), label) if direct else None
        """Whose tokens stay in the store."""
        self._peer = peer
        self._inbox: deque[Offer | Withdrawal] = deque()
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
    def holding(self) -> bool:
        """Whether objects that this producer owns are still needed."""
        return self.holder is not None and bool(self._stored)

    def subscribe(self, callback: Callable[[], object], at_once: Callable[[Offer], object]) -> None:
        """See :class:`~stream_balancer.transport._producers.Intake`."""
        self._callback = callback
        self._inbox.extendleft(reversed(self._given.values()))
        self._given.clear()

    def take(self) -> Offer | Withdrawal | None:
        """See :class:`~stream_balancer.transport._producers.Intake`."""
        if self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Offer):
                self._given[item.number] = item
            return item
        if self._error is not None:
            raise self._error
        return None

    def answer(self, number: int, error: Exception | None) -> None:
        """See :class:`~stream_balancer.transport._producers.Intake`."""
        self._given.pop(number, None)
        self._peer.put(("verdict", number, None if error is None else reason_of(error)))

    def end(self) -> None:
        """See :class:`~stream_balancer.transport._producers.Intake`."""
        if not self._ended:
            self._ended = True
            self._peer.put(("end",))

    async def aclose(self) -> None:
        """See :class:`~stream_balancer.transport._producers.Intake`."""
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
                    if self.holder is None and any(isinstance(payload, list) for _, _, payload in bundles):
                        self._fetching = asyncio.create_task(self._fetch(tickets, bundles))
                        return
                    self._take_in(tickets, [self._read(*bundle) for bundle in bundles])
                case ("cancel", int(number)):
                    self._inbox.append(Withdrawal(number))
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
        assert self.holder is not None
        stored = Stored(payload[0])
        self._stored.add(key)
        weakref.finalize(stored, self._on_released, key).atexit = False
        return read_bundle(described, stored, self.holder)

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


class RayTransport:
    """The controller's side, inside the actor. ``serve`` delivers to its ranks and takes its producers' puts."""

    def __init__(
        self,
        *,
        dp_size: int,
        direct: bool = True,
        restarts: bool = False,
        staged_bytes: int = Limits._field_defaults["staged_bytes"],
        max_put_bytes: int = Limits._field_defaults["max_put_bytes"],
    ) -> None:
        """``direct``: tokens stay in the object store until a rank fetches them; else they are fetched here first.
        ``restarts``: should the actor die, it comes back and knows what it had accepted: ranks and producers wait."""
        self.dp_size = dp_size
        self._restarts = restarts
        self.direct = direct
        self._limits = Limits(staged_bytes, max_put_bytes).check()
        self._peers: dict[str, Peer] = {}
        self._leaving: dict[str, Peer] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._links: dict[int, RayLink] = {}
        self._intakes: weakref.WeakSet[RayIntake] = weakref.WeakSet()
        self._arrived: Arrivals[RayLink] = Arrivals()
        self._producers: Arrivals[RayIntake] = Arrivals()
        self._closed = False
        self.on_lost_rollouts: Callable[[int, int, list[Lost]], None] = lambda rank, step, lost: None
        """Called with rank, step and what could not be fetched."""

    @property
    def producers(self) -> list[str]:
        """Labels of those who are connected."""
        return [intake.name for intake in self._intakes if intake.live]

    # for the actor's methods of these names

    async def exchange(self, name: str, number: int, messages: list[Message]) -> Any:
        """See :meth:`Peer.exchange`."""
        return await self._peer(name).exchange(number, messages)

    async def poll(self, name: str) -> Any:
        """See :meth:`Peer.poll`."""
        return await self._peer(name).poll()

    async def hold(self, name: str) -> None:
        """Return once this caller need not be watched any more: what it gets for this call is its lifeline."""
        await self._peer(name).released.wait()

    def _peer(self, name: str) -> Peer:
        peer = self._peers.get(name) or self._leaving.get(name)
        if peer is None:
            peer = self._peers[name] = Peer()
            peer.handle = partial(self._greet, peer)
            peer.on_finish = partial(self._see_off, name)
        return peer

    def _see_off(self, name: str) -> None:
        """It may still ask for what was said last."""
        self._leaving[name] = self._peers.pop(name)
        if len(self._leaving) > _MAX_LEAVING:
            self._leaving.pop(next(iter(self._leaving)))

    def _greet(self, peer: Peer, hello: Message) -> None:
        match hello:
            case ("rank", int(rank), int(dp_size), int(incarnation), int(depth), int(max_bytes), list(lifeline)):
                self._greet_rank(peer, RayLink(peer, rank, incarnation, depth, max_bytes), dp_size, lifeline)
            case ("producer", str(label), str(node), list(lifeline)):
                intake = RayIntake(peer, label, node, self._limits, direct=self.direct, restarts=self._restarts)
                self._intakes.add(intake)
                self._watch(lifeline, intake.lost)
                if self._closed:
                    peer.put(("lost", "the transport is closed"))
                    peer.finish()
                else:
                    self._producers.add(intake)
            case _:
                peer.put(("lost", "it did not say who it is. Install one stream_balancer everywhere"))
                peer.finish()

    def _greet_rank(self, peer: Peer, link: RayLink, dp_size: int, lifeline: list[Any]) -> None:
        refusal = self._judge(link, dp_size)
        if refusal is not None:
            peer.put(("refused", type(refusal).__name__, str(refusal)))
            peer.finish()
            return
        before = self._links.get(link.rank)
        self._links[link.rank] = link
        if before is not None and before.live:
            before.part(f"superseded by incarnation {link.incarnation}")
            before.lost(f"superseded by incarnation {link.incarnation}")
        link.on_lost_rollouts = lambda step, lost: self.on_lost_rollouts(link.rank, step, lost)
        self._watch(lifeline, link.lost)
        peer.put(("welcome", self._restarts))
        self._arrived.add(link)

    def _judge(self, link: RayLink, dp_size: int) -> Exception | None:
        if self._closed:
            return RankLostError("the transport is closed", rank=link.rank, cause="closed")
        if dp_size != self.dp_size or not 0 <= link.rank < self.dp_size:
            return ValueError(
                f"rank {link.rank} announces dp_size={dp_size}, but the controller balances for "
                f"dp_size={self.dp_size}. Give both the same number of data-parallel ranks"
            )
        before = self._links.get(link.rank)
        if before is not None and before.live and before.incarnation >= link.incarnation:
            return AlreadyInUseError(
                f"rank {link.rank} is already connected (incarnation {before.incarnation}). One RankFeed per rank: "
                "close the other one first, or start the rank again under a higher incarnation"
            )
        return None

    def _watch(self, lifeline: list[Awaitable[None]], lost: Callable[[str], None]) -> None:
        async def watch() -> None:
            try:
                await lifeline[0]
            except Exception as error:  # noqa: BLE001 - OwnerDiedError and its kin
                lost(cause_of(error))

        task = asyncio.create_task(watch())
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    # for serve

    async def accept(self) -> RayLink:
        """See :class:`~stream_balancer.transport.Transport`."""
        return await self._arrived.next()

    async def accept_producer(self) -> RayIntake:
        """The next producer. If cancelled, none is lost."""
        return await self._producers.next()

    def readmit(self, link: Any) -> None:
        """Give a producer back, for the next ``attend``."""
        self._producers.add(link)

    async def aclose(self) -> None:
        """See :class:`~stream_balancer.transport.Transport`."""
        self._closed = True
        for link in self._links.values():
            await link.aclose()
        for intake in list(self._intakes):
            await intake.aclose()
        self._arrived.fail(ClosedResourceError())
        self._producers.fail(ClosedResourceError())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


_REFUSALS: dict[str, type[Exception]] = {"ValueError": ValueError, "AlreadyInUseError": AlreadyInUseError}

# --- the rank --------------------------------------------------------------------------------------------------------


class RayPort:
    """The rank's end. Its thread fetches what shares need; other methods may be called from any thread."""

    def __init__(
        self,
        actor: Any,
        *,
        rank: int,
        dp_size: int,
        depth: int = 2,
        incarnation: int = 0,
        max_batch_bytes: int = 4 * 2**30,
        linger_s: float = 5.0,
        decode: Callable[[Frame, Tensor], RankBatch] = decode,
        pinned: bool = False,
    ) -> None:
        """``actor``: a handle of the actor that hosts the balancer."""
        self.rank = rank
        self.dp_size = dp_size
        self._linger_s = linger_s
        self._decode = decode
        self._pool = SlabPool(depth + 2, pinned=pinned)
        self._queue: deque[RankBatch] = deque()
        self._end: Exception | None = None
        self._closed = False
        self._left = False
        self._callback: Callable[[], None] = lambda: None
        self._arrivals: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._restarts = False
        self._progress = _Progress()
        self._actor = actor
        self._hello = ("rank", rank, dp_size, incarnation, depth, max_batch_bytes)
        self._caller = self._connected()
        self._thread = threading.Thread(target=self._run, name=f"sb-ray-rank-{rank}", daemon=True)
        self._thread.start()

    def _connected(self) -> Caller:
        caller = Caller(self._actor, on_message=self._arrivals.put, on_lost=self._on_lost)
        caller.open(*self._hello)
        return caller

    def subscribe(self, callback: Callable[[], None]) -> None:
        """See :class:`~stream_balancer.transport.RankPort`."""
        self._callback = callback

    def take(self) -> RankBatch | None:
        """See :class:`~stream_balancer.transport.RankPort`."""
        if self._closed:
            raise ClosedResourceError
        if self._queue:
            batch = self._queue.popleft()
            if self._progress.taken(batch.step):
                self._caller.send(("taken",))
            return batch
        if self._end is not None:
            raise self._end
        return None

    def report(self, done: StepDone) -> None:
        """See :class:`~stream_balancer.transport.RankPort`."""
        if self._progress.done(done):
            self._caller.send(_report(done))

    def leave(self) -> None:
        """See :class:`~stream_balancer.transport.RankPort`."""
        if not self._left:
            self._left = True
            self._caller.send(("bye",))

    def close(self) -> None:
        """See :class:`~stream_balancer.transport.RankPort`."""
        self._closed = True
        self.leave()
        self._caller.ended.wait(self._linger_s)
        self._arrivals.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._queue.clear()

    async def aclose(self) -> None:
        """See :class:`~stream_balancer.transport.RankPort`."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close, limiter=anyio.CapacityLimiter(1))

    def kill(self) -> None:
        """Be gone without a word, as a killed process."""
        self._closed = self._left = True
        self._caller.break_off()
        self._arrivals.put(None)

    # in the thread

    def _run(self) -> None:
        while (message := self._arrivals.get()) is not None:
            try:
                self._handle(message)
            except Exception as error:  # noqa: BLE001 - told by take()
                self._finish(error)
            del message  # it would keep objects of the store alive while this waits
            self._callback()

    def _handle(self, message: Message) -> None:
        match message:
            case ("share", *fields):
                self._receive(Share(*fields))
            case ("welcome", bool(restarts)):
                self._restarts = restarts
            case ("restart", str(cause)):
                logger.warning("rank %d waits for its controller to be started again: %s", self.rank, cause)
                self._progress.restart()
                self._caller = self._connected()
            case ("end",):
                self._finish(EndOfStream())
            case ("lost", str(cause)):
                self._finish(self._lost(cause))
            case ("refused", str(kind), str(text)):
                refusals: dict[str, type[Exception]] = {
                    "ValueError": ValueError,
                    "AlreadyInUseError": AlreadyInUseError,
                }
                self._finish(refusals[kind](text) if kind in refusals else self._lost(text))

    def _receive(self, share: Share) -> None:
        step = frame_of(share.described).step
        is_new, answers = self._progress.arrived(step)
        if answers:
            self._caller.send(*answers)
        if is_new:
            self._queue.append(self._complete(share))

    def _complete(self, share: Share) -> RankBatch:
        frame, slab, lost = complete(share, fetch=_fetch, lend=self._pool.lend)
        if lost:
            names = ", ".join(f"{one.rollout_id!r} (put by {one.holder})" for one in lost[:5])
            logger.warning(
                "rank %d, step %d: %d rollouts are gone and take no part: %s", self.rank, frame.step, len(lost), names
            )
            self._caller.send(("lacks", frame.step, [tuple(one) for one in lost]))
        return self._decode(frame, slab)

    def _on_lost(self, cause: str, for_good: bool) -> None:
        self._arrivals.put(("restart" if self._restarts and not for_good else "lost", cause))

    def _lost(self, cause: str) -> RankLostError:
        message = f"rank {self.rank} lost its controller: {cause}. Start the controller again and open a new RankFeed"
        return RankLostError(message, rank=self.rank, cause=cause)

    def _finish(self, error: Exception) -> None:
        if self._end is None:
            self._end = error


def _report(done: StepDone) -> Message:
    return ("done", done.step, done.seconds, done.compute_s, done.waited_s)


class _Progress:
    """What a rank knows of its steps, should the controller be started again and deliver some of them again: each is
    trained on once. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queued: set[int] = set()
        self._newest = self._newest_done = -1
        self._here: set[int] = set()  # delivered by the present controller, and not done
        self._done: dict[int, StepDone] = {}

    def arrived(self, step: int) -> tuple[bool, list[Message]]:
        """Whether it is new; and what to say at once about one that is not."""
        with self._lock:
            self._here.add(step)
            if step > self._newest:
                self._newest = step
                self._queued.add(step)
                return True, []
            answers: list[Message] = [] if step in self._queued else [("taken",)]
            if step <= self._newest_done:
                self._here.discard(step)
                answers.append(_report(self._done.get(step, StepDone(step, 0.0))))
            return False, answers

    def taken(self, step: int) -> bool:
        """Whether the controller waits to hear it."""
        with self._lock:
            self._queued.discard(step)
            return step in self._here

    def done(self, done: StepDone) -> bool:
        """Whether the controller waits to hear it; else it is told when it delivers the step again."""
        with self._lock:
            self._newest_done = done.step
            self._done[done.step] = done
            if len(self._done) > _MAX_DONE:
                self._done.pop(next(iter(self._done)))
            told = done.step in self._here
            self._here.discard(done.step)
            return told

    def restart(self) -> None:
        """The present controller is a new one."""
        with self._lock:
            self._here.clear()


def _fetch(objects: Sequence[Any]) -> list[NDArray[np.uint8] | Exception]:
    """The arrays, as they lie in the store; or why one is gone."""
    try:
        return list(ray.get(list(objects)))
    except ray.exceptions.RayError:
        found: list[NDArray[np.uint8] | Exception] = []
        for one in objects:
            try:
                found.append(ray.get(one))
            except ray.exceptions.RayError as error:
                found.append(error)
        return found


# --- the producer ----------------------------------------------------------------------------------------------------


class StoreTicket(Ticket):
    """A put that goes through the object store."""

    def __init__(self, rollouts: Sequence[Rollout], mode: Mode, callback: Callable[[], object]) -> None:
        size = sum(rollout.nbytes for rollout in rollouts)
        super().__init__(rollouts, mode, callback, put_bytes=size, size=size)


class RayOutlet:
    """The producer's end. One thread writes to the object store; public methods may be called from any thread."""

    threads = True

    def __init__(self, actor: Any, *, label: str, node: str, linger_s: float = 5.0) -> None:
        self.linger_s = linger_s
        self._book: PutLedger[StoreTicket] = PutLedger(bundle_bytes=BUNDLE_BYTES, bundle_puts=BUNDLE_PUTS)
        self._changed = threading.Condition()
        self._work = False
        self._cancelled: list[int] = []
        self._leaving = self._reconnect = self._warned = False
        self._held: dict[int, Any] = {}
        self._next_key = 0
        self._direct = True
        self._when_released: list[Callable[[], object]] = []
        self._pool = SlabPool(2)
        self._actor, self._hello = actor, ("producer", label, node)
        self._restarts = False
        self._caller = self._connected()
        self._thread = threading.Thread(target=self._run, name="sb-ray-producer", daemon=True)
        self._thread.start()

    def _connected(self) -> Caller:
        caller = Caller(self._actor, on_message=self._on_message, on_lost=self._on_lost)
        caller.open(*self._hello)
        return caller

    @property
    def direct(self) -> bool:
        """Whether tokens may stay in this node's object store, owned by this process."""
        return self._direct

    def ticket(self, rollouts: Sequence[Rollout], mode: Mode, callback: Callable[[], object]) -> StoreTicket:
        """See :class:`~stream_balancer.connect.Outlet`."""
        return StoreTicket(rollouts, mode, callback)

    def offer(self, ticket: StoreTicket) -> None:
        """See :class:`~stream_balancer.connect.Outlet`."""
        self._book.offer(ticket)
        self._wake()

    def withdraw(self, ticket: StoreTicket) -> None:
        """See :class:`~stream_balancer.connect.Outlet`."""
        number = self._book.withdraw(ticket)
        if number is not None:
            with self._changed:
                self._cancelled.append(number)
            self._wake()

    def when_released(self, callback: Callable[[], object]) -> None:
        """See :class:`~stream_balancer.connect.Outlet`."""
        with self._changed:
            self._when_released.append(callback)
        self._tell_released()

    def close(self) -> None:
        """See :class:`~stream_balancer.connect.Outlet`."""
        numbers = self._book.close()
        with self._changed:
            self._cancelled += numbers
        self._wake()
        with self._changed:
            self._changed.wait_for(lambda: self._caller.ended.is_set() or not self._book.num_on_way, self.linger_s)
            self._leaving = True
            self._changed.notify_all()
        self._thread.join()
        self._caller.ended.wait(self.linger_s)
        self._book.end(lambda ticket: ticket.lost("the link was closed"))

    async def aclose(self) -> None:
        """See :class:`~stream_balancer.connect.Outlet`."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close, limiter=anyio.CapacityLimiter(1))

    def kill(self) -> None:
        """Be gone without a word, as a killed process."""
        self._caller.break_off()
        with self._changed:
            self._leaving = True
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._work = True
            self._changed.notify_all()

    # in the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work or self._leaving)
                self._work = False
                leaving = self._leaving
            if self._reconnect:
                self._reconnect = False
                self._held.clear()
                with self._changed:
                    self._cancelled = self._book.again()
                self._caller = self._connected()
            while tickets := self._book.take():
                self._send(tickets)
            with self._changed:
                cancelled = [number for number in self._cancelled if number < self._book.num_sent]
                self._cancelled = [number for number in self._cancelled if number not in cancelled]
            if cancelled:
                self._caller.send(*[("cancel", number) for number in cancelled])
            if leaving:
                self._caller.send(("bye",))
                return

    def _send(self, tickets: list[StoreTicket]) -> None:
        while tickets:
            rollouts = [rollout for ticket in tickets for rollout in ticket.rollouts]
            try:
                bundles = [self._bundle(list(alike)) for _, alike in groupby(rollouts, _columns)]
            except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
                self._wait_for_room(error)
                tickets = self._still_wanted(tickets)
            else:
                break
        else:
            return
        self._caller.send(("puts", [(t.number, int(t.mode), len(t.rollouts)) for t in tickets], bundles))

    def _wait_for_room(self, error: Exception) -> None:
        """Acknowledgements make room in the store, here or elsewhere on this node."""
        if not self._warned:
            self._warned = True
            logger.warning("puts wait, because the object store of this node is full: %s", cause_of(error))
        with self._changed:
            self._changed.wait(_RETRY_S)

    def _still_wanted(self, tickets: list[StoreTicket]) -> list[StoreTicket]:
        """Without those that were withdrawn, or whose link is over, before they were sent."""
        for ticket in tickets:
            if ticket.number is not None and (ticket.withdrawn or ticket.number in self._cancelled):
                with suppress(WireError):
                    self._book.settle(ticket.number, Withdrawn())
        return [ticket for ticket in tickets if not ticket.done]

    def _bundle(self, rollouts: list[Rollout]) -> tuple[bytes, int, bytes | list[Any]]:
        described, slab = write_bundle(rollouts, self._pool.lend)
        key, self._next_key = self._next_key, self._next_key + 1
        if slab.numel() <= INLINE_BYTES:
            return described, key, slab.numpy().tobytes()
        ref = self._held[key] = ray.put(slab.numpy())
        return described, key, [ref]

    # in Ray's thread

    def _on_message(self, message: Message) -> None:
        match message:
            case ("verdict", int(number), refusal):
                with suppress(WireError):
                    self._book.settle(number, None if refusal is None else error_of(*refusal))
            case ("drop", list(keys)):
                for key in keys:
                    self._held.pop(key, None)
                self._tell_released()
            case ("limits", int(staged_bytes), int(max_put_bytes), bool(direct), bool(restarts)):
                self._direct, self._restarts = direct, restarts
                self._book.open(Limits(staged_bytes, max_put_bytes))
            case ("end",):
                self._book.end(lambda _: ClosedResourceError(ENDED))
            case ("lost", str(cause)):
                self._on_lost(cause, True)
        self._wake()

    def _on_lost(self, cause: str, for_good: bool) -> None:
        if self._restarts and not for_good and not self._leaving:
            logger.warning("puts wait for the controller to be started again: %s", cause)
            self._reconnect = True
            self._wake()
            return
        self._book.end(lambda ticket: ticket.lost(cause))
        self._held.clear()
        self._tell_released()
        self._wake()

    def _tell_released(self) -> None:
        if not self._held:
            with self._changed:
                callbacks, self._when_released = self._when_released, []
            for callback in callbacks:
                callback()


def _columns(rollout: Rollout) -> tuple[Any, ...]:
    return tuple((name, column.dtype, column.shape[1:]) for name, column in rollout.tokens.items())

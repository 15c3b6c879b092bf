"""In a worker: the producer's end, for ``Producer``. Its thread writes to the object store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

import anyio
import anyio.lowlevel
import ray

from stream_balancer.errors import ClosedResourceError, WireError
from stream_balancer.transport.buffers import SlabPool
from stream_balancer.transport.put_ledger import ENDED, Limits, Mode, PendingPut, PutCancelled, PutLedger, error_of
from stream_balancer.transport.ray.channel import Caller, Message, cause_of
from stream_balancer.transport.ray.object_store import write_bundle
from stream_balancer.types import Rollout

__all__ = ["INLINE_BYTES", "RayOutlet"]

INLINE_BYTES = 64 * 1024  # below that an object costs more than its bytes; Ray's own limit for arguments is 100 KiB
BUNDLE_BYTES = 2 * 2**20  # what is larger travels alone: the next one is written while this one is taken in
BUNDLE_PUTS = 1024
_RETRY_S = 0.1  # between attempts to write into a full store

logger = logging.getLogger("stream_balancer.transport")


class StorePut(PendingPut):
    """A put that goes through the object store."""

    def __init__(self, rollouts: Sequence[Rollout], mode: Mode, callback: Callable[[], object]) -> None:
        size = sum(rollout.nbytes for rollout in rollouts)
        super().__init__(rollouts, mode, callback, put_bytes=size, size=size)


class RayOutlet:
    """The producer's end. One thread writes to the object store; public methods may be called from any thread."""

    threads = True

    def __init__(self, actor: Any, *, label: str, node: str, linger_s: float = 5.0) -> None:
        self.linger_s = linger_s
        self._book: PutLedger[StorePut] = PutLedger(bundle_bytes=BUNDLE_BYTES, bundle_puts=BUNDLE_PUTS)
        self._changed = threading.Condition()
        self._work = False
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

    def pending(self, rollouts: Sequence[Rollout], mode: Mode, callback: Callable[[], object]) -> StorePut:
        """See :class:`~stream_balancer.transport.producer_port.ProducerPort`."""
        return StorePut(rollouts, mode, callback)

    def put(self, ticket: StorePut) -> None:
        """See :class:`~stream_balancer.transport.producer_port.ProducerPort`."""
        self._book.add(ticket)
        self._wake()

    def cancel(self, ticket: StorePut) -> None:
        """See :class:`~stream_balancer.transport.producer_port.ProducerPort`."""
        self._book.cancel(ticket)
        self._wake()

    def when_released(self, callback: Callable[[], object]) -> None:
        """See :class:`~stream_balancer.transport.producer_port.ProducerPort`."""
        with self._changed:
            self._when_released.append(callback)
        self._tell_released()

    def close(self) -> None:
        """See :class:`~stream_balancer.transport.producer_port.ProducerPort`."""
        self._book.close()
        self._wake()
        with self._changed:
            self._changed.wait_for(lambda: self._caller.ended.is_set() or not self._book.num_sent, self.linger_s)
            self._leaving = True
            self._changed.notify_all()
        self._thread.join()
        self._caller.ended.wait(self.linger_s)
        self._book.end(lambda ticket: ticket.lost("the link was closed"))

    async def aclose(self) -> None:
        """See :class:`~stream_balancer.transport.producer_port.ProducerPort`."""
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
                self._book.resend()
                self._caller = self._connected()
            while True:
                tickets, cancelled = self._book.take()
                if tickets:
                    self._send(tickets)
                if cancelled:
                    self._caller.send(*[("cancel", number) for number in cancelled])
                if not tickets:
                    break
            if leaving:
                self._caller.send(("bye",))
                return

    def _send(self, tickets: list[StorePut]) -> None:
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

    def _still_wanted(self, tickets: list[StorePut]) -> list[StorePut]:
        """Without those that were withdrawn, or whose link is over, before they were sent."""
        for ticket in tickets:
            if ticket.number is not None and (ticket.cancelled or self._book.closed):
                with suppress(WireError):
                    self._book.resolve(ticket.number, PutCancelled())
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
                    self._book.resolve(number, None if refusal is None else error_of(*refusal))
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

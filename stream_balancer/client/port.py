"""A process's line to its controller: messages go into :class:`Held`, its facts go out as reports. One lock.

::

    I/O thread    Work -> decode -> (fetch what lies elsewhere) -> Held     trainer   Held -> step, micro-batch
                  Seal, Go, Rewind, Drop ------------------------> Held               done, finish, ack -> Held.out
                  connected: Held.has() was said in Join                   both       Held.out -> Report

Facts wait in ``Held.out`` while there is no connection; :meth:`Held.has` says at the next join what they would have.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import Any, TypeVar

from msgspec.structs import replace

from stream_balancer.client.device import Uploader
from stream_balancer.client.held import Held
from stream_balancer.client.payloads import Fetcher
from stream_balancer.errors import (
    AlreadyInUseError,
    BrokenResourceError,
    ClosedResourceError,
    RankLostError,
    RefusedError,
    WireError,
    to_raise,
)
from stream_balancer.net import messages as m
from stream_balancer.net.errors import ConnectionEnd
from stream_balancer.net.line import Dialer
from stream_balancer.net.loops import Signal, blocking_deadline
from stream_balancer.net.session import Session
from stream_balancer.rollouts import MicroBatch
from stream_balancer.wire.codec import Decoded, decode
from stream_balancer.wire.payload import Memory

_T = TypeVar("_T")


class Arrived:
    """The micro-batches of one Work."""

    def __init__(self, decoded: Decoded, uploader: Uploader | None) -> None:
        self.decoded, self._uploader = decoded, uploader
        self._hand_over: Callable[[], None] = lambda: None

    def land(self) -> None:
        """All bytes are here: begin to copy them to the device."""
        if self._uploader is not None:
            there, self._hand_over = self._uploader.copy(self.decoded.buffer)
            self.decoded.move(there)

    def micro_batch(self, index: int, gone: Collection[str], seal: m.Seal | None) -> MicroBatch:
        """For the trainer, without what is ``gone``."""
        self._hand_over()
        # again for each micro-batch: rollouts may have gone since the step arrived
        self.decoded.mask(gone)
        if seal is not None:
            left = {(one.group_id, one.execution_id): (one.samples, one.loss_tokens) for one in seal.resized}
            self.decoded.resize(left)
        return self.decoded.micro_batch(index)


class Port:
    """Safe from any thread; the lock is held around every use of :attr:`held`."""

    def __init__(
        self, dialer: Dialer, who: m.About, fetcher: Fetcher, *, next_step: int | None = None,
        uploader: Uploader | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """``next_step``: what the weights contain. ``options``: of the Session."""
        self.who = who
        self.name = f"rank {who.rank}"
        # reentrant: a look may give up, which takes it again
        self.lock = threading.RLock()
        self.held = Held(seats=who.seats, weights=next_step)
        self.closed = False
        self.over: Exception | None = None
        """Why nothing comes any more."""
        self.by_item = False
        """The loop ends its steps with finish(): it is given them before they are complete."""
        self.waiting_since: float | None = None
        self.waited_s = 0.0
        self._news = Signal()
        self._user: object = None
        """The thread or task that waits."""
        self._uploader, self._fetcher = uploader, fetcher
        # one object: where it is the last that the I/O thread has to do, it is not handed in again
        self._job = self._flush
        # the I/O thread may be quicker than this line
        with self.lock:
            self.session = Session(
                dialer, "rank", about=self._about, on_open=self._flush, admit=self._admit,
                on_message=self._on_message, on_end=self._on_end, takes_leave=True, **options,
            )  # fmt: skip
            self.session.begin()

    # from any thread

    async def wait_for(self, look: Callable[[], _T | None]) -> _T:
        """The value that ``look`` finds, under the lock, as soon as it finds something. What has come is found before a
        lost controller is told."""
        # A thread may be interrupted before it has left: it may come again.
        me: object = threading.get_ident() if hasattr(blocking_deadline, "at") else object()
        with self.lock:
            if self._user is not None and self._user != me:
                raise AlreadyInUseError(
                    "two threads or tasks iterate one RankFeed. Each step goes to one of them: let one iterate"
                )
            # one at a time: a second iterator would take every other step
            self._user = me
        began = self.waiting_since = time.monotonic()
        try:
            while True:
                with self.lock:
                    # in place before it looks: what comes between that and the wait sets it
                    news = self._news = Signal()
                    if self.closed:
                        raise ClosedResourceError("the feed was closed")
                    found = look()
                self.flush()
                if found is not None:
                    return found
                if self.over is not None:
                    raise to_raise(self.over)
                await news.wait()
        finally:
            self.waited_s += time.monotonic() - began
            self.waiting_since = self._user = None

    def flush(self) -> None:
        """Report what Held has said, behind calls that were made before. Not with the lock, which the I/O thread would
        wait for as soon as it is woken."""
        if self.held.out:
            self.session.io.do(self._job)

    def give_up(self, step: int, text: str) -> RankLostError:
        """Leave, so that others do not wait: this rank cannot go on. Returns what is to be raised."""
        error = RankLostError(text, rank=self.who.rank, step=step, cause="others go on without it")
        with self.lock:
            # the first reason counts: what follows is only its consequence
            self.over = self.over or error
        self.session.close()
        return error

    def close(self) -> None:
        """Leave: nothing is given any more. Never blocks."""
        with self.lock:
            self.closed = True
        self._fetcher.close()
        self.session.close()
        # who waits must look again, and finds that it is closed
        self._news.set()

    # in the I/O thread

    def _about(self) -> m.About:
        with self.lock:
            # under the lock, as one picture: what comes in between would be said twice or not at all
            held, goes_on = self.held, self.session.line.problem is None
            return replace(self.who, next_step=held.weights, has=held.has(), goes_on=goes_on)

    def _flush(self, _: object = None) -> None:
        with self.lock:
            # without a connection they wait, and has() says at the next join what they would have
            if self.session.line.connection is not None:
                out, self.held.out = self.held.out, []
                for report in out:
                    self.session.send(report)

    def _admit(self, message: m.Message, total: int) -> None:
        # only steps bring bytes to a rank
        if not isinstance(message, m.Work):
            raise WireError(f"{total} bytes behind a {type(message).__name__} message")
        if total > self.who.max_batch_bytes:
            raise WireError(
                f"{self.name}: step {message.step} announces {total} bytes, more than max_batch_bytes "
                f"({self.who.max_batch_bytes}). Raise max_batch_bytes of RankFeed, or lower batch_size"
            )

    def _on_message(self, message: m.Message, memory: Memory | None) -> None:
        with self.lock:
            # the seal of a step that is over here changes nothing, so nobody is woken for it
            is_news = not isinstance(message, m.Seal) or message.step in self.held.parts
            if isinstance(message, m.Work):
                self._take_work(message, memory)
            else:
                self.held.take(message)
        self.flush()
        if is_news:
            self._news.set()

    def _take_work(self, work: m.Work, memory: Memory | None) -> None:
        if not work.items:
            self.held.take(work)
            return
        arrived = Arrived(decode(work.header, memory), self._uploader)
        if len(arrived.decoded.num_rollouts) != len(work.items):
            raise WireError(f"step {work.step}: its {len(work.items)} items are not those that came")
        arrived.decoded.mask(work.gone)
        self.held.take(work, [(arrived, place) for place in range(len(work.items))])
        if any(one.remote for one in work.items):
            self._fetcher.fetch(arrived.decoded, lambda causes: self._on_fetched(work, arrived, causes))
        else:
            arrived.land()

    def _on_fetched(self, work: m.Work, arrived: Arrived, causes: Mapping[str, str]) -> None:
        """Payloads of the items are here, but for those that are missing; why, by id."""
        with self.lock:
            # first: once it lands, its memory may be on another device
            arrived.decoded.mask(causes)
            arrived.land()
            ids = iter(arrived.decoded.ids)
            for item, number in zip(work.items, arrived.decoded.num_rollouts, strict=True):
                its = {one: causes[one] for one in islice(ids, number) if one in causes}
                if item.remote:
                    self.held.fetched(work.step, work.uid, item.id, its)
        self.flush()
        self._news.set()

    def _on_end(self, error: Exception) -> None:
        with self.lock:
            self.over = self.over or self._explained(error)
        # no report would be heard any more, so nothing more is fetched
        self._fetcher.close()
        self._news.set()

    def _explained(self, error: Exception) -> Exception:
        if not isinstance(error, BrokenResourceError) or isinstance(error, RefusedError | WireError):
            return error
        # there has never been a connection, or none can be any more
        if not isinstance(error, ConnectionEnd):
            return RankLostError(str(error), rank=self.who.rank, cause=str(error))
        cause = error.text or "it closed"
        if error.kind == "closed":
            text = f"the controller has closed the link to {self.name}: {cause}"
        else:
            text = (
                f"{self.name} lost its controller: {cause}. What was not acknowledged is held by the balancer, if it "
                "lives. Start the controller again and open a new RankFeed"
            )
        step = next((number for number, one in self.held.parts.items() if one.taken), None)
        lost = RankLostError(text, rank=self.who.rank, step=step, cause=cause)
        lost.__cause__ = error
        return lost

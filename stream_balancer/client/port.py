"""A process's line to its controller: messages go into :class:`Held`, its reports go out. One lock.

::

    I/O thread    Work -> decode -> fetch kept payloads -------> Held      trainer   Held -> step
                  Commit, Drop, Behind -----------------------> Held                 finish, failed, ack -> Held.out
                  Join carries Held.join()                               both        Held.out -> Report

Reports wait in ``Held.out`` while there is no connection; the next join carries the whole state instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from stream_balancer.client.device import Uploader
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
from stream_balancer.steps import state as steps
from stream_balancer.steps.held import Acked, Finished, Forgot, Held, Loaded, Missing, Report, Reported
from stream_balancer.wire.codec import Decoded, decode
from stream_balancer.wire.payload import Memory, reader

_T = TypeVar("_T")
_read = reader(m.Admitted, "what the controller answers to a rank")


class Arrived:
    """A rank's part of one attempt, with its bytes."""

    def __init__(self, work: m.Work, decoded: Decoded, uploader: Uploader | None) -> None:
        self.work, self.decoded, self._uploader = work, decoded, uploader
        self._hand_over: Callable[[], None] = lambda: None

    def land(self) -> None:
        """Begin to copy the complete bytes to the device."""
        if self._uploader is not None:
            there, self._hand_over = self._uploader.copy(self.decoded.buffer)
            self.decoded.move(there)

    def micro_batches(self, masked: frozenset[str]) -> tuple[MicroBatch, ...]:
        """Micro-batches for the trainer. ``masked``: rollouts without a payload become padding copies."""
        self._hand_over()
        self.decoded.mask(masked)
        return self.decoded.micro_batches


class Port:
    """Connection of one process. Safe from any thread; the lock is held around every use of :attr:`held`."""

    def __init__(
        self, dialer: Dialer, who: m.About, fetcher: Fetcher, *, weights: steps.Weights,
        uploader: Uploader | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """``weights``: content of the trainer's weights. ``options``: of the Session."""
        self.who = who
        self.name = f"rank {who.rank}"
        # reentrant: `look` may raise through a method that takes the lock again
        self.lock = threading.RLock()
        self.held = Held(weights)
        self.closed = False
        self.over: Exception | None = None
        """Error that ended the connection."""
        self.times: dict[int, Any] = {}
        """Times of finished steps that were not reported."""
        self.why_behind = ""
        """Text of the controller, while the weights lack a step of another rank."""
        self.waiting_since: float | None = None
        self.waited_s = 0.0
        self._news = Signal()
        self._user: object = None
        """The thread or task that waits."""
        self._causes: dict[str, str] = {}
        """Cause of each failed fetch, by rollout id."""
        self._uploader, self._fetcher = uploader, fetcher
        # one object, so that the I/O thread can tell that this job is queued last already
        self._job = self._flush
        # the I/O thread may call back before the assignment
        with self.lock:
            self.session = Session(
                dialer, "rank", about=self._about, on_open=self._on_open, admit=self._admit,
                on_message=self._on_message, on_end=self._on_end, takes_leave=True, **options,
            )  # fmt: skip
            self.session.begin()

    # from any thread

    async def wait_for(self, look: Callable[[], _T | None]) -> _T:
        """The first value that ``look`` returns, called under the lock. Arrived steps come before the error of a lost
        controller."""
        # an interrupted thread may have left its mark: it may come again
        me: object = threading.get_ident() if hasattr(blocking_deadline, "at") else object()
        with self.lock:
            if self._user is not None and self._user != me:
                raise AlreadyInUseError(
                    "two threads or tasks iterate one RankFeed. Each step goes to one of them: let one iterate"
                )
            # refuse a second iterator, which would take every other step
            self._user = me
        began = self.waiting_since = time.monotonic()
        try:
            while True:
                with self.lock:
                    # set before the look: news between look and wait sets this signal
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
        """Send the reports in ``Held.out``, behind earlier calls. Do not hold the lock: the I/O thread needs it."""
        if self.held.out:
            self.session.io.do(self._job)

    def close(self) -> None:
        """Leave: the iteration ends with ClosedResourceError. Never blocks."""
        with self.lock:
            self.closed = True
        self._fetcher.close()
        self.session.close()
        # a waiting thread looks again, and finds the port closed
        self._news.set()

    # in the I/O thread

    def _about(self) -> m.About:
        with self.lock:
            # one lock for the whole claim: no fact is reported twice or lost
            claim = self.held.join(self.held.link + 1)
            return replace(self.who, **claim._asdict())

    def _on_open(self, welcome: m.Welcome) -> None:
        answer = _read(welcome.about)
        with self.lock:
            if not self.held.obeys(answer.term):
                raise WireError(f"{self.name} has obeyed a newer controller. End the old one")
            self.held.barrier = answer.has_barrier
            # a given-up process that joins again gets a new incarnation
            self.who = replace(self.who, incarnation=answer.incarnation)
        self._flush()
        # the feed acknowledges loaded steps once there is a controller
        self._news.set()

    def _flush(self) -> None:
        with self.lock:
            # without a connection reports wait: the next join replaces them
            if self.session.line.connection is not None:
                out, self.held.out = self.held.out, []
                for report in out:
                    self.session.send(self._report(report))

    def _report(self, report: Report) -> m.Report:
        match report:
            case Reported(step, attempt, phase):
                return m.Report(phase.name.lower(), step, attempt)
            case Finished(step, attempt):
                return m.Report("finished", step, attempt, _raw(self.times.pop(step, None)))
            case Missing(step, attempt, ids):
                return m.Report("missing", step, attempt, _raw({one: self._causes.pop(one, "") for one in ids}))
            case Acked(through):
                return m.Report("acked", through)
            case Loaded(weights):
                return m.Report("loaded", *weights)
            case Forgot():
                return m.Report("forgot")

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
        me = steps.Process(self.who.rank, self.who.seat)
        with self.lock:
            held, link = self.held, self.held.link
            match message:
                case m.Work():
                    self._take_work(message, memory, me)
                case m.Commit(step=step, attempt=attempt, masked=masked):
                    held.take(link, steps.Commit(me, step, attempt, frozenset(masked)))
                case m.Drop(step=step, attempt=attempt, lacking=lacking, text=text):
                    held.take(link, steps.Drop(me, step, attempt, lacking))
                    self.why_behind = text or self.why_behind
                case m.Behind(step=step, text=text):
                    held.take(link, steps.Behind(me, step))
                    self.why_behind = text
                case m.Notify(end=is_end):
                    if is_end:
                        held.take(link, steps.End(me))
                case _:
                    raise WireError(f"a {type(message).__name__} message for a rank")
        self.flush()
        self._news.set()

    def _take_work(self, work: m.Work, memory: Memory | None, me: steps.Process) -> None:
        arrived = Arrived(work, decode(work.header, memory), self._uploader)
        counts = [one.micro_batches for one in work.mini_batches]
        if counts and (not all(counts) or sum(counts) != len(arrived.decoded.num_rollouts)):
            raise WireError(f"the mini-batches of step {work.step} do not make up its micro-batches")
        held, number = self.held, work.step
        order = steps.Work(me, number, work.attempt, arrived, frozenset(), work.ranks, work.needs_commit)
        held.take(held.link, order)
        # a repeated Work changes nothing
        if number in held.steps and held.steps[number].part is arrived:
            self._fetcher.fetch(arrived.decoded, lambda causes: self._on_fetched(arrived, causes))

    def _on_fetched(self, arrived: Arrived, causes: Mapping[str, str]) -> None:
        """Payloads have arrived, except the missing ones. ``causes``: errors of the missing ones, by rollout id."""
        with self.lock:
            # mask before the copy: afterwards the memory may be on another device
            arrived.decoded.mask(causes)
            arrived.land()
            self._causes.update(causes)
            held = self.held.steps.get(arrived.work.step)
            if held is not None and held.part is arrived:
                self.held.fetched(held.number, held.attempt, causes)
        self.flush()
        self._news.set()

    def _on_end(self, error: Exception) -> None:
        with self.lock:
            self.over = self.over or self._explained(error)
        # reports can no longer be sent, so stop fetching
        self._fetcher.close()
        self._news.set()

    def _explained(self, error: Exception) -> Exception:
        if not isinstance(error, BrokenResourceError) or isinstance(error, RefusedError | WireError):
            return error
        # there was never a connection, or none is possible any more
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
        step = min(self.held.steps, default=None)
        lost = RankLostError(text, rank=self.who.rank, step=step, cause=cause)
        lost.__cause__ = error
        return lost


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))

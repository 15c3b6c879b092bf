"""The two ends over any :class:`~._endpoint.Pair`: the controller's link and the rank's port."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

import anyio
import torch
from torch import Tensor

from stream_balancer.errors import (
    AlreadyInUseError,
    ClosedResourceError,
    EndOfStream,
    ProducerLostError,
    RankLostError,
    WireError,
    WouldBlock,
    to_raise,
)
from stream_balancer.transport import Report
from stream_balancer.transport.buffers import SlabPool
from stream_balancer.transport.gloo.endpoint import Endpoint, Pair, Pending
from stream_balancer.transport.gloo.shared_memory import SharedSlabs, SharedViews, available
from stream_balancer.transport.sockets.payloads import Fetcher
from stream_balancer.types import RankBatch
from stream_balancer.wire.messages import Denominators, MissingRollout, PayloadsFetched, StepHeld, StepReport
from stream_balancer.wire.partial_share import encode_skeleton, is_remote
from stream_balancer.wire.share import FRAME_WORDS, Frame, Kind, check_batch_frame, checksum, encode, read_frame

__all__ = ["CHUNK_BYTES", "ControllerLink", "Decode", "PortBase", "chunks"]

Decode = Callable[[Frame, Tensor], RankBatch]
"""A BATCH frame and the slab behind it -> the batch."""

CHUNK_BYTES = 16 * 2**20
"""A slab travels in messages of this size: packing one overlaps with sending the one before."""

logger = logging.getLogger("stream_balancer.transport")


def chunks(slab: Tensor, size: int, wire_bytes: int) -> list[Tensor]:
    """Cut the first ``wire_bytes`` of a slab into messages of ``size`` bytes, the last one shorter. Views."""
    return [slab[at : min(at + size, wire_bytes)] for at in range(0, wire_bytes, size)]


class ControllerLink(Endpoint):
    """The controller's end. Methods without an underscore belong to the event loop it was made in."""

    def __init__(
        self,
        *,
        rank: int,
        incarnation: int,
        depth: int,
        max_bytes: int,
        connect: Callable[[], Pair],
        cancel_connect: Callable[[], None],
        settled: Callable[[ControllerLink], None],
        in_loop: Callable[[Callable[[], object]], None],
        pool: SlabPool,
        narrow: bool,
        shared_memory: bool,
        keepalive_s: float,
        linger_s: float,
    ) -> None:
        super().__init__(f"sb-rank{rank}.{incarnation}", keepalive_s, linger_s)
        self.rank = rank
        self.incarnation = incarnation
        self._who = f"rank {rank}"
        self.stalled_s = 0.0
        """Seconds without a sign of life, once that is more than three keep-alives; 0.0 while all is well."""
        self._make_pair = connect
        self._unmake_pair = cancel_connect
        self._settled = settled  # called once in the loop: the pair is up (ready), or could not be made
        self._max_bytes = max_bytes
        self._in_loop = in_loop
        self._pool = pool
        self._narrow = narrow
        self._shared = _shared_slabs(depth + 1) if shared_memory else None
        self._sharing = None if self._shared else False  # None: the rank has not answered yet
        self._credits = depth
        self._taken = 0
        self._reports: deque[Report] = deque()
        self._error: Exception | None = None
        self._ended = False
        self._last_step: int | None = None
        self._callbacks: list[Callable[[], None]] = []
        self.ready = False
        """True once the pair is up."""

    # Link

    @property
    def credits(self) -> int:
        """Shares the rank has room for now; 0 on a lost link and until the pair is connected."""
        return 0 if self._error is not None or self._ended or not self.ready else self._credits

    @property
    def live(self) -> bool:
        """False once lost or closed."""
        return self._error is None

    def subscribe(self, callback: Callable[[], None]) -> None:
        """See :class:`Link`."""
        self._callbacks.append(callback)

    def denominators(self, message: Denominators) -> None:
        """Not yet: a step whose payloads are gone is not trained on."""

    def send(self, share: RankBatch, *, confirm: bool = False) -> None:
        """See :class:`Link`."""
        if self._error is not None:
            raise to_raise(self._error)
        if self._ended:
            raise ClosedResourceError
        if self.credits == 0:
            raise WouldBlock
        self._credits -= 1
        self._last_step = share.step
        self._put(share)

    def report(self) -> Report | None:
        """See :class:`Link`."""
        if self._reports:
            return self._reports.popleft()
        if self._error is not None:
            raise to_raise(self._error)
        return None

    def end(self) -> None:
        """See :class:`Link`."""
        if not self._ended:
            self._ended = True
            self._put(Frame(Kind.END))

    def supersede(self, incarnation: int) -> None:
        """A newer incarnation of the rank has come: this link is over."""
        self._fail(self._rank_lost(f"superseded by incarnation {incarnation}"))

    async def aclose(self) -> None:
        """See :class:`Link`."""
        if self._error is None:
            self._error = ClosedResourceError()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._shut, limiter=anyio.CapacityLimiter(1))

    @property
    def shares_memory(self) -> bool:
        """True if batches go through shared memory: the rank runs on this machine and may map it."""
        return bool(self._sharing)

    # in the loop

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            if not self.ready:
                self._settled(self)
            self._changed_in_loop()

    def _changed_in_loop(self) -> None:
        for callback in self._callbacks:
            callback()

    def _on_report(self, frame: Frame) -> None:
        self._credits += frame.taken - self._taken
        self._taken = frame.taken
        if frame.step >= 0:
            self._reports.append(_step_done(frame))
        self._changed_in_loop()

    def _on_lacks(self, frame: Frame) -> None:
        self._reports.append(PayloadsFetched(frame.step, (MissingRollout(frame.taken, "", "", "it is gone"),)))
        self._changed_in_loop()

    def _on_bye(self) -> None:
        if self._ended:
            self._fail(EndOfStream())
        else:
            self._fail(self._rank_lost("the rank closed its feed"))

    def _on_ready(self) -> None:
        if self._error is None:
            self.ready = True
            self._settled(self)
            self._changed_in_loop()

    def _rank_lost(self, cause: str) -> RankLostError:
        step = self._last_step
        doing = "nothing had been sent to it" if step is None else f"the last step sent to it was {step}"
        return RankLostError(
            f"rank {self.rank} (incarnation {self.incarnation}) was lost: {cause}; {doing}. What it has not "
            "acknowledged is still held. Restart the rank under a new incarnation, or give serve() a rejoin_timeout_s",
            rank=self.rank,
            step=step,
            cause=cause,
        )

    # in the threads

    def _connect(self) -> Pair:
        pair = self._make_pair()
        if self._shared is not None:
            self._put(self._shared.probe())
        self._in_loop(self._on_ready)
        return pair

    def _cancel_connect(self) -> None:
        self._unmake_pair()

    def _shut(self) -> None:
        super()._shut()
        if self._shared is not None:
            self._shared.close()

    def _handle(self, frame: Frame) -> bool:
        if frame.slab and self._shared is not None:
            self._shared.give_back(frame.slab)
        if frame.kind is Kind.REPORT:
            self._in_loop(lambda: self._on_report(frame))
        elif frame.kind is Kind.LACKS:
            self._in_loop(lambda: self._on_lacks(frame))
            self._put(Frame(Kind.ALIVE))  # the rank may raise now: we know why
        elif frame.kind is Kind.SHARE:
            with self._changed:
                self._sharing = frame.taken == 1
                self._changed.notify_all()
        elif frame.kind is Kind.BYE:
            self._in_loop(self._on_bye)
            self._put(Frame(Kind.FIN))
            self._await_hangup()
            return False
        elif frame.kind is not Kind.ALIVE:
            raise WireError(f"{self._who} sent a {frame.kind.name} frame, which only a controller may send")
        if self.stalled_s:
            logger.warning("%s answers again after %.1f s", self._who, self.stalled_s)
            self.stalled_s = 0.0
        return True

    def _await_hangup(self) -> None:
        """Keep the pair until the rank, having read FIN, hangs up; or until ``linger_s``."""
        pair = self._pair
        if pair is None:
            return
        timer = threading.Timer(self._linger_s, self._break)
        timer.daemon = True
        timer.start()
        try:
            pair.receive(torch.zeros(FRAME_WORDS, dtype=torch.int64)).wait()
        except RuntimeError:
            pass
        finally:
            timer.cancel()

    def _write(self, item: object) -> None:
        if isinstance(item, Frame):
            self._send_frame(item)
        elif isinstance(item, RankBatch):
            self._send_share(item)
        elif callable(item):
            item()

    def _send_share(self, share: RankBatch) -> None:
        if is_remote(share):
            skeleton = encode_skeleton(share, max_bytes=self._max_bytes)
            slab = self._pool.lend(skeleton.frame.wire_bytes)
            self._send_slab(skeleton.frame, slab, skeleton.fill(slab))
            return
        with self._changed:
            self._changed.wait_for(lambda: self._sharing is not None or self._over or self._closing)
        if self._sharing and self._shared is not None:
            try:
                self._send_shared(share, self._shared)
            except OSError as error:
                logger.warning("%s: no shared memory for step %d, sent by socket: %s", self._who, share.step, error)
            else:
                return
        encoded = encode(share, max_bytes=self._max_bytes, narrow=self._narrow)
        slab = self._pool.lend(encoded.frame.wire_bytes)
        self._send_slab(encoded.frame, slab, encoded.fill(slab))

    def _send_shared(self, share: RankBatch, slabs: SharedSlabs) -> None:
        """Raises OSError, having sent nothing, if there is no memory or no descriptor left for it."""
        encoded = encode(share, max_bytes=self._max_bytes, narrow=False)  # fewer bytes would save nothing here
        lent = slabs.lend(encoded.frame.total_bytes)
        for frame in lent.news:
            self._send_frame(frame)
        deque(encoded.fill(lent.memory), maxlen=0)
        self._send_frame(encoded.frame._replace(slab=lent.number), lent.keep)

    def _send_slab(self, frame: Frame, slab: Tensor, fill: Iterable[int]) -> None:
        """Send each chunk as soon as ``fill``, which writes the slab, says that its bytes are final."""
        pair = self._pair
        if pair is None:
            return
        pieces = chunks(slab, CHUNK_BYTES, frame.wire_bytes)
        self._send_frame(frame._replace(chunk_bytes=CHUNK_BYTES))
        works: list[object] = []
        for final in fill:
            while len(works) < len(pieces) and (final == frame.wire_bytes or (len(works) + 1) * CHUNK_BYTES <= final):
                works.append(pair.send(pieces[len(works)]))
        self._send_frame(Frame(Kind.TRAILER, step=frame.step), works, slab)

    def _lost(self, error: Exception) -> None:
        self._in_loop(lambda: self._fail(self._explain(error)))

    def _explain(self, error: Exception) -> Exception:
        if isinstance(error, WireError):
            lost = self._rank_lost(f"it broke the protocol: {error}")
        elif isinstance(error, RuntimeError):
            lost = self._rank_lost(short(error))
        else:
            return error  # a bad share: its own error says which rollout
        lost.__cause__ = error
        return lost

    def _check_silence(self, seconds: float) -> None:
        if seconds > 3 * self._keepalive_s:
            if not self.stalled_s:
                logger.warning(
                    "%s has given no sign of life for %.1f s: it is stopped, or the network stalls. Waiting",
                    self._who,
                    seconds,
                )
            self.stalled_s = seconds
            self._in_loop(self._changed_in_loop)


def _shared_slabs(keep: int) -> SharedSlabs | None:
    if available():
        with suppress(OSError):
            return SharedSlabs(keep)
    return None


def short(error: BaseException) -> str:
    """A transport's error in a few words."""
    text = str(error)
    for known in ("Connection closed by peer", "Connection reset by peer", "Application timeout caused pair closure"):
        if known in text:
            return known.lower()
    return text.split("\n", 1)[0][:200] or type(error).__name__


class PortBase(Endpoint):
    """The rank's end. Methods without an underscore may be called from any thread."""

    def __init__(
        self,
        *,
        rank: int,
        dp_size: int,
        incarnation: int,
        depth: int,
        max_batch_bytes: int,
        decode: Decode,
        pinned: bool,
        shared_memory: bool,
        keepalive_s: float,
        linger_s: float,
    ) -> None:
        super().__init__(f"sb-feed{rank}.{incarnation}", keepalive_s, linger_s)
        self.rank = rank
        self.dp_size = dp_size
        self._depth = depth
        self._max_bytes = max_batch_bytes
        self._decode = decode
        self._pool = SlabPool(keep=depth + 1, pinned=pinned)
        self._may_share = shared_memory
        self._views = SharedViews(self._on_freed)
        self._fetcher = Fetcher()
        self._doom: ProducerLostError | None = None  # raised once the controller has answered, so that it knows too
        self._freed: deque[int] = deque()
        self._queue: deque[RankBatch] = deque()
        self._end: Exception | None = None
        self._left = False
        self._last_step = -1
        self._taken = 0
        self._arrived = 0
        self._working_on: int | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._mutex = threading.Lock()

    # RankPort

    def subscribe(self, callback: Callable[[], None]) -> None:
        """See :class:`RankPort`."""
        self._callbacks.append(callback)

    def take(self) -> RankBatch | None:
        """See :class:`RankPort`."""
        with self._mutex:
            if self._queue:
                batch = self._queue.popleft()
                self._taken += 1
                taken = self._taken
            elif self._end is not None:
                raise to_raise(self._end)
            else:
                return None
        self._working_on = batch.step
        self._put(Frame(Kind.REPORT, taken=taken))
        return batch

    def report(self, done: StepReport | StepHeld) -> None:
        """See :class:`RankPort`."""
        self._working_on = None
        self._put(
            Frame(
                Kind.REPORT,
                step=done.step,
                rank=int(isinstance(done, StepHeld)),
                taken=self._taken,
                nanoseconds=_nanoseconds(done.seconds),
                wire_bytes=0 if done.compute_s is None else 1 + _nanoseconds(done.compute_s),
                total_bytes=_nanoseconds(done.waited_s),
            )
        )

    def leave(self) -> None:
        """See :class:`RankPort`."""
        if self._pair is not None and not self._over and not self._left:
            self._left = True
            self._put(Frame(Kind.BYE))

    def close(self) -> None:
        """See :class:`RankPort`."""
        self._fetcher.close()  # what it fetches would be thrown away
        if self._pair is not None and not self._over and not self._closing:
            self.leave()
            with self._changed:
                self._changed.wait_for(lambda: self._over, self._linger_s)
        self._finish(ClosedResourceError())
        self._shut()
        with self._mutex:
            self._queue.clear()

    async def aclose(self) -> None:
        """See :class:`RankPort`."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close, limiter=anyio.CapacityLimiter(1))

    # in the threads

    def _finish(self, error: Exception) -> None:
        with self._mutex:
            if self._end is None:
                self._end = error
        self._tell()

    def _tell(self) -> None:
        for callback in self._callbacks:
            callback()

    def _queue_up(self, item: object) -> None:
        """Have a frame sent, in one with what still waits where the two say no more than one can: every frame wakes the
        controller."""
        last = self._outbox[-1] if self._outbox else None
        if isinstance(item, Frame) and isinstance(last, Frame) and last.kind in (Kind.REPORT, Kind.ALIVE):
            if item.kind is Kind.ALIVE:
                return
            if item.kind is Kind.REPORT and (last.kind is Kind.ALIVE or item.step < 0):
                if last.kind is Kind.REPORT:
                    item = last._replace(taken=item.taken)
                self._outbox.pop()
        super()._queue_up(item)

    def _pop_item(self) -> object:
        item = super()._pop_item()
        if self._freed and (item is None or (isinstance(item, Frame) and item.kind in (Kind.REPORT, Kind.ALIVE))):
            item = (item if isinstance(item, Frame) else Frame(Kind.ALIVE))._replace(slab=self._freed.popleft())
        return item

    @property
    def _has_news(self) -> bool:
        return bool(self._outbox or self._freed)

    def _on_freed(self, number: int) -> None:
        """Runs wherever the last view of a slab dies, perhaps inside a garbage collection in the middle of _put(): so
        it does not wait for the lock. If somebody has it, the number goes with the next frame."""
        self._freed.append(number)
        if self._changed.acquire(blocking=False):
            self._changed.notify_all()
            self._changed.release()

    def _write(self, item: object) -> None:
        if isinstance(item, Frame):
            self._send_frame(item)

    def _handle(self, frame: Frame) -> bool:
        if self._doom is not None:
            self._finish(self._doom)
        if frame.kind in (Kind.BATCH, Kind.SKELETON):
            self._check(frame)
            slab = self._views.lend(frame.slab, frame.total_bytes) if frame.slab else self._receive(frame)
            self._last_step = frame.step
            self._arrived += 1
            if self._doom is not None:  # what comes after a step that cannot be completed is not for the trainer
                return True
            if frame.kind is Kind.SKELETON:
                try:
                    frame, slab = self._fetcher.complete(frame, slab, max_bytes=self._max_bytes, lend=self._pool.lend)
                except ProducerLostError as error:
                    self._doom = error
                    self._put(Frame(Kind.LACKS, step=error.step, taken=error.place))
                    return True
            batch = self._decode(frame, slab)
            with self._mutex:
                self._queue.append(batch)
            if not frame.slab:
                self._put(Frame(Kind.ALIVE))  # tells the controller that the slab has arrived
            self._tell()
        elif frame.kind is Kind.SHARE:
            self._put(Frame(Kind.SHARE, taken=int(self._may_share and self._views.probe(frame))))
        elif frame.kind is Kind.SLAB:
            self._views.announce(frame)
        elif frame.kind is Kind.END:
            self._finish(EndOfStream())
        elif frame.kind is Kind.FIN:
            return False
        elif frame.kind is not Kind.ALIVE:
            raise WireError(f"the controller sent a {frame.kind.name} frame, which only a rank may send")
        return True

    def _break(self) -> None:
        self._fetcher.close()
        super()._break()

    def _shut(self) -> None:
        super()._shut()
        self._fetcher.hang_up()

    def _shut_at_exit(self) -> None:
        if self._left or self._doom is not None or self._outbox or self._ledger:
            self.close()  # its last acknowledgements may not have arrived
        else:
            self._shut()

    def _check(self, frame: Frame) -> None:
        check_batch_frame(frame, after=self._last_step, rank=self.rank, dp_size=self.dp_size, max_bytes=self._max_bytes)
        if self._arrived - self._taken >= self._depth:
            raise WireError(f"rank {self.rank}: the controller sent step {frame.step} without a credit")

    def _receive(self, frame: Frame) -> Tensor:
        """The slab behind a BATCH frame."""
        pair = self._pair
        if pair is None:
            raise ClosedResourceError
        slab = self._pool.lend(frame.total_bytes)
        posted: list[Pending] = [pair.receive(piece) for piece in chunks(slab, frame.chunk_bytes, frame.wire_bytes)]
        words = torch.zeros(FRAME_WORDS, dtype=torch.int64)
        pair.receive(words).wait()  # behind the slab on the same tag: once it is here, so is the slab
        for piece in posted:
            piece.wait()
        trailer = read_frame(words)
        if trailer.kind is not Kind.TRAILER or trailer.step != frame.step:
            raise WireError(
                f"rank {self.rank}: step {frame.step} was followed by {trailer.kind.name}, not by its trailer"
            )
        if trailer.meta_crc and trailer.meta_crc != checksum(frame, slab):
            raise WireError(f"rank {self.rank}: the checksum of step {frame.step} is wrong: damaged on its way")
        self._note(words)  # only now: it tells the sender that all is well
        return slab

    def _lost(self, error: Exception) -> None:
        if self._doom is not None or isinstance(error, (AlreadyInUseError, ValueError, WireError, RankLostError)):
            self._finish(self._doom or error)
            return
        step = self._working_on
        cause = short(error)
        lost = RankLostError(self._explain_loss(cause), rank=self.rank, step=step, cause=cause)
        lost.__cause__ = error
        self._finish(lost)

    def _explain_loss(self, cause: str) -> str:
        return (
            f"rank {self.rank} lost its controller: {cause}. What was not acknowledged is held by the balancer, if it "
            "lives. Start the controller again and open a new RankFeed"
        )


def _nanoseconds(seconds: float) -> int:
    return max(int(seconds * 1e9), 0)


def _step_done(frame: Frame) -> Report:
    """What a REPORT frame says of its step."""
    if frame.rank == 1:
        return StepHeld(frame.step, frame.nanoseconds / 1e9)
    return StepReport(
        frame.step,
        frame.nanoseconds / 1e9,
        compute_s=(frame.wire_bytes - 1) / 1e9 if frame.wire_bytes else None,
        waited_s=frame.total_bytes / 1e9,
    )

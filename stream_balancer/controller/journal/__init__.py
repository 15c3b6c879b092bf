"""The journal: what was accepted survives the controller. A put returns once its rollout is on the disk.

::

    put --write--> queue  --> writer thread: all that wait, one write, one fsync --> puts return, together
    batches() --flush-->  |   acknowledgements and evictions are in the same write
                          `-> contents: what is still needed; segments in which nothing is go

Four modules: ``records`` (what happened, as bytes), ``segments`` (files, the lock, the disk), ``contents`` (what the
records add up to, used both to write and to recover), and this one: who waits for whom. The event loop never touches
the disk. docs/journal.md has the promise, the protocol and the measurements.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import anyio.lowlevel
import anyio.to_thread

from stream_balancer.controller.journal.contents import Contents, Held, Place
from stream_balancer.controller.journal.records import (
    Dispatched,
    Done,
    Evicted,
    Head,
    Put,
    Retracted,
    Returned,
    State,
    Versioned,
    pack,
    payload_of,
    plan_of,
    read,
    rollouts_of,
)
from stream_balancer.controller.journal.segments import Damage, DiskFullError, Segments, salt_of
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.errors import ClosedResourceError, ConfigError, JournalError, RolloutError
from stream_balancer.field_docs import documented
from stream_balancer.transport.event_loop import loop_caller
from stream_balancer.types import Batch, EvictReason, Rollout
from stream_balancer.wire.share import OtherProtocolError

__all__ = ["Journal", "Recovered", "Writing"]

SEGMENT_BYTES = 64 * 2**20  # small beside a disk, large beside a fsync
LEAST_MAX_BYTES = 2**20
COPY_BYTES = 8 * 2**20  # how much of an old segment is copied between two commits, so that puts wait for less
RETRY_S = 0.5  # how often to try again on a full disk, if nothing else happens

_log = logging.getLogger("stream_balancer.journal")


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a journal held when it was opened."""

    waiting: int
    """Rollouts that wait again."""
    in_flight: int
    """Rollouts whose batches will be delivered again, with the same plan."""
    steps: tuple[int, ...]
    """Steps of these batches."""
    past_ids: int
    """Rollouts remembered as done."""
    next_step: int
    """Number of the next new batch."""
    torn_bytes: int
    """Bytes of an append that a crash cut short: of puts that had not returned. They were taken off."""
    damage: tuple[str, ...]
    """What was set aside: where bytes were damaged that were not the end of the journal, and rollouts and plans that
    could not be read, a sentence each. Records there are lost; everything else is here."""
    seconds: float
    """How long it took."""

    @property
    def found(self) -> bool:
        """Whether it held anything, as after a crash or an earlier run."""
        return bool(self.waiting or self.steps or self.past_ids or self.next_step)


@dataclass(slots=True, eq=False)
class Writing:
    """A put on its way to the disk."""

    number: int
    rollouts: Sequence[Rollout]
    arrived_at: float
    step: int
    settled: anyio.Event | None
    """None: nobody waits, and it may not be refused."""
    error: Exception | None = None
    taken: bool = False
    withdrawn: bool = False

    @property
    def nbytes(self) -> int:
        return sum(r.nbytes + 1024 for r in self.rollouts)


@dataclass(slots=True, eq=False)
class _Flush:
    """Somebody waits until all that was enqueued before is on the disk."""

    settled: anyio.Event
    error: Exception | None = None


@dataclass(slots=True)
class _Commit:
    """Records that are written together."""

    salt: int
    pieces: list[memoryview | bytes] = field(default_factory=list)
    records: list[tuple[Head, int, int]] = field(default_factory=list)
    """Head, offset from the start of the commit, size."""
    size: int = 0

    def add(self, head: Head, payload: Sequence[memoryview | bytes] = ()) -> None:
        pieces = pack(self.salt, head, payload)
        size = sum(len(piece) for piece in pieces)
        self.pieces += pieces
        self.records.append((head, self.size, size))
        self.size += size


_Item: TypeAlias = Writing | _Flush | Head


class Journal:
    """A folder that holds what a balancer has accepted and not yet finished. One process at a time.

    ``max_bytes`` bounds the folder: puts wait while it is full of rollouts that are still needed. Without it the
    folder stays below twice what is needed plus a few segments of 64 MiB.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes < LEAST_MAX_BYTES:
            raise ConfigError(
                f"max_bytes of a journal must be >= {LEAST_MAX_BYTES}, not {max_bytes}: segments are always being "
                "filled and emptied. Raise max_bytes"
            )
        self.path = Path(path)
        self._max_bytes = max_bytes
        self._segment_bytes = SEGMENT_BYTES if max_bytes is None else min(SEGMENT_BYTES, max_bytes // 8)
        self._segments = Segments(self.path)
        self._contents = Contents(0)
        self._queued = threading.Condition()
        self._queue: deque[_Item] = deque()  # guarded by _queued
        self._refusing = self._closing = False  # guarded by _queued
        self._next_put = 0
        self._thread: threading.Thread | None = None
        self._in_loop: Callable[[Callable[[], object]], None] = _nothing
        self._on_blocked: Callable[[], object] = _nothing
        # the writer's own
        self._kept: list[_Item] = []  # could not be written yet: no room
        self._stateless = True  # the last segment has no record yet of the state at its start
        self._full = self._blocked = False
        self._broken: JournalError | None = None

    # -- opening and closing; these block ------------------------------------------------------------------------------

    def open(self, remember_ids: int) -> tuple[Snapshot, Recovered]:
        """Take the lock, and read what is held. Call :meth:`start` afterwards, in the event loop.

        Raises AlreadyInUseError if another process has it, JournalError if its disk is full. O(bytes).
        """
        began = time.monotonic()
        self._segments.open()
        self._refusing = self._closing = self._full = self._blocked = False
        self._stateless, self._broken, self._kept = True, None, []
        try:
            self._contents = contents = Contents(remember_ids)
            damage = self._fold()
            rollouts, bad = self._read_rollouts()
            snapshot, broken = contents.snapshot(rollouts, time.time())
            self._next_put = contents.next_put
            self._segments.begin()
            self._write([Returned(plan.step) for plan in broken])
            if self._full:
                raise DiskFullError(errno.ENOSPC, f"the journal {self.path} has no room to start. Make room first")
        except BaseException:
            self._segments.close()
            raise
        recovered = Recovered(
            waiting=len(snapshot.waiting),
            in_flight=sum(batch.num_rollouts for batch in snapshot.in_flight),
            steps=tuple(batch.step for batch in snapshot.in_flight),
            past_ids=len(snapshot.past_ids),
            next_step=snapshot.next_step,
            torn_bytes=sum(one.stop - one.start for one in damage if one.torn),
            damage=tuple(_describe(one) for one in damage if not one.torn)
            + tuple(bad)
            + tuple(f"step {plan.step}: its plan names rollouts that are lost" for plan in broken),
            seconds=time.monotonic() - began,
        )
        self._log_recovered(recovered)
        return snapshot, recovered

    def _fold(self) -> list[Damage]:
        damage = []
        for number in list(self._segments.sizes):
            for item in self._segments.scan(number):
                if isinstance(item, Damage):
                    damage.append(item)
                    continue
                at, found = item
                try:
                    self._contents.apply(found.head, Place(number, at, found.size))
                except Exception:  # noqa: BLE001 - one record never prevents the others from being read
                    _log.exception("journal %s: a record makes no sense; it is left out", self.path)
                    damage.append(Damage(number, at, at + found.size, torn=False))
        for bad in damage:
            if bad.torn:
                self._segments.cut(bad)
        return damage

    def _read_rollouts(self) -> tuple[dict[str, Rollout], list[str]]:
        """All that are still needed, and sentences about those that cannot be read."""
        rollouts: dict[str, Rollout] = {}
        bad: list[str] = []
        for number in self._segments.sizes:
            held_here = self._contents.held_in(number)
            data = memoryview(self._segments.mapped(number) if held_here else b"")
            for held in held_here:
                found = read(salt_of(number), data, held.place.at)
                assert found is not None
                read_here, bad_here = _read_put(held, found.payload)
                rollouts |= read_here
                bad += bad_here
                self._contents.lose(held.put.number, held.alive - read_here.keys())
        return rollouts, bad

    def _log_recovered(self, recovered: Recovered) -> None:
        for where in recovered.damage:
            _log.error("journal %s: damaged, records are lost: %s", self.path, where)
        if recovered.torn_bytes:
            _log.warning(
                "journal %s: the last %d bytes are no whole record. Taken off. A crash in the middle of a write looks "
                "so, and no put that had returned is in such an end; otherwise the disk has damaged it",
                self.path,
                recovered.torn_bytes,
            )
        if recovered.waiting or recovered.in_flight:
            _log.warning(
                "journal %s: recovered %d waiting rollouts and %d in flight (steps %s) in %.2f s",
                self.path,
                recovered.waiting,
                recovered.in_flight,
                list(recovered.steps),
                recovered.seconds,
            )

    def start(self, on_blocked: Callable[[], object]) -> None:
        """Begin to write, from the event loop's thread. ``on_blocked()`` is called in the loop when puts have to wait
        for ``max_bytes``."""
        self._in_loop, self._on_blocked = loop_caller(), on_blocked
        self._thread = threading.Thread(target=self._run, name=f"sb-journal-{self.path.name}", daemon=True)
        self._thread.start()

    async def aclose(self) -> None:
        """Write what is enqueued, and release the lock. Puts that are not being written yet get ClosedResourceError.
        Idempotent; also where :meth:`start` was not called."""
        if self._thread is not None and not self._closing:
            with self._queued:
                self._refusing = True
            with suppress(JournalError):
                await self.flush()
            await anyio.lowlevel.checkpoint()  # puts that were just written notice the end, and retract
        await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        with self._queued:
            self._closing = True
            self._queued.notify()
        if self._thread is not None:
            self._thread.join()
        self._segments.close()

    # -- enqueueing; in the event loop ---------------------------------------------------------------------------------

    def write(self, rollouts: Sequence[Rollout], step: int) -> Writing:
        """Rollouts that are about to be accepted take the last place in the queue; :meth:`written` must follow.

        Raises RolloutError if they could never fit into ``max_bytes``, ClosedResourceError once closed.
        """
        self._check_fits(rollouts)
        item = Writing(self._next_put, rollouts, time.time(), step, anyio.Event())
        self._next_put += 1
        self._enqueue(item)
        return item

    async def written(self, item: Writing) -> None:
        """Return once they are on the disk. If cancelled, or on an error, they are not in the journal.

        Raises JournalError if the disk is full or failing, ClosedResourceError if the journal is closed meanwhile.
        """
        assert item.settled is not None
        try:
            await item.settled.wait()
        except BaseException:
            with self._queued:
                item.withdrawn = True
                taken = item.taken
            if taken:
                self.retract(item)
            raise
        if item.error is not None:
            raise _fresh(item.error)

    def _check_fits(self, rollouts: Sequence[Rollout]) -> None:
        size = sum(r.nbytes for r in rollouts)
        if self._max_bytes is not None and size > 3 * self._segment_bytes:
            raise RolloutError(
                f"rollout {rollouts[0].rollout_id!r} (with its siblings {size} bytes) is too large for a journal of "
                f"max_bytes ({self._max_bytes}): a put may take {3 * self._segment_bytes}. Raise max_bytes"
            )

    def retract(self, item: Writing) -> None:
        """What was written has not been accepted after all."""
        self._enqueue(Retracted(item.number), late=True)

    def dispatched(self, batch: Batch, counts: dict[str, Any], departed: dict[str, int]) -> None:
        """A batch is about to be handed out: its plan, to be delivered again as it is."""
        self._enqueue(Dispatched(plan_of(batch), counts, departed))

    def acknowledged(self, batch: Batch) -> None:
        """A batch need not be kept."""
        self._enqueue(Done(batch.step, [r.rollout_id for r in batch.rollouts if not r.is_padding]), late=True)

    def evicted(self, ids: Sequence[str], reason: EvictReason, departed: dict[str, int]) -> None:
        """Rollouts were given up."""
        self._enqueue(Evicted(reason, list(ids), departed), late=True)

    def returned(self, step: int) -> None:
        """A batch's plan is void, its rollouts wait again."""
        self._enqueue(Returned(step), late=True)

    def versioned(self, version: int) -> None:
        """The policy moved on."""
        self._enqueue(Versioned(version), late=True)

    def adopt(self, snapshot: Snapshot) -> None:
        """Take over a checkpoint that was loaded. On the disk by the time the next put returns."""
        now, next_step = time.time(), snapshot.next_step
        departed = Counter(snapshot.group_arrivals)
        departed.subtract(r.group_id for r in snapshot.waiting if r.group_id is not None)
        self._enqueue(
            State(
                next_put=self._next_put,
                next_step=next_step,
                version=snapshot.version,
                plans=[plan_of(batch) for batch in snapshot.in_flight],
                past_ids=list(snapshot.past_ids),
                counts=dict(snapshot.counts),
                departed={name: n for name, n in departed.items() if n > 0},
                acknowledged=snapshot.counts["acknowledged"],
                evicted=dict(snapshot.counts["evicted"]),
            )
        )
        for batch in snapshot.in_flight:
            self._adopt([r for r in batch.rollouts if not r.is_padding], now, next_step)
        for rollout, waited_s, skips in zip(snapshot.waiting, snapshot.waited_s, snapshot.skips, strict=True):
            self._adopt([rollout], now - float(waited_s), next_step - int(skips))

    def _adopt(self, rollouts: Sequence[Rollout], arrived_at: float, step: int) -> None:
        self._enqueue(Writing(self._next_put, rollouts, arrived_at, step, None))
        self._next_put += 1

    async def flush(self) -> None:
        """Return once all that was enqueued so far is on the disk. Waits while it is full; raises JournalError if it is
        failing."""
        item = _Flush(anyio.Event())
        self._enqueue(item)
        await item.settled.wait()
        if item.error is not None:
            raise _fresh(item.error)

    def _enqueue(self, item: _Item, *, late: bool = False) -> None:
        with self._queued:
            if self._thread is None or self._closing:
                if late:
                    return  # after the end nobody writes any more; it will be delivered again
                raise ClosedResourceError("the journal is closed, or not open yet: use `async with` on the balancer")
            self._queue.append(item)
            self._queued.notify()

    # -- writing; in the journal's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while (items := self._take()) is not None:
            try:
                self._write(items)
            except Exception as error:  # noqa: BLE001 - whatever it is: nothing may be promised any more
                self._break(error, items)
            self._settle(items)

    def _take(self) -> list[_Item] | None:
        """All that is to be written next; None at the end."""
        with self._queued:
            while not self._queue and not self._closing:
                if not self._queued.wait(RETRY_S if self._kept else None):
                    break  # try again what there was no room for
            if self._closing and not self._queue:
                return None
            items, self._kept = self._kept, []
            size = 0
            while self._queue and size < self._segment_bytes:
                item = self._queue.popleft()
                items.append(item)
                if isinstance(item, Writing):
                    item.taken = True
                    size += item.nbytes
        return items

    def _write(self, items: Sequence[_Item]) -> None:
        """Write, sync, take in. What there is no room for is refused (puts, on a full disk) or kept."""
        if self._broken is not None:
            raise self._broken
        items = self._admit(items)
        try:
            self._append(items)
            self._note_full(False)
        except DiskFullError as error:
            self._note_full(True)
            rest = []
            for item in items:
                if isinstance(item, Writing) and item.settled is not None:
                    item.error = error
                else:
                    rest.append(item)
            try:
                self._append(rest)
            except DiskFullError:
                self._kept += rest
        while self._reclaim() and self._blocked:
            pass

    def _admit(self, items: Sequence[_Item]) -> list[_Item]:
        """Without the puts that were withdrawn, and those that ``max_bytes`` holds back."""
        admitted: list[_Item] = []
        size, blocked = 0, False
        for item in items:
            if isinstance(item, Writing):
                if self._refusing and item.settled is not None:
                    item.error = ClosedResourceError("the journal was closed before this put was written")
                if item.withdrawn or item.error is not None:
                    continue
                if item.settled is not None and not self._has_room(size + item.nbytes):
                    blocked = True
                    self._kept.append(item)
                    continue
                size += item.nbytes
            admitted.append(item)
        if blocked:
            self._in_loop(self._on_blocked)
        if blocked and not self._blocked:
            _log.warning(
                "journal %s: puts wait, its %d bytes of max_bytes (%d) are needed: %d bytes belong to rollouts that "
                "wait, or were not acknowledged",
                self.path,
                self._segments.total_bytes,
                self._max_bytes,
                self._contents.live_bytes,
            )
        self._blocked = blocked
        return admitted

    def _has_room(self, num_bytes: int) -> bool:
        """One segment is left for what is written beside puts, and for copying."""
        limit = self._max_bytes
        return limit is None or self._segments.total_bytes + num_bytes <= limit - self._segment_bytes

    def _append(self, items: Sequence[_Item | Held]) -> None:
        segments, contents = self._segments, self._contents
        if segments.sizes[segments.last] >= self._segment_bytes:
            segments.begin()
            self._stateless = True
        commit = _Commit(salt_of(segments.last))
        if self._stateless:
            commit.add(contents.state())
        for item in items:
            self._add(commit, item)
        if not commit.records:
            return
        start = segments.append(commit.pieces)
        self._stateless = False
        for head, at, size in commit.records:
            contents.apply(head, Place(segments.last, start + at, size))

    def _add(self, commit: _Commit, item: _Item | Held) -> None:
        if isinstance(item, Held):
            commit.add(*self._copy(item))
        elif isinstance(item, Writing):
            try:
                payload = payload_of(item.rollouts)
            except Exception as error:  # noqa: BLE001 - the put is refused, and the journal goes on
                item.error = error
                return
            ids = [r.rollout_id for r in item.rollouts]
            commit.add(Put(item.number, ids, item.arrived_at, item.step), payload)
        elif not isinstance(item, _Flush):
            commit.add(item)

    def _copy(self, held: Held) -> tuple[Put, list[memoryview | bytes]]:
        number, at, size = held.place
        found = read(salt_of(number), memoryview(self._segments.read(number, at, size)), 0)
        if found is None or not isinstance(found.head, Put):
            raise JournalError(errno.EIO, f"bytes {at} to {at + size} of segment {number} have changed on the disk")
        put = found.head
        ids = [name for name in put.ids if name in held.alive]
        return Put(put.number, ids, put.arrived_at, put.step), [found.payload]

    def _reclaim(self) -> bool:
        """Delete segments that are not needed, oldest first; copy what is left of the oldest if that is worth it, a
        part at a time. True if something was copied.

        The last but one is kept in any case: should the state at the start of the last be damaged, it is still there.
        """
        segments, contents = self._segments, self._contents
        while len(segments.sizes) > 2 and not contents.needs(segments.first):
            segments.drop_first()
        most = 2 * contents.live_bytes + 3 * self._segment_bytes
        if len(segments.sizes) <= 2 or segments.total_bytes <= most:
            return False
        chosen, size = [], 0
        for held in contents.held_in(segments.first):
            chosen.append(held)
            size += held.place.size
            if size >= COPY_BYTES:
                break
        try:
            self._append(chosen)
        except DiskFullError:
            return False
        return True

    def _note_full(self, full: bool) -> None:
        if full and not self._full:
            _log.warning("journal %s: the disk is full; puts are refused, batches wait until there is room", self.path)
        if self._full and not full:
            _log.warning("journal %s: there is room on the disk again", self.path)
        self._full = full

    def _break(self, error: Exception, items: Sequence[_Item]) -> None:
        if self._broken is None:
            number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
            self._broken = JournalError(
                number,
                f"the journal {self.path} cannot be written any more ({error}): after a failed write nobody knows what "
                "is on the disk. Start the balancer again, with a disk that works",
            )
            _log.error("%s", self._broken, exc_info=error)
        for item in (*items, *self._kept):
            if not isinstance(item, Head):
                item.error = item.error or self._broken
        self._kept = []

    def _settle(self, items: Sequence[_Item]) -> None:
        """Wake whoever waits for these, in one go."""
        kept = set() if self._refusing else set(map(id, self._kept))
        events = [
            item.settled
            for item in items
            if isinstance(item, (Writing, _Flush)) and item.settled is not None and id(item) not in kept
        ]
        if events:
            self._in_loop(partial(_set_all, events))


def _fresh(error: Exception) -> Exception:
    """The same error for one of those who get it."""
    kind = JournalError if isinstance(error, JournalError) else type(error)
    return kind(*error.args)


def _read_put(held: Held, payload: memoryview) -> tuple[dict[str, Rollout], list[str]]:
    """Those of its rollouts that are needed, by id, and sentences about those that cannot be read."""
    try:
        read_here = rollouts_of(payload)
    except OtherProtocolError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged bytes may be anything
        return {}, [f"put {held.put.number} of rollouts {sorted(held.alive)} cannot be read: {error}"]
    needed = {name: one for name, one in read_here.items() if name in held.alive}
    return (
        {name: one for name, one in needed.items() if not isinstance(one, str)},
        [f"put {held.put.number}: {one}" for one in needed.values() if isinstance(one, str)],
    )


def _describe(damage: Damage) -> str:
    return f"bytes {damage.start} to {damage.stop} of segment {damage.segment}"


def _set_all(events: Sequence[anyio.Event]) -> None:
    for event in events:
        event.set()


def _nothing(*_: object) -> None:
    pass

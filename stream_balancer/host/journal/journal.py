"""The journal: what was accepted survives the controller. A put returns once its rollout is on the disk.

Who waits for whom, in the event loop, which never touches the disk. The thread that does is in ``writer``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread

from stream_balancer.core.groups import Declared, GroupSize
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.errors import ClosedResourceError, ConfigError, JournalError, RolloutError, to_raise
from stream_balancer.field_docs import documented
from stream_balancer.host.journal.handed import Handed
from stream_balancer.host.journal.store import DiskFullError, Statement, Store, drop, put, retract
from stream_balancer.host.journal.writer import CLOSED, Writer, Writing
from stream_balancer.host.records import Fact, Group, Held, Records, group_of
from stream_balancer.types import Rollout

__all__ = ["Journal", "Recovered"]

LEAST_MAX_BYTES = 2**20
MAX_ROLLOUT_BYTES = 9 * 10**8  # SQLite takes 10 ** 9 bytes a row

_log = logging.getLogger("stream_balancer.journal")


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """Content of a journal when it was opened."""

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
    """Bytes of a commit that a crash cut short: of puts that had not returned. They were taken off."""
    damage: tuple[str, ...]
    """Rows that were damaged, and plans whose rollouts are lost with them, a sentence each; everything else is here.
    The database as it was is kept beside this one, as ``damaged-1.db``."""
    seconds: float
    """How long it took."""

    @property
    def found(self) -> bool:
        """True if it held anything, as after a crash or an earlier run."""
        return bool(self.waiting or self.steps or self.past_ids or self.next_step)


class Journal:
    """A folder that holds what a balancer has accepted and not yet finished. One process at a time.

    ``max_bytes`` bounds the folder: puts wait while it is full of rollouts that are still needed. Without it the
    folder stays below twice what is needed plus a few times 64 MiB.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes < LEAST_MAX_BYTES:
            raise ConfigError(
                f"max_bytes of a journal must be >= {LEAST_MAX_BYTES}, not {max_bytes}: rollouts are written before "
                "others are deleted. Raise max_bytes"
            )
        self.path = Path(path)
        self.records = Records()
        """Rows of the journal when it was opened, without the rollouts."""
        self.handed = Handed()
        """Reports of ranks on steps in flight."""
        self.handed.write = self.put
        self.handed.flush = self.flush
        self._max_bytes = max_bytes
        self._store = Store(self.path)
        self._next_number = 0  # of a rollout's row
        self._writer: Writer | None = None  # from start() on

    # -- opening and closing; these block ------------------------------------------------------------------------------

    def open(self) -> tuple[Snapshot, Recovered]:
        """Take the lock, and read what is held. Call :meth:`start` afterwards, in the event loop.

        Raises AlreadyInUseError if another process has it, JournalError if its disk is full or it cannot be read,
        WireError for another version's. O(bytes).
        """
        # not the loop's clock: this runs in another thread
        began = time.monotonic()
        store = self._store
        try:
            store.open()
            try:
                snapshot = self._read()
                lost = self.records.damage
                numbers = [key for key in lost if isinstance(key, int)]
                keys = [key for key in lost if isinstance(key, str)]
                store.begin([retract(numbers), drop(*keys)] if lost else ())
            except BaseException:
                store.close()
                raise
        except DiskFullError as error:
            message = f"the journal {self.path} has no room to start. Make room first"
            raise DiskFullError(error.errno, message) from None
        recovered = Recovered(
            waiting=len(snapshot.waiting),
            in_flight=sum(batch.num_rollouts for batch in snapshot.in_flight),
            steps=tuple(batch.step for batch in snapshot.in_flight),
            past_ids=len(snapshot.past_ids),
            next_step=snapshot.next_step,
            torn_bytes=store.torn_bytes,
            damage=(*filter(None, [store.lost_commits]), *lost.values()),
            seconds=time.monotonic() - began,
        )
        self._log_recovered(recovered)
        return snapshot, recovered

    def _read(self) -> Snapshot:
        records = self.records = Records(owners=self.records.owners)
        for key, written in self._store.rows("select key, data from facts order by rowid"):
            records.read(key, written)
        names = dict(self._store.rows("select number, id from rollouts indexed by ids order by id, number"))
        for number, name, row in self._store.rows("select number, id, data from rollouts order by number"):
            indexed = names.pop(number, None)
            if indexed == name:
                records.hold(number, row, f"row {number}: rollout {name!r}")
            else:
                # a damaged key would put one rollout in the place of another without a word
                records.damage[number] = f"row {number}: rollout {indexed!r} in the index, {name!r} in the row"
            # a number that is taken out may be given again
            if number not in records.damage:
                self._next_number = number + 1
        # As when a page of the table was replaced by an older one.
        for number, name in names.items():
            records.damage[number] = f"row {number}: rollout {name!r} cannot be reached"
        snapshot = records.snapshot(time.time())
        records.held = {}  # the snapshot has them, and they shall go as they are trained on
        self.handed.follow(records.acked, records.came)
        return snapshot

    def _log_recovered(self, recovered: Recovered) -> None:
        for where in recovered.damage:
            _log.error("journal %s: damaged, rows are lost: %s", self.path, where)
        if recovered.torn_bytes:
            _log.warning(
                "journal %s: the last %d bytes are no whole commit. Taken off. A crash in the middle of a write looks "
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
        self._writer = Writer(self._store, self._max_bytes, on_blocked)
        self._writer.start()

    async def aclose(self) -> None:
        """Write what is enqueued, and release the lock. Puts that are not being written yet get ClosedResourceError.
        Idempotent; also where :meth:`start` was not called."""
        # in this order: no new puts, what is being written, and then the thread
        if self._writer is not None and not self._writer.closed:
            self._writer.refuse()
            with suppress(JournalError):
                await self.flush()
            await anyio.lowlevel.checkpoint()  # puts that were just written notice the end, and retract
        await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._store.close()

    # -- enqueueing; in the event loop ---------------------------------------------------------------------------------

    def write(self, rollouts: Sequence[Rollout], step: int, size: GroupSize | None = None) -> Writing:
        """Rollouts that are about to be accepted take the last place in the queue, with the ``size`` that is declared
        of their group; :meth:`written` must follow.

        Raises RolloutError if they could never fit, ClosedResourceError once closed.
        """
        if rollouts:
            self._check_fits(rollouts)
        # by the wall clock: only that means something to the next process
        item = self._numbered([Held(rollout, time.time(), step) for rollout in rollouts])
        # all else describes what has happened, and is kept until there is room
        item.may_be_refused = True
        if size is not None:
            # In the same transaction as the rollouts: after a crash a group has both or neither.
            group = Group(size.group_id, size.size, "closed" if size.size is None else "open")
            item.statements = [put(group)]
        self._enqueue(item)
        return item

    def _numbered(self, held: Sequence[Held]) -> Writing:
        # Rows are numbered in the order of the calls, in the event loop: the order in which they wait again.
        number, self._next_number = self._next_number, self._next_number + len(held)
        return Writing(held=held, number=number)

    async def written(self, item: Writing) -> None:
        """Return once they are on the disk. If cancelled, or on an error, they are not in the journal.

        Raises JournalError if the disk is full or failing, ClosedResourceError if the journal is closed meanwhile.
        """
        assert item.settled is not None
        try:
            await item.settled.wait()
        except BaseException:
            item.withdrawn = True  # if it is still in time; else it is written, and deleted again
            self.retract(item)
            raise
        if item.error is not None:
            raise to_raise(item.error)

    def _check_fits(self, rollouts: Sequence[Rollout]) -> None:
        size, most = sum(r.nbytes for r in rollouts), self._max_bytes
        # the folder holds a put twice for a moment, in log and database, beside what is left for facts
        if most is not None and size > most // 4:
            raise RolloutError(
                f"rollout {rollouts[0].rollout_id!r} (with its siblings {size} bytes) is too large for a journal of "
                f"max_bytes ({most}): a put may take {most // 4}. Raise max_bytes"
            )
        largest = max(rollouts, key=lambda r: r.nbytes)
        if largest.nbytes > MAX_ROLLOUT_BYTES:
            raise RolloutError(
                f"rollout {largest.rollout_id!r} ({largest.nbytes} bytes) is too large for a journal, which takes "
                f"{MAX_ROLLOUT_BYTES}. Put large tensors elsewhere, and their names into metadata"
            )

    def retract(self, item: Writing) -> None:
        """Rollouts that were written have not been accepted after all."""
        if item.held:
            self.change(retract(range(item.number, item.number + len(item.held))))

    def declare(self, group_id: str, declared: Declared | None) -> None:
        """Declaration of a group now; None: none any more."""
        self.change(drop(f"group {group_id}") if declared is None else put(group_of(group_id, declared)))

    def put(self, fact: Fact) -> None:
        """A fact holds now."""
        self.change(put(fact))

    def change(self, *statements: Statement) -> None:
        """Something has happened. On the disk by the time the next put or :meth:`flush` returns."""
        with suppress(ClosedResourceError):  # after the end nobody writes any more; it will be delivered again
            self._enqueue(Writing(statements, settled=None))

    def adopt(self, records: Records) -> None:
        """Take over a checkpoint that was loaded. On the disk by the time the next put returns."""
        self.change(put(*records.facts()))
        # one row each, as puts have: a rollout that is done takes its row with it
        for held in records.held.values():
            item = self._numbered([held])
            item.settled = None
            self._enqueue(item)

    async def flush(self) -> None:
        """Return once all that was enqueued so far is on the disk. Waits while it is full; raises JournalError if it is
        failing."""
        item = Writing()
        self._enqueue(item)
        assert item.settled is not None
        await item.settled.wait()
        if item.error is not None:
            raise to_raise(item.error)

    def _enqueue(self, item: Writing) -> None:
        if self._writer is None:
            raise ClosedResourceError(CLOSED)
        self._writer.enqueue(item)

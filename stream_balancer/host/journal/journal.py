"""The journal: what was accepted survives the controller. A put returns once its rollout is on the disk.

Who waits for whom, in the event loop, which never touches the disk. The thread that does is in ``writer``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread

from stream_balancer.core.groups import GroupSize
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.errors import ClosedResourceError, ConfigError, JournalError, RolloutError, to_raise
from stream_balancer.field_docs import documented
from stream_balancer.host.journal.changes import Changes, Statement
from stream_balancer.host.journal.contents import Contents, Held, contents_of
from stream_balancer.host.journal.handed import Handed
from stream_balancer.host.journal.rows import Group, fact_of, rollout_of
from stream_balancer.host.journal.store import DiskFullError, Store
from stream_balancer.host.journal.writer import CLOSED, Flush, Item, Writer, Writing, statements_of
from stream_balancer.types import Rollout
from stream_balancer.wire.codec import OtherFormatError

__all__ = ["Journal", "Recovered"]

LEAST_MAX_BYTES = 2**20
MAX_ROLLOUT_BYTES = 9 * 10**8  # SQLite takes 10 ** 9 bytes a row

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
    """Bytes of a commit that a crash cut short: of puts that had not returned. They were taken off."""
    damage: tuple[str, ...]
    """What was damaged, and the rollouts and plans that could not be read because of it, a sentence each; everything
    else is here. The database as it was is kept beside the new one, as ``damaged-1.db``."""
    seconds: float
    """How long it took."""

    @property
    def found(self) -> bool:
        """Whether it held anything, as after a crash or an earlier run."""
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
        self.changes = Changes()
        """What to :meth:`change` for each event."""
        self.handed = Handed()
        """What ranks have said of steps in flight."""
        self.handed.write = lambda fact, key: self.change(self.changes.said(fact, key))
        self.handed.flush = self.flush
        self._max_bytes = max_bytes
        self._store = Store(self.path)
        self._writer: Writer | None = None  # from start() on

    # -- opening and closing; these block ------------------------------------------------------------------------------

    def open(self, remember_ids: int) -> tuple[Snapshot, Recovered]:
        """Take the lock, and read what is held. Call :meth:`start` afterwards, in the event loop.

        Raises AlreadyInUseError if another process has it, JournalError if its disk is full or nothing can be read,
        WireError for another version's. O(bytes).
        """
        began = time.monotonic()
        store = self._store
        try:
            store.open()
            try:
                snapshot, torn_bytes, damage = self._go_on(remember_ids)
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
            torn_bytes=torn_bytes,
            damage=tuple(damage),
            seconds=time.monotonic() - began,
        )
        self._log_recovered(recovered)
        return snapshot, recovered

    def _go_on(self, remember_ids: int) -> tuple[Snapshot, int, list[str]]:
        """From what is held: in the same database, or, if that is damaged, in a new one. -> it, torn bytes, damage."""
        contents, damage = self._read()
        torn_bytes = self._store.torn_bytes
        snapshot, broken = contents.snapshot(time.time(), remember_ids)
        self.handed.follow(contents.acked, [came for _, came in sorted(contents.came.items())])
        damage += [f"step {plan.step}: its plan names rollouts that are lost" for plan in broken]
        if damage:
            self.changes.follow(Contents(), remember_ids)
            # What can be read goes into a new database: SQLite must not write into one that is damaged.
            items = self._adopted(contents_of(snapshot, time.time()))
            parts = iter(lambda: list(islice(items, 256)), [])
            self._store.replace(statements_of(part) for part in parts)
        else:
            self.changes.follow(contents, remember_ids)
        self._store.begin()
        return snapshot, torn_bytes, damage

    def _read(self) -> tuple[Contents, list[str]]:
        """What can be read, and sentences about the rest."""
        contents, bad = Contents(), []
        for row in self._store.facts():
            try:
                contents.add(row[1], fact_of(row))
            except Exception as error:  # noqa: BLE001 - one bad row never prevents the others from being read
                bad.append(f"{row[0]} {row[1]}: {error}")
        held = []
        for row in self._store.rollouts():
            try:
                held.append((row[0], Held(rollout_of(row), row[2], row[3])))
            except OtherFormatError:
                raise
            except RolloutError as error:
                bad.append(f"row {row[0]}: {error}")
            except Exception as error:  # noqa: BLE001 - as above
                bad.append(f"row {row[0]}: rollout {row[1]!r}: {error}")
        for number, one in sorted(held, key=itemgetter(0)):
            contents.hold(number, one)
        return contents, self._store.damage + bad

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
        item = self._writing(rollouts, time.time(), step, anyio.Event())
        if size is not None:
            group = Group(size.group_id, size.size, "closed" if size.size is None else "open")
            # In the same transaction as the rollouts: after a crash a group has both or neither.
            item.declared = self.changes.group(group)
        self._enqueue(item)
        return item

    def _writing(
        self, rollouts: Sequence[Rollout], arrived_at: float, step: int, settled: anyio.Event | None
    ) -> Writing:
        # Rows are numbered in the order of the calls, in the event loop: the order in which they wait again.
        number = self.changes.next_number
        self.changes.next_number += len(rollouts)
        return Writing(number, rollouts, arrived_at, step, settled)

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
        """What was written has not been accepted after all."""
        if item.rollouts:
            self.change(self.changes.retracted(range(item.number, item.number + len(item.rollouts))))

    def change(self, statements: list[Statement]) -> None:
        """Something has happened. On the disk by the time the next put or :meth:`flush` returns."""
        with suppress(ClosedResourceError):  # after the end nobody writes any more; it will be delivered again
            self._enqueue(statements)

    def adopt(self, snapshot: Snapshot) -> None:
        """Take over a checkpoint that was loaded. On the disk by the time the next put returns."""
        for item in self._adopted(contents_of(snapshot, time.time())):
            self._enqueue(item)

    def _adopted(self, contents: Contents) -> Iterator[Item]:
        yield list(self.changes.adopted(contents))
        for held in contents.held.values():
            yield self._writing([held.rollout], held.arrived_at, held.step, None)

    async def flush(self) -> None:
        """Return once all that was enqueued so far is on the disk. Waits while it is full; raises JournalError if it is
        failing."""
        item = Flush(anyio.Event())
        self._enqueue(item)
        await item.settled.wait()
        if item.error is not None:
            raise to_raise(item.error)

    def _enqueue(self, item: Item) -> None:
        if self._writer is None:
            raise ClosedResourceError(CLOSED)
        self._writer.enqueue(item)

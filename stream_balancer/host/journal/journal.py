"""The journal: accepted rollouts survive the controller. A put returns once its rollouts are on the disk.

Everything here runs in the event loop, except :meth:`Journal.open`. Two callers wait for the disk: a put for its
rollouts (:mod:`stream_balancer.host.puts`) and a batch for its plan (:mod:`stream_balancer.host.batches`). Other
changes are written after they happened. A crash may lose the last changes, and then they happen again.

A put writes its rollouts before the balancer accepts them. Example: two puts of the id "a" wait for the disk, as rows 7
and 8. The balancer accepts the first and refuses the second, so the journal deletes row 8.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import anyio
import anyio.to_thread

from stream_balancer.core.groups import Declared, GroupSize
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.observer import Observer
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.errors import JournalError, RolloutError
from stream_balancer.field_docs import documented
from stream_balancer.host.journal.handed import Handed
from stream_balancer.host.journal.log import Change, Log, Rows, no_room
from stream_balancer.host.records import (
    Done,
    Fact,
    Group,
    HeldRollout,
    Records,
    Totals,
    facts_of,
    held_of,
    plan_of,
    rollout_key,
    row_name,
)  # fmt: skip
from stream_balancer.rollouts import Batch, EvictReason, Rollout

MAX_ROLLOUT_BYTES = 9 * 10**8  # SQLite takes 10 ** 9 bytes a row.

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
    """Steps of the batches in flight."""
    past_ids: int
    """Rollouts remembered as done."""
    next_step: int
    """Number of the next new batch."""
    torn_bytes: int
    """Bytes of a commit that a crash cut short, which were taken off. No put of this commit had returned."""
    damage: tuple[str, ...]
    """A sentence for each damaged row, and for each plan that names a lost rollout. All other rows are here. A copy of
    the damaged database is ``damaged-1.db`` in the same folder."""

    @property
    def found(self) -> bool:
        """True if it held anything, as after a crash or an earlier run."""
        return bool(self.waiting or self.steps or self.past_ids or self.next_step)


class Journal(Handed, Observer):
    """A folder with the rollouts and facts of one balancer, for the next process. One process at a time uses it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)
        self.recovered: Recovered | None = None
        """Content of the journal when it was opened."""
        self.log = Log(self.path)
        self._core: BalancerCore  # Set by start().
        self._numbers: dict[str, int] = {}
        """By key, the row of each fact and of each accepted rollout."""
        self._next_number = 0
        self._unsettled: set[Change] = set()
        """Puts that are neither accepted nor refused."""
        self._done = deque[Done]()

    # -- opening and closing -------------------------------------------------------------------------------------------

    async def recover(self, core: BalancerCore) -> None:
        """Open the journal, and restore the core from it.

        Raises like :meth:`open` and :meth:`BalancerCore.restore`, and closes the journal first."""
        with anyio.CancelScope(shield=True):  # A cancelled call would leave the journal open.
            snapshot = await anyio.to_thread.run_sync(self.open)
            try:
                # Before restore(), which may evict rollouts.
                self.start(core)
                core.restore(snapshot, anyio.current_time())
            except BaseException:
                await self.aclose()
                raise

    def open(self) -> Snapshot:
        """Take the lock, and read all rows. Blocks; O(bytes).

        Raises AlreadyInUseError, naming the process that has the journal; JournalError if the disk is full or the
        journal cannot be read; WireError for a journal of another version."""
        try:
            return self._read(*self.log.open())
        except BaseException as error:
            self.log.close()
            if not isinstance(error, OSError | sqlite3.Error | UnicodeDecodeError):
                raise
            full = no_room(error)
            raise JournalError(
                full or errno.EIO,
                f"the journal {self.path} has no room to start. Make room first"
                if full
                else f"{self.path / 'journal.db'} cannot be read ({error}). Nothing in it was changed. Put a copy of "
                "its folder in its place; or, to start without its content, use another path",
            ) from error

    def _read(self, torn_bytes: int, lost_commits: list[str]) -> Snapshot:
        log, records, numbers, kept = self.log, Records(self.leases), set[int](), dict[str, int]()
        # The order makes SQLite read the index from end to end.
        indexed = dict(log.db.execute("select number, key from rows indexed by keys order by key, number"))
        for number, key, data in log.db.execute("select number, key, data from rows order by number"):
            numbers.add(number)
            name, other = row_name(number, key), indexed.pop(number, None)
            if other == key:
                records.take(name, data)
            else:
                # A damaged key could put one rollout in the place of another.
                records.damage[name] = f"row {number}: {other} in the index, {key} in the row"
            # A put is written before it is accepted, so a crash may leave two rows of a key. The first rollout was
            # accepted; the last fact holds.
            if name not in records.damage and (key not in kept or not key.startswith("rollout ")):
                kept[key] = number
        # As when a page of the table was replaced by an older one.
        records.damage |= {name: f"{name} cannot be reached" for name in map(row_name, indexed, indexed.values())}
        snapshot = records.snapshot(time.time())
        for void in records.damage:  # A plan without its rollouts is named by its key.
            kept.pop(void, None)
        damage = (*lost_commits, *snapshot.set_aside)
        log.repair(numbers.difference(kept.values()), is_damaged=bool(damage))
        self._numbers, self._next_number = kept, max(kept.values(), default=-1) + 1
        facts = [fact for fact in records.facts if fact.key in kept and not isinstance(fact, Done | Group | Totals)]
        self.rows = {fact.key: fact for fact in facts}
        self._done.extend(records.all_of(Done))
        self.recovered = Recovered(
            waiting=len(snapshot.waiting),
            in_flight=sum(batch.num_rollouts for batch in snapshot.in_flight),
            steps=tuple(batch.step for batch in snapshot.in_flight),
            past_ids=len(snapshot.past_ids),
            next_step=snapshot.next_step,
            torn_bytes=torn_bytes,
            damage=damage,
        )
        for sentence in damage:
            _log.error("journal %s: damaged, rows are lost: %s", self.path, sentence)
        if torn_bytes or snapshot.waiting or snapshot.in_flight:
            _log.warning(
                "journal %s: recovered %d waiting rollouts and the steps %s. %d bytes at the end of its log are no "
                "whole commit and were taken off: a crash leaves such an end, and no put that had returned is in it",
                self.path,
                len(snapshot.waiting),
                [*self.recovered.steps],
                torn_bytes,
            )
        return snapshot

    def start(self, core: BalancerCore) -> None:
        """Begin to write a core's events, in its event loop."""
        self._core = core
        # Before the user's observers, which may acknowledge a batch as soon as it is dispatched.
        core.observers.insert(0, self)
        self.log.start()

    async def aclose(self) -> None:
        """Write all changes, and release the lock. Idempotent; also if :meth:`start` was not called."""
        if not self.log.is_closed:
            # Another balancer may open the journal later.
            self._core.observers.remove(self)
            # A put that waits finds the balancer closed.
            for put in [*self._unsettled]:
                self.settle(put, accepted=False)
            self.log.is_closed = True
        await anyio.to_thread.run_sync(self.log.close)

    def check_empty(self) -> None:
        """Raise ValueError unless the journal was empty when it was opened: otherwise no checkpoint can be loaded."""
        if self.recovered is None or self.recovered.found:
            raise ValueError(
                f"load_state_dict() with the journal {self.path}: what that holds is newer than a "
                "checkpoint, and is restored on entering `async with`. Call acknowledge_through(step) instead; or, to "
                "go back to the checkpoint, enter a balancer with an empty journal, then load"
            )

    # -- puts and facts ------------------------------------------------------------------------------------------------

    def write(self, rollouts: Sequence[Rollout], step: int, size: GroupSize | None = None) -> Change:
        """Write rollouts, and the ``size`` that their group is declared to have. :meth:`settle` must follow.

        Raises RolloutError for a rollout that is too large."""
        for rollout in rollouts:
            if rollout.nbytes > MAX_ROLLOUT_BYTES:
                raise RolloutError(
                    f"rollout {rollout.rollout_id!r} ({rollout.nbytes} bytes) is too large for a journal, which takes "
                    f"{MAX_ROLLOUT_BYTES}. Put large tensors elsewhere, and their names into metadata"
                )
        # The next process does not know this one's monotonic clock.
        rows: list[Fact | HeldRollout] = [HeldRollout(rollout, time.time(), step) for rollout in rollouts]
        if size is not None:
            rows.append(Group(size.group_id, size.size, closed=False))
        put = self._enqueue(rows, is_put=True)
        self._unsettled.add(put)
        return put

    def settle(self, put: Change, *, accepted: bool) -> None:
        """The balancer accepted the rollouts of a put, or will not. Delete the rows that are not needed."""
        self._unsettled.discard(put)
        gone = []
        for number, row in enumerate(put.rows, put.number):
            # An observer may have evicted an accepted rollout already. The declaration of the group was written again
            # when it was accepted.
            if accepted and isinstance(row, HeldRollout) and row.rollout.rollout_id in self._core.ids.held:
                self._numbers[row.key] = number
            else:
                gone.append(number)
        if gone:
            self._enqueue(gone=gone)

    def put(self, *rows: Fact | HeldRollout, void: Iterable[str] = ()) -> None:
        """In one transaction: rows hold, each in place of the row with its key, and rows with the keys ``void`` do not.
        On the disk when the next put or :meth:`flush` returns."""
        keys = [*void, *(row.key for row in rows)]
        change = self._enqueue(rows, [self._numbers.pop(key) for key in keys if key in self._numbers])
        self._numbers.update((row.key, number) for number, row in enumerate(rows, change.number))
        self._done.extend(row for row in rows if isinstance(row, Done))

    async def flush(self) -> None:
        """Return once all earlier changes are on the disk. Raises like :meth:`Change.written`."""
        await self._enqueue().written()

    def _enqueue(self, rows: Rows = (), gone: Sequence[int] = (), *, is_put: bool = False) -> Change:
        # After a restart rollouts wait in the order of their numbers.
        change = Change(self._next_number, rows, gone, is_put)
        self._next_number += len(rows)
        self.log.enqueue(change)
        return change

    # -- events --------------------------------------------------------------------------------------------------------

    def dispatched(self, batch: Batch) -> None:
        self.put(plan_of(batch, self._core.in_flight.left_out(batch.step)), self._totals())

    def acknowledged(self, batch: Batch) -> None:
        ids = [rollout.rollout_id for rollout in batch.rollouts if not rollout.is_padding]
        self._finish(ids, f"plan {batch.step}", f"attempt {batch.step}")

    def gave_up(self, evicted: Sequence[tuple[Rollout, EvictReason]]) -> None:
        self._finish([rollout.rollout_id for rollout, _ in evicted])

    def group_declared(self, group_id: str, declared: Declared | None) -> None:
        if declared is None:
            self.put(void=[f"group {group_id}"])
        else:
            self.put(Group(group_id, *declared))

    def version_set(self, version: int) -> None:
        self.put(self._totals())

    def restored(self, snapshot: Snapshot) -> None:
        # Otherwise the snapshot was read from this journal.
        if self.recovered is not None and not self.recovered.found:
            rows: Iterable[Fact | HeldRollout] = chain(facts_of(snapshot), held_of(snapshot, time.time()))
            for row in rows:
                if row != Done(0, []):
                    self.put(row)

    def _finish(self, ids: Sequence[str], *void: str) -> None:
        """Rollouts are not held any more. A row keeps the ids that a put may not use again."""
        past, done, rows, keys = self._core.ids.past, self._done, list[Fact](), [*void, *map(rollout_key, ids)]
        if over := [name for name in ids if name in past]:
            # Row numbers grow, so this number is new.
            rows.append(Done(self._next_number, over))
        while done and past.keys().isdisjoint(done[0].ids[-1:]):
            keys.append(done.popleft().key)
        # In one transaction: a plan without its rollouts would be damage.
        self.put(self._totals(), *rows, void=keys)

    def _totals(self) -> Totals:
        core = self._core
        departed = core.buffer.groups.departed()
        return Totals(core.in_flight.next_step, core.staleness.version, core.counts.totals(), departed)

"""The journal: what was accepted survives the controller. A put returns once its rollout is on the disk.

Who waits for whom, in the event loop, which never touches the disk: the thread that does is in ``writer``. Two things
wait: a put for its rollouts (:mod:`stream_balancer.host.puts`), a batch for its plan
(:mod:`stream_balancer.host.batches`). All else is written once it has happened, and may be lost in a crash: then it
happens again. Rows change in the order of the events, so an id that was evicted as lost and put again is held.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread

from stream_balancer.core.groups import Declared, GroupSize
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.observer import Observer
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.errors import ClosedResourceError, JournalError, RolloutError
from stream_balancer.field_docs import documented
from stream_balancer.host.journal.handed import Handed
from stream_balancer.host.journal.store import DiskFullError, Store, remove, retract
from stream_balancer.host.journal.writer import CLOSED, Writer, Writing
from stream_balancer.host.records import (
    Attempt,
    Done,
    Ended,
    Fact,
    Group,
    HeldRollout,
    PeerFact,
    Records,
    Totals,
    facts_of,
    held_of,
    plan_of,
    rollout_key,
    row_name,
)  # fmt: skip
from stream_balancer.rollouts import Batch, EvictReason, Rollout

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

    @property
    def found(self) -> bool:
        """True if it held anything, as after a crash or an earlier run."""
        return bool(self.waiting or self.steps or self.past_ids or self.next_step)


class Journal(Handed, Observer):
    """A folder that holds what a balancer has accepted and not yet finished. One process at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)
        self.recovered: Recovered | None = None
        """Content of the journal when it was opened."""
        self._store = Store(self.path)
        self._next_number = 0  # of a row
        self._writer: Writer | None = None  # from start() on
        self._core: BalancerCore  # from start() on
        self._restoring: Snapshot | None = None  # what the journal held, while the core takes it over
        self._done = deque[Done]()
        self._num_done = 0  # ids in _done

    # -- opening and closing -------------------------------------------------------------------------------------------

    async def recover(self, core: BalancerCore) -> None:
        """Open the journal, and let the core go on from what it holds.

        Raises like :meth:`open` and :meth:`BalancerCore.restore`; the journal is closed then.
        """
        # else the thread would go on with a journal that nobody closes
        with anyio.CancelScope(shield=True):
            snapshot = await anyio.to_thread.run_sync(self.open)
            try:
                # before restore(): what that evicts is written
                self.start(core)
                self._restoring = snapshot
                core.restore(snapshot, anyio.current_time())
            except BaseException:
                await self.aclose()
                raise
            finally:
                self._restoring = None  # it holds every rollout

    def open(self) -> Snapshot:
        """Take the lock, and read what is held. Blocks; :meth:`start` comes afterwards, in the event loop.

        Raises AlreadyInUseError if another process has it, JournalError if its disk is full or it cannot be read,
        WireError for another version's. O(bytes).
        """
        store = self._store
        try:
            store.open()
            try:
                snapshot = self._read()
            except BaseException:
                store.close()
                raise
        except DiskFullError as error:
            message = f"the journal {self.path} has no room to start. Make room first"
            raise DiskFullError(error.errno, message) from None
        self.recovered = Recovered(
            waiting=len(snapshot.waiting),
            in_flight=sum(batch.num_rollouts for batch in snapshot.in_flight),
            steps=tuple(batch.step for batch in snapshot.in_flight),
            past_ids=len(snapshot.past_ids),
            next_step=snapshot.next_step,
            torn_bytes=store.torn_bytes,
            damage=(*filter(None, [store.lost_commits]), *snapshot.set_aside),
        )
        self._log(self.recovered)
        return snapshot

    def _read(self) -> Snapshot:
        records = Records(self.leases)
        damaged: list[int] = []
        keys = dict(self._store.rows("select number, key from rows indexed by keys order by key, number"))
        for number, key, row in self._store.rows("select number, key, data from rows order by number"):
            name, indexed = row_name(number, key), keys.pop(number, None)
            if indexed == key:
                records.take(name, row)
            else:
                # a damaged key would put one rollout in the place of another without a word
                records.damage[name] = f"row {number}: {indexed} in the index, {key} in the row"
            if name in records.damage:
                damaged.append(number)
            else:  # a number that is taken out may be given again
                self._next_number = number + 1
        # As when a page of the table was replaced by an older one.
        records.damage |= {name: f"{name} cannot be reached" for name in map(row_name, keys, keys.values())}
        snapshot = records.snapshot(time.time())
        void = [name for name in records.damage if name.startswith("plan ")]
        self._store.begin([retract(damaged), remove(void)] if records.damage else ())
        self._follow(records)
        return snapshot

    def _follow(self, records: Records) -> None:
        self.follow(one for one in records.facts if isinstance(one, Attempt | PeerFact | Ended))
        self._done = deque(records.all_of(Done))
        self._num_done = sum(len(one.ids) for one in self._done)

    def _log(self, recovered: Recovered) -> None:
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
                "journal %s: recovered %d waiting rollouts and %d in flight (steps %s)",
                self.path,
                recovered.waiting,
                recovered.in_flight,
                list(recovered.steps),
            )

    def start(self, core: BalancerCore) -> None:
        """Begin to write what happens to a core, from the event loop's thread."""
        self._core = core
        # before the user's: one of these may acknowledge a batch as soon as it hears of it
        core.observers.insert(0, self)
        self._writer = Writer(self._store)
        self._writer.start()

    async def aclose(self) -> None:
        """Write what is enqueued, and release the lock. Idempotent; also where :meth:`start` was not called."""
        if self._writer is not None and not self._writer.leaving:
            self._writer.leaving = True
            # it may be opened again, for another balancer
            self._core.observers.remove(self)
            with suppress(JournalError, ClosedResourceError):
                await self.flush()
            await anyio.lowlevel.checkpoint()  # puts that were just written notice the end, and retract
        await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._store.close()

    def check_empty(self) -> None:
        """Raise ValueError if the journal holds anything, or may: no checkpoint can be loaded then."""
        if self.recovered is None or self.recovered.found:
            raise ValueError(
                f"load_state_dict() with the journal {self.path}: what that holds is newer than a "
                "checkpoint, and is restored on entering `async with`. Call acknowledge_through(step) instead; or, to "
                "go back to the checkpoint, enter a balancer with an empty journal, then load"
            )

    # -- puts; in the event loop ---------------------------------------------------------------------------------------

    def write(self, rollouts: Sequence[Rollout], step: int, size: GroupSize | None = None) -> Writing:
        """Rollouts that are about to be accepted take the last place in the queue, with the ``size`` that is declared
        of their group. Where they are not accepted, :meth:`retract` must follow.

        Raises RolloutError if they could never fit, ClosedResourceError once closed.
        """
        for rollout in rollouts:
            if rollout.nbytes > MAX_ROLLOUT_BYTES:
                raise RolloutError(
                    f"rollout {rollout.rollout_id!r} ({rollout.nbytes} bytes) is too large for a journal, which takes "
                    f"{MAX_ROLLOUT_BYTES}. Put large tensors elsewhere, and their names into metadata"
                )
        # by the wall clock: only that means something to the next process
        rows: list[HeldRollout | Fact] = [HeldRollout(rollout, time.time(), step) for rollout in rollouts]
        if size is not None:
            # In the same transaction as the rollouts: after a crash a group has both or neither.
            rows.append(Group(size.group_id, size.size, closed=False))
        return self._enqueue(Writing(rows, may_be_refused=True))

    def retract(self, item: Writing) -> None:
        """Rollouts that were written have not been accepted after all."""
        self._change(Writing(retracted=range(item.number, item.number + len(item.rows))))

    def put(self, *facts: Fact) -> None:
        """Facts hold now, in place of those with the same keys. On the disk by the time the next put or :meth:`flush`
        returns."""
        self._change(Writing(facts))

    async def flush(self) -> None:
        """Return once all that was enqueued so far is on the disk. Waits while it is full; raises JournalError if it is
        failing, ClosedResourceError if it is closed meanwhile."""
        await self._enqueue(Writing()).written()

    def _change(self, item: Writing) -> None:
        with suppress(ClosedResourceError):  # after the end nobody writes any more; it will be delivered again
            self._enqueue(item)

    def _enqueue(self, item: Writing) -> Writing:
        if self._writer is None:
            raise ClosedResourceError(CLOSED)
        # numbered in the event loop, in the order of the calls: that in which rollouts wait again
        item.number, self._next_number = self._next_number, self._next_number + len(item.rows)
        self._writer.enqueue(item)
        return item

    # -- events --------------------------------------------------------------------------------------------------------

    def dispatched(self, batch: Batch) -> None:
        """A batch is about to be handed out: its plan, to be delivered again as it is."""
        self.put(plan_of(batch, self._core.in_flight.left_out(batch.step)), self._totals())

    def acknowledged(self, batch: Batch) -> None:
        # Rollouts that no rank could get are not among the past ids: they may be put again.
        ids, past = [r.rollout_id for r in batch.rollouts if not r.is_padding], self._core.ids.past
        # with the rollouts, in one transaction: a plan without them would be damage
        self._finish(ids, [name for name in ids if name in past], f"plan {batch.step}", f"attempt {batch.step}")

    def gave_up(self, evicted: Sequence[tuple[Rollout, EvictReason]]) -> None:
        """Rollouts are held no more; lost ones may be put again."""
        done = [rollout.rollout_id for rollout, reason in evicted if reason != "lost"]
        self._finish([rollout.rollout_id for rollout, _ in evicted], done)

    def group_declared(self, group_id: str, declared: Declared | None) -> None:
        if declared is None:
            self._change(Writing(void=[f"group {group_id}"]))
        else:
            self.put(Group(group_id, *declared))

    def version_set(self, version: int) -> None:
        self.put(self._totals())

    def restored(self, snapshot: Snapshot) -> None:
        """A checkpoint is taken over. On the disk by the time the next put returns."""
        # what came out of the journal is in it already
        if snapshot is self._restoring:
            return
        records = Records()
        records.facts = facts_of(snapshot)
        self.put(*records.facts)
        self._follow(records)
        # one row each, as puts have: a rollout that is done takes its row with it
        for held in held_of(snapshot, time.time()):
            self._change(Writing([held]))

    def _finish(self, ids: Iterable[str], past: Sequence[str], *void: str) -> None:
        """Rollouts are held no more, and facts of the keys ``void`` hold no more. ``past``: ids that are refused from
        now on, instead of those that are more than ``RolloutIds.remember`` back."""
        facts: list[Fact] = [self._totals()]
        keys = [*map(rollout_key, ids), *void]
        done, remember = self._done, self._core.ids.remember
        if past and remember:
            done.append(Done(done[-1].number + 1 if done else 0, [*past]))
            facts.append(done[-1])
            self._num_done += len(past)
            # whole rows, so that a few more ids are known than must be
            while self._num_done - len(done[0].ids) >= remember:
                self._num_done -= len(done[0].ids)
                keys.append(done.popleft().key)
        self._change(Writing(facts, void=keys))

    def _totals(self) -> Totals:
        core = self._core
        departed = core.buffer.groups.departed()
        return Totals(core.in_flight.next_step, core.staleness.version, core.counts.totals(), departed)

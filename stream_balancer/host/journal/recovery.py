"""Events of a balancer, into its journal; and the journal's rollouts back into a balancer.

Two things wait for the disk, and not here: a put for its rollouts (:mod:`stream_balancer.host.puts`), a batch for
its plan (:mod:`stream_balancer.host.batches`). All else is written once it has happened, and may be lost in a
crash: then it happens again. Rows change in the order of the events, so an id that was evicted as lost and put again is
held.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import anyio
import anyio.to_thread

from stream_balancer.core.groups import Declared
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.observer import Observer
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.host.journal.journal import Journal, Recovered
from stream_balancer.host.journal.store import Statement, drop, put, remove
from stream_balancer.host.plan_rows import plan_of
from stream_balancer.host.records import Done, Records, State
from stream_balancer.types import Batch, EvictReason, Rollout

__all__ = ["JournalObserver"]


class JournalObserver(Observer):
    """Keeps a core's journal; first fills the core from it."""

    def __init__(self, journal: Journal, core: BalancerCore) -> None:
        self.journal = journal
        self.recovered: Recovered | None = None
        """Content of the journal; None before :meth:`recover`."""
        self._core = core
        self._state, self._done = State(), deque[Done]()
        self._num_done = 0  # ids in _done
        self._restoring: Snapshot | None = None  # what the journal held, while the core takes it over

    async def recover(self, wake_consumer: Callable[[], object]) -> None:
        """Open the journal, and let the core go on from what it holds; once. ``wake_consumer()`` is called when puts
        wait for ``max_bytes``: a batch has to leave then, so that its acknowledgement makes room.

        Raises like :meth:`Journal.open` and :meth:`BalancerCore.restore`; the journal is closed then.
        """
        if self.recovered is not None:
            return

        def flush() -> None:
            self._core.force_flush()
            wake_consumer()

        # else the thread would go on with a journal that nobody closes
        with anyio.CancelScope(shield=True):
            snapshot, recovered = await anyio.to_thread.run_sync(self.journal.open)
            self._follow(self.journal.records)
            self._restoring = snapshot
            try:
                # before restore(): what that evicts is written
                self.journal.start(flush)
                self._core.restore(snapshot, anyio.current_time())
            except BaseException:
                await self.journal.aclose()
                raise
            finally:
                self._restoring = None  # it holds every rollout
        self.recovered = recovered

    def _follow(self, records: Records) -> None:
        self._state, self._done = records.state, deque(records.done)
        self._num_done = sum(len(one.ids) for one in self._done)

    def check_empty(self) -> None:
        """Raise ValueError if the journal holds anything, or may: no checkpoint can be loaded then."""
        if self.recovered is None or self.recovered.found:
            raise ValueError(
                f"load_state_dict() with the journal {self.journal.path}: what that holds is newer than a "
                "checkpoint, and is restored on entering `async with`. Call acknowledge_through(step) instead; or, to "
                "go back to the checkpoint, enter a balancer with an empty journal, then load"
            )

    # -- events --------------------------------------------------------------------------------------------------------

    def dispatched(self, batch: Batch) -> None:
        """A batch is about to be handed out: its plan, to be delivered again as it is."""
        state = self._state
        state.next_step = max(state.next_step, batch.step + 1)
        # at dispatches only: totals of what puts change would cost a row at each put
        state.counts = self._core.state.counts.totals()
        state.departed = self._core.state.buffer.groups.departed()
        self.journal.change(put(plan_of(batch), state))

    def acknowledged(self, batch: Batch) -> None:
        # Rollouts that no rank could get are not among the past ids: they may be put again.
        ids, past = [r.rollout_id for r in batch.rollouts if not r.is_padding], self._core.state.ids.past
        self._state.acknowledged = self._core.state.counts.acknowledged
        # with the rollouts, in one transaction: a plan without them would be damage
        void = drop(f"plan {batch.step}", f"acked {batch.step}")
        self.journal.change(remove(ids), void, *self._file([name for name in ids if name in past]), put(self._state))

    def gave_up(self, evicted: Sequence[tuple[Rollout, EvictReason]]) -> None:
        """Rollouts are held no more; lost ones may be put again."""
        state = self._state
        for _, reason in evicted:
            state.evicted[reason] = state.evicted.get(reason, 0) + 1
        state.departed = self._core.state.buffer.groups.departed()
        done = [rollout.rollout_id for rollout, reason in evicted if reason != "lost"]
        self.journal.change(remove([rollout.rollout_id for rollout, _ in evicted]), *self._file(done), put(state))

    def group_declared(self, group_id: str, declared: Declared | None) -> None:
        self.journal.declare(group_id, declared)

    def version_set(self, version: int) -> None:
        self._state.version = version
        self.journal.change(put(self._state))

    def restored(self, snapshot: Snapshot) -> None:
        """A checkpoint is taken over."""
        # what came out of the journal is in it already
        if snapshot is not self._restoring:
            records = Records.of(snapshot, time.time())
            self._follow(records)
            self.journal.adopt(records)

    def _file(self, ids: Sequence[str]) -> Iterator[Statement]:
        """Ids that are done. Rows go whose ids are more than ``remember_ids`` back."""
        done, remember_ids = self._done, self._core.config.remember_ids
        if not ids or not remember_ids:
            return
        done.append(Done(done[-1].number + 1 if done else 0, list(ids), self._state.next_step))
        yield put(done[-1])
        self._num_done += len(ids)
        # whole rows, so that a few more ids are known than must be
        while self._num_done - len(done[0].ids) >= remember_ids:
            self._num_done -= len(done[0].ids)
            yield drop(done.popleft().key)

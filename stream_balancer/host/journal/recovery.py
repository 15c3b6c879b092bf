"""What happens to a balancer, into its journal; and the journal's rollouts back into a balancer.

Two things wait for the disk, and not here: a put for its rollouts (:mod:`stream_balancer.host.puts`), a batch for
its plan (:mod:`stream_balancer.host.batches`). All else is written once it has happened, and may be lost in a
crash: then it happens again.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.to_thread

from stream_balancer.core.groups import Declared
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.observer import Observer
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.host.journal.journal import Journal, Recovered
from stream_balancer.types import Batch, EvictReason, Rollout

__all__ = ["JournalObserver"]


class JournalObserver(Observer):
    """Keeps a core's journal; first fills the core from it."""

    def __init__(self, journal: Journal, core: BalancerCore) -> None:
        self.journal = journal
        self.recovered: Recovered | None = None
        """What the journal held; None before :meth:`recover`."""
        self._core = core
        self._changes = journal.changes
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

        with anyio.CancelScope(shield=True):
            snapshot, recovered = await anyio.to_thread.run_sync(self.journal.open, self._core.config.remember_ids)
            self._restoring = snapshot
            try:
                self.journal.start(flush)
                self._core.restore(snapshot, anyio.current_time())
            except BaseException:
                await self.journal.aclose()
                raise
            finally:
                self._restoring = None  # it holds every rollout
        self.recovered = recovered

    def check_empty(self) -> None:
        """Raise ValueError if the journal holds anything, or may: no checkpoint can be loaded then."""
        if self.recovered is None or self.recovered.found:
            raise ValueError(
                f"load_state_dict() with the journal {self.journal.path}: what that holds is newer than a "
                "checkpoint, and is restored on entering `async with`. Call acknowledge_through(step) instead; or, to "
                "go back to the checkpoint, enter a balancer with an empty journal, then load"
            )

    def dispatched(self, batch: Batch) -> None:
        counts, departed = self._core.state.counts.totals(), self._core.state.buffer.groups.departed()
        self.journal.change(self._changes.dispatched(batch, counts, departed))

    def acknowledged(self, batch: Batch) -> None:
        # rollouts that no rank could get are not among the past ids: they may be put again
        state = self._core.state
        done = [r.rollout_id for r in batch.rollouts if r.rollout_id in state.ids.past]
        self.journal.change(self._changes.acknowledged(batch, done, state.counts.acknowledged))

    def evicted(self, rollout: Rollout, reason: EvictReason) -> None:
        departed = self._core.state.buffer.groups.departed()
        self.journal.change(self._changes.evicted(rollout.rollout_id, reason, departed))

    def group_declared(self, group_id: str, declared: Declared | None) -> None:
        self.journal.change(self._changes.declared(group_id, declared))

    def version_set(self, version: int) -> None:
        self.journal.change(self._changes.versioned(version))

    def restored(self, snapshot: Snapshot) -> None:
        """A checkpoint is taken over."""
        if snapshot is not self._restoring:
            self.journal.adopt(snapshot)

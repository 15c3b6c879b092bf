"""What happens to a balancer, into its journal, and the journal's rollouts back into a balancer.

The durable waits are elsewhere: a put waits for its rollouts in :mod:`stream_balancer.controller.puts`, a batch for its
plan in :mod:`stream_balancer.controller.batches`. All else is written when it has happened, and may be lost in a crash:
then it happens again.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.to_thread

from stream_balancer.controller.journal import Journal, Recovered
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.observer import Observer
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.types import Batch, EvictReason, Rollout

__all__ = ["JournalObserver"]


class JournalObserver(Observer):
    """Keeps a core's journal; first fills the core from it."""

    def __init__(self, journal: Journal, core: BalancerCore) -> None:
        self._journal = journal
        self._core = core
        self._own: Snapshot | None = None  # what the journal held, while the core takes it over

    async def recover(self, on_blocked: Callable[[], object]) -> Recovered:
        """Open the journal, and let the core go on from what it holds. ``on_blocked()``: see :meth:`Journal.start`.

        Raises like :meth:`Journal.open` and :meth:`BalancerCore.restore`; the journal is closed then.
        """
        with anyio.CancelScope(shield=True):
            snapshot, recovered = await anyio.to_thread.run_sync(self._journal.open, self._core.config.remember_ids)
            self._own = snapshot
            try:
                self._journal.start(on_blocked)
                self._core.restore(snapshot, anyio.current_time())
            except BaseException:
                await self._journal.aclose()
                raise
            finally:
                self._own = None  # it holds every rollout
        return recovered

    def dispatched(self, batch: Batch) -> None:
        """See :class:`Observer`."""
        self._journal.dispatched(batch, self._core.state.counts.totals(), self._core.state.buffer.groups.departed())

    def acknowledged(self, batch: Batch) -> None:
        """See :class:`Observer`."""
        self._journal.acknowledged(batch)

    def evicted(self, rollout: Rollout, reason: EvictReason) -> None:
        """See :class:`Observer`."""
        self._journal.evicted([rollout.rollout_id], reason, self._core.state.buffer.groups.departed())

    def version_set(self, version: int) -> None:
        """See :class:`Observer`."""
        self._journal.versioned(version)

    def restored(self, snapshot: Snapshot) -> None:
        """A checkpoint is taken over. Of what the journal itself held, plans for other ranks are void."""
        if snapshot is not self._own:
            self._journal.adopt(snapshot)
            return
        for batch in snapshot.in_flight:
            if len(batch.ranks) != self._core.config.dp_size:
                self._journal.returned(batch.step)  # its rollouts wait again

"""Puts: what becomes of rollouts between the call and the buffer, in one order for all who put.

::

    checked --> filtered by accept= --> journalled --> waiting for room --> held
       |                |  |                |                 |
       |                |  `-> evicted      |                 |
       `----------------`-------------------`-----------------`---> refused (raises), or cancelled

One :class:`PendingPut` for each put, whoever makes it: ``put``, ``put_nowait``, ``put_group``, a slot's put, a remote
producer's, Ray's. :meth:`PendingPut.begin` goes as far as it can go without waiting, and takes the last place in the
queue where it cannot; what it returns waits for the rest. Most puts never wait.

**If a put is cancelled, or raises, the rollout was not accepted.** So nothing is awaited after the rollouts are taken,
and whoever waits for room is woken and takes for itself. What the journal has on the disk by then is retracted.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import anyio
import anyio.lowlevel

from stream_balancer.core.accept import Accept, call_accept, decision_of
from stream_balancer.core.groups import GroupSize, closed
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.throttle import check_reserve
from stream_balancer.errors import ClosedResourceError, WouldBlock
from stream_balancer.host.journal import Journal, Writing
from stream_balancer.host.journal.handed import Handed
from stream_balancer.host.wakeups import StallReporter, Waiter, Wakeups
from stream_balancer.slots import Reservation, Slot, check_group
from stream_balancer.types import Rollout

Rest: TypeAlias = Coroutine[Any, Any, object] | None
"""Returns once the rollouts are held; if it is cancelled, or raises, they were not accepted. None: they are held."""


class Puts(Wakeups):
    """The way into a balancer's buffer, and slots for rollouts that are still to be generated. How many may begin is
    counted by the throttle; here is who gets a slot, and when (:class:`~stream_balancer.slots.Admits`)."""

    def __init__(
        self, core: BalancerCore, reporter: StallReporter, accept: Accept | None, journal: Journal | None
    ) -> None:
        super().__init__(core, reporter)
        self.accept = accept
        self.journal = journal
        """Where rollouts are written before their put returns; None without one."""
        self.handed = journal or Handed()

    async def put(
        self, rollouts: Sequence[Rollout], *, complete: bool | None = None, size: GroupSize | None = None
    ) -> None:
        """Return once they are accepted; see :class:`PendingPut`, and :meth:`StreamBalancer.put`."""
        self.enter("put")
        await self.checkpoint()  # before they are taken: nothing may be awaited after it
        rest = PendingPut(self, rollouts, complete=complete, size=size).begin(self.now("put"))
        if rest is not None:
            await rest

    def evict_lost(self, lost: Callable[[Rollout], bool]) -> list[str]:
        """Evict waiting rollouts whose tokens are gone with their producer. -> their ids."""
        ids = self.core.evict_lost(lost)
        self.changed()
        return ids

    # slots

    def reserve(self, count: int) -> Reservation:
        """A reservation that was not entered yet. Raises like :meth:`StreamBalancer.reserve`."""
        check_reserve(self.core.config, count)
        return Reservation(self, count)

    async def admit(self, count: int) -> Slot:
        """Wait until ``count`` more may begin. If cancelled, nothing was reserved."""
        self.enter("reserve")
        await anyio.lowlevel.checkpoint()
        begun = self.begin(count)
        return begun if isinstance(begun, Slot) else await begun

    def begin(self, count: int) -> Slot | Coroutine[Any, Any, Slot]:
        """A slot; or a place in the queue, and what is returned must be awaited for it. Raises as :meth:`admit`."""
        # nobody overtakes those who wait
        if not self.reserves.waiters and (slot := self.try_admit(count)) is not None:
            return slot
        waiter = Waiter()
        waiter.group_id, waiter.count = None, count
        rest = self.reserves.wait(waiter, partial(self.try_admit, count))
        self.wake_consumer()  # nobody may begin: the window may be as full as it gets
        return rest

    def try_admit(self, count: int, began: int | None = None) -> Slot | None:
        """A slot, if so many may begin now. ``began``: the version of one that was given back because its producer was
        taken for lost, which has generated on meanwhile; None if others have begun since, so that it would break the
        bound."""
        if self.closed or self.core.ended:
            raise ClosedResourceError("reserve() after end() or aclose(): the balancer takes no more rollouts")
        # who resumes was admitted under the knobs of that time
        if began is None:
            check_reserve(self.core.config, count)  # the knobs may have changed while it waited
        now = self.core.staleness.version or 0
        # never newer than now: a restarted controller may know an older version than the producer
        version = now if began is None else min(began, now)
        if self.throttle.room(self.core, version) < count:
            self.wake_consumer()
            return None
        return Slot(self, self.throttle.admit(version, count), version, count)

    async def put_in(self, slot: Slot, rollouts: Sequence[Rollout], complete: bool | None) -> None:
        """A slot's put is a put like any other."""
        await self.put(rollouts, complete=complete)

    async def stale(self, slot: Slot) -> None:
        """Wait until a rollout of this slot would be too old."""
        while not self.core.staleness.is_too_old(slot.version):
            await self.version_changes()

    def settle(self, slot: Slot, count: int) -> None:
        """So many rollouts of a slot were put, or never will be."""
        if count:
            self.throttle.settle(slot.number, count)
            self.changed()


class PendingPut(Waiter):
    """A put of one rollout, or of siblings. All are accepted, or none. ``complete``: of siblings, whether no more will
    come; None for one rollout by itself. ``size``: what is declared of a group without rollouts."""

    __slots__ = ("_answer", "_complete", "_may_wait", "_rollouts", "_shell", "_size")

    def __init__(
        self, shell: Puts, rollouts: Sequence[Rollout], *, complete: bool | None = None, size: GroupSize | None = None
    ) -> None:
        first = rollouts[0] if rollouts else None  # perhaps no rollout: that is refused later
        self.group_id = getattr(first, "group_id", None) if size is None else size.group_id
        self._shell, self._rollouts, self._complete, self._size = shell, rollouts, complete, size
        self.count = len(rollouts)
        self._answer: tuple[list[str], bool] | None = None

    def begin(self, now: float, *, may_wait: bool = True) -> Rest:
        """Go as far as possible without waiting; what is returned must be awaited. Raises what refuses the rollouts;
        WouldBlock where it would have to wait and may not."""
        shell, self._may_wait = self._shell, may_wait
        if shell.closed:
            shell.check_open("put")
        if shell.journal is not None and not may_wait:
            raise WouldBlock("put_nowait() cannot wait for the journal's disk, where accepted rollouts are: use put()")
        # most puts are one rollout, which cannot disagree with its group
        if self._complete is not None or (len(self._rollouts) != 1 and self._size is None):
            check_group(self._rollouts)
            self._size = closed(self.group_id) if self._complete else None
        # before accept= is asked: it may look at the masks
        if shell.core.admission.looks_at_masks:
            self._rollouts = shell.core.admission.with_loss_masks(self._rollouts)
        return self._go_on(now) if shell.accept is None else self._filter(shell.accept, now)

    # -- filtered by accept= -------------------------------------------------------------------------------------------

    def _filter(self, accept: Accept, now: float) -> Rest:
        """Ask ``accept``, unless others of the group must still come: then the last of them asks."""
        core = self._shell.core
        core.check(self._rollouts, self._size)  # a bad rollout is refused, whatever accept= would say
        question, before = core.admission.completed_by(self._rollouts, self._size), self._answer
        asked = [rollout.rollout_id for rollout in question or ()]
        # None: siblings are still to come, and whoever brings the last of them asks for all
        answer: bool | Awaitable[Any] = True
        if question is not None:
            # While an async accept= thought, any other task may have run: a sibling may have been put, evicted or
            # abandoned, so that the answer is about a group that is no more.
            answer = before[1] if before is not None and before[0] == asked else call_accept(accept, question)
        if not isinstance(answer, bool):
            if self._may_wait:
                return self._finish_filter(asked, answer)
            if inspect.iscoroutine(answer):
                # the filter was asked in vain, and is asked again by the next put
                answer.close()  # or Python warns of a coroutine that was never awaited
            raise WouldBlock("put_nowait() cannot wait for an accept= that is async: use put()")
        if answer:
            return self._go_on(now)
        # needs no room, so it is never queued: a refused one must not wait for a place
        core.filter_out(self._rollouts, now, self._size)
        self._shell.changed()  # siblings that waited have made room
        return None

    async def _finish_filter(self, asked: list[str], answer: Awaitable[Any]) -> None:
        """``asked``: ids of the rollouts that the answer is about."""
        self._answer = asked, decision_of(await answer)
        rest = self.begin(anyio.current_time())
        if rest is not None:
            await rest

    # -- journalled ----------------------------------------------------------------------------------------------------

    def _go_on(self, now: float) -> Rest:
        core, journal, size = self._shell.core, self._shell.journal, self._size
        if journal is None:
            return self._take_or_queue(now)
        # Checked again when it is taken: what is legal now may be a duplicate once the disk has answered.
        core.check(self._rollouts, size)  # a bad rollout is not written
        # A group that takes no more stays as it is, whatever is declared of it.
        before = None if size is None else core.buffer.groups.declared(size.group_id)
        written = journal.write(
            self._rollouts, core.in_flight.next_step, None if before is not None and before.closed else size
        )
        return self._finish_journal(journal, written)

    async def _finish_journal(self, journal: Journal, written: Writing) -> None:
        try:
            # Between here and the taking below the rollouts are on the disk and not in the buffer. A crash then brings
            # back rollouts whose put had not returned, which a retry finds as duplicates: never lost, never doubled.
            await written.written()
            self._shell.check_open("put")
            rest = self._take_or_queue(anyio.current_time())
            if rest is not None:
                await rest
        except BaseException:
            # on the disk, perhaps, and not accepted: a restart must not bring it back
            journal.retract(written)
            if self._size is not None:
                # the earlier declaration of the group still holds
                name, groups = self._size.group_id, self._shell.core.buffer.groups
                journal.group_declared(name, groups.declared(name))
            raise

    # -- waiting for room ----------------------------------------------------------------------------------------------

    def _take_or_queue(self, now: float) -> Rest:
        core, queue = self._shell.core, self._shell.puts
        # those who wait go first; but a sibling needs no room, and may be what a full buffer waits for
        if queue.waiters and self._rollouts and not core.admission.is_sibling(self._rollouts[0]):
            core.check(self._rollouts, self._size)  # a bad rollout is refused now, not after a long wait
        elif self._take(now):
            return None
        if not self._may_wait:
            raise WouldBlock
        return queue.wait(self, self._try_again)

    def _try_again(self) -> Literal[True] | None:
        self._shell.check_open("put")
        return True if self._take(anyio.current_time()) else None

    def _take(self, now: float) -> bool:
        """Into the buffer, if there is room. Nothing may be awaited after it."""
        shell = self._shell
        try:
            shell.core.add_all(self._rollouts, now, self._size)
        except WouldBlock:
            shell.wake_consumer()  # no room means that the window counts as full
            return False
        if self._size is not None:
            shell.changed()  # fewer places are kept for siblings
        # Last: it may wake tasks, which find the rollouts held. Nobody else has more room for them.
        shell.wake_consumer()
        if self.group_id is not None:
            shell.puts.wake_siblings(self.group_id)
        return True

"""Batches to ranks: ``serve``. On the controller::

    import stream_balancer as sb

    async with sb.StreamBalancer(config) as balancer, anyio.create_task_group() as tasks:
        tasks.start_soon(sb.serve, balancer, "tcp://127.0.0.1:29400")
        ...                                        # await balancer.put(rollout), in rollout workers
        balancer.end()                             # serve returns once every rank has acknowledged everything

and on every rank, a process of its own::

    for step in sb.RankFeed("tcp://127.0.0.1:29400", rank=rank, dp_size=dp_size):
        for micro_batch in step:
            train(micro_batch.packed())

Inside an initialised torch.distributed world (torchrun) ``RankFeed()`` and ``TorchTransport.in_world()`` meet in that
world's store instead; the controller may be a thread of rank 0 that runs ``anyio.run(...)``.

Four tasks, and what each waits for::

    attend       peers      joins, calls and reports of all peers, one after the other: they become facts
    plan         room       a batch is asked for when every rank has room: until then the window stays full
    act          facts      orders of the ledger are carried out; a lost rank whose time is over is given up
    reporter     silence    a line in the log
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Literal, TypeAlias

import anyio

from stream_balancer.config import BalancerConfig
from stream_balancer.core.observer import Observer
from stream_balancer.core.steps.state import Item
from stream_balancer.errors import AlreadyInUseError, ConfigError
from stream_balancer.host.balancer import StreamBalancer
from stream_balancer.host.batches import Batches
from stream_balancer.host.peers import Peers
from stream_balancer.host.plans import StepPlan, items_of, uid_of
from stream_balancer.host.ranks import Member
from stream_balancer.host.records import Acked
from stream_balancer.host.transport import TorchTransport, Transport
from stream_balancer.net.listener import split_address
from stream_balancer.rollouts import Batch

logger = logging.getLogger("stream_balancer.dispatch")

OnRankLoss: TypeAlias = Literal["raise", "replan"]


async def serve(
    balancer: StreamBalancer,
    transport: Transport | str,
    *,
    rejoin_timeout_s: float = 0.0,
    on_rank_loss: OnRankLoss = "raise",
) -> None:
    """Deliver every batch of ``balancer`` to the ranks that connect to ``transport``, until ``batches()`` ends.

    ``transport``: an address "tcp://host:port", at which this listens; or a :class:`TorchTransport`.

    Returns when every rank has acknowledged everything and was sent the end. A rank that is lost may come back within
    ``rejoin_timeout_s`` (``math.inf`` = for ever) under a new incarnation and gets again what it had not acknowledged,
    same plan, same order. The default 0 raises at once: without an elastic launcher nobody would come back. A rank that
    was lost before ``serve`` began is waited for without limit, as one that has not come yet.

    ``on_rank_loss="replan"`` goes on without a rank that has not come back in that time: its unfinished work is planned
    again over the ranks that are left, within the step. The next batch is for one rank fewer; should the lost one come
    after all, for one more. Where ranks meet at every micro-batch, all ranks begin the step
    again. The last rank's loss is raised. See docs/elastic.md.

    ``"replan"`` is for ranks that iterate their step and call ``step.finish()``. Raises ConfigError for what
    docs/tuning.md lists.

    You may acknowledge too, with ``balancer.acknowledge_through(step)`` at a checkpoint: what ranks report of these
    steps later changes nothing, and a rank that comes back does not get them again.

    When nothing was dispatched for the balancer's ``report_after_s``, a warning in the log says why: which rank gives
    no credit, or how many rollouts wait for what; again after twice that time, and so on.

    Another ``dp_size`` (:meth:`StreamBalancer.reconfigure`) holds from the next batch on. A rank that is no more does
    what it was given, and its iteration ends; a new one is waited for. See docs/elastic.md.

    If ``serve`` is cancelled or raises, nothing is lost: what was not acknowledged stays in flight in the balancer, and
    the next ``serve`` delivers it again. Raises ValueError at once if ``transport`` is for another number of ranks than
    ``balancer``; AlreadyInUseError while another ``serve`` delivers its batches; RankLostError, naming rank, step and
    cause.
    """
    if not rejoin_timeout_s >= 0:
        raise ValueError(f"rejoin_timeout_s must be >= 0 (math.inf = wait for ever), not {rejoin_timeout_s}")
    if on_rank_loss not in ("raise", "replan"):
        raise ValueError(f"on_rank_loss must be 'raise' or 'replan', not {on_rank_loss!r}")
    if not isinstance(balancer, StreamBalancer):
        raise TypeError(f"serve() takes a StreamBalancer, in its event loop, not a {type(balancer).__name__}")
    if balancer.parts.rank_states is not None:
        raise AlreadyInUseError(
            "another serve() delivers this balancer's batches already, and both would send their ranks parts of them: "
            "let all ranks and producers connect to one. To serve elsewhere, cancel that one first"
        )
    config = balancer.config
    if on_rank_loss == "replan" and (mini := config.mini_batches) > 1:
        # the constructor of the balancer cannot check it: options of serve() are not known there
        raise ConfigError(
            f"on_rank_loss='replan' with mini_batches={mini}: ranks meet several times in a step, and what "
            "changes hands in between cannot join the meetings that are over. Leave one of them out"
        )
    async with AsyncExitStack() as stack:
        if isinstance(transport, str):
            host, port = split_address(transport)
            listening = TorchTransport.listen(dp_size=config.dp_size, host=host, port=port, advertise=host)
            transport = await stack.enter_async_context(listening)
        elif config.dp_size != transport.dp_size:
            raise ValueError(
                f"the transport is for dp_size={transport.dp_size} ranks, but the balancer plans for "
                f"dp_size={config.dp_size}. Give both the same number of data-parallel ranks; if that has changed "
                "since the transport was made, call transport.resize() first"
            )
        run = _Server(balancer, transport, rejoin_timeout_s, replan=on_rank_loss == "replan")
        await run.serve()


class _Server(Peers, Observer):
    """A run of ``serve``: when a step is planned, and what follows from facts. Its state is that of
    :class:`~stream_balancer.host.in_flight.InFlight`."""

    _failure: Exception | None = None

    async def serve(self) -> None:
        for batch in self.balancer.in_flight():
            self.balancer.nack(batch.step)  # batches() gives all of them again, in the order of their steps
        # from here on nack() is refused, and why_no_batch() knows of the ranks
        reporter = self.shell.reporter
        before = reporter.why, reporter.log
        self.shell.rank_states, reporter.why, reporter.log = self.ranks.states, self.why_stalled, logger
        self.balancer.observers.append(self)
        try:
            async with anyio.create_task_group() as tasks:
                # nobody sets this event: the reporter waits as long as serve runs
                tasks.start_soon(self.shell.reporter.wait, anyio.Event())
                # Planning is no task of its own: its end is the end of the others.
                await self._or_fail(partial(self._plan, tasks), tasks)
                tasks.cancel_scope.cancel()
        finally:
            self.shell.rank_states, reporter.why, reporter.log = None, *before
            self.balancer.observers.remove(self)
            # before the next serve(): its ranks must dial again, and say anew what they have
            self.leave()
            self.handed.end()
        if self._failure is not None:
            raise self._failure

    async def _or_fail(self, job: Callable[[], Awaitable[None]], tasks: anyio.abc.TaskGroup) -> None:
        """An error of one task ends all, and is raised by ``serve`` as it is, not in a group."""
        try:
            await job()
        except Exception as error:  # noqa: BLE001 - raised by run()
            self._failure = self._failure or error
            tasks.cancel_scope.cancel()

    # -- the plan ------------------------------------------------------------------------------------------------------

    async def _plan(self, tasks: anyio.abc.TaskGroup) -> None:
        """Step after step, until ``batches()`` ends and every rank is through."""
        self._follow_the_ranks()
        batches = self.balancer.batches(auto_ack=False)
        await self._restore(batches)
        # after what was in flight is known: ranks say at once what they have of it
        for job in (self.attend, self._act):
            tasks.start_soon(self._or_fail, job, tasks)
        while await self._next_step(batches):
            pass
        self.shell.reporter.moved()
        self.ledger.end()
        self.wake()
        await self._until(lambda: not self.ranks.unfinished)
        # what they still say after their last acknowledgement is answered: statistics(), set_version()
        with anyio.move_on_after(_LEAVE_S):
            await self._until(lambda: not self.ranks.connected)
        if left := self.ranks.connected:
            names = ", ".join(member.name for member in left)
            logger.warning(
                "%s: all is done, and the feed was not closed for %d s. serve() ends without; close() a feed that is "
                "not iterated to its end",
                names,
                _LEAVE_S,
            )
        self.is_over = True

    async def _next_step(self, batches: Batches) -> bool:
        """Ask for a batch once every rank has room, and begin its step. False: no more come.

        As late as possible: until then rollouts stay in the window, where later ones may still make a better step.
        """
        # Once nothing more comes, nobody need have room for it: after a restart, ranks may have left that know it.
        await self._until(lambda: self._wants_step() or self.core.finished)
        ready_at = anyio.current_time()
        batch = await anext(batches, None)
        if batch is None:
            return False
        plan = self.plans[batch.step]
        plan.ready_s = {one: max(ready_at - self.ranks[one].since, 0.0) for one in plan.ranks}
        # ranks may have come or gone while the batch was written
        if len(batch.ranks) != len(plan.ranks) or plan.ranks != (*self.ledger.members,) or not self._all_there():
            batches.give_back(batch)
            return True
        self.ledger.planned(batch.step, self._items(plan), uid=plan.uid)
        for member in self.ranks.values():
            member.note_readiness()
        self.wake()
        return True

    def _wants_step(self) -> bool:
        is_full = len(self.ledger.members) == self.balancer.config.dp_size
        # Ranks that are to do the work of lost ones in earlier steps must not begin with later ones.
        is_settled = is_full and not any(step.settling for step in self.ledger.steps.values())
        return is_settled and self.ledger.wants_step and self._all_there()

    def _all_there(self) -> bool:
        return all(self.ranks[one].takes_part for one in self.ledger.members)

    def _planned(self, batch: Batch) -> StepPlan:
        ranks = self.ledger.members
        plan = StepPlan((*ranks,), batch, uid_of(batch, ranks))
        self.plans[batch.step] = plan
        return plan

    def dispatched(self, batch: Batch) -> None:
        """A step is planned, and about to be written: with it, which ranks get it, before these can meet."""
        # of a step that goes on after a restart, there is a plan
        is_planned = batch.step in self.ledger.steps
        self.note(self.plans[batch.step] if is_planned else self._planned(batch))

    def _items(self, plan: StepPlan) -> list[Item]:
        return items_of(plan, lockstep=self.lockstep)

    # -- a restart -----------------------------------------------------------------------------------------------------

    async def _restore(self, batches: Batches) -> None:
        """Steps that were in flight before, or in the journal, go on, as they were planned or planned anew."""
        core, ledger = self.core, self.ledger
        while (before := core.in_flight.next_redelivery()) is not None:
            noted = self._noted_of(before)
            if noted is None:
                plan = self.plans[(await anext(batches)).step]
            else:
                plan = self.plans[before.step] = StepPlan((*noted.planned_for,), before, noted.uid)
            facts = noted or Acked(before.step, plan.uid)
            ledger.restore(
                before.step, plan.uid, self._items(plan),
                # others were given their parts before the crash: they must not be waited for
                [one for one in plan.ranks if one not in facts.lost],
                acked=facts.ranks, gone=facts.gone,
                remade=len(plan.ranks) != len(before.ranks),
            )  # fmt: skip
            if noted is not None:
                core.give_as_planned()
        # steps below are done: whoever still has one is told to drop it
        ledger.last_acked = min(self.plans, default=core.in_flight.next_step) - 1
        if self.replan:
            # Ranks that were there before are lost, if they do not come back: those that would meet in a step to come,
            # or have a part in one under way.
            came = {came.rank for came in self.handed.came}
            self.ranks.expect(came.intersection(ledger.members).union(*(s.participants for s in ledger.steps.values())))

    def _noted_of(self, batch: Batch) -> Acked | None:
        """Facts of a step that goes on with the ranks that it was planned for: these are there, or lost ones are
        replaced, and some may have met in it. None: it is planned anew."""
        facts = self.handed.acked(batch.step)
        # a plan of which nothing is noted no rank has seen
        if facts is None or len(facts.planned_for) != len(batch.ranks):
            return None
        # A plain rank in the midst of its part cannot stop: while all that have one are there, the plan holds.
        are_there = {*facts.planned_for} <= {*self.ledger.members}
        return facts if self.replan or are_there else None

    # -- orders --------------------------------------------------------------------------------------------------------

    async def _act(self) -> None:
        """Carry out what follows from facts, until cancelled. Raises a lost rank's error once its time is over."""
        while True:
            facts = self.facts
            while orders := self.ledger.orders():
                await self.carry_out(orders)
            self._follow_the_ranks()
            # after the orders: what the lost rank said last may have been all that was missing
            until, lost = self.ranks.next_to_give_up
            if until <= anyio.current_time():
                await self._give_up(lost)
                continue
            self.changes.set()
            self.changes = anyio.Event()
            with anyio.CancelScope(deadline=until):
                await facts.wait()

    async def _give_up(self, lost: Member) -> None:
        """A rank has not come back in time: the others go on without it, if they can."""
        ledger, error = self.ledger, lost.error or lost.lost(_NOT_BACK)
        steps = [*lost.rank.active]
        # It was told of the end before a crash that forgot it, and has left: there is nothing that others must do.
        if ledger.ended and not ledger.steps:
            lost.error = error
            return
        # the last one cannot be replaced
        if not self.replan or not {*ledger.members} - {lost.id}:
            raise error
        # first the ledger: orders made from here on name it no more
        ledger.gave_up(lost.id)
        self.ranks.remove(lost)
        self.handed.note(lost.came)
        for step in steps:
            self.note(self.plans[step])
        # Before others are sent its work: after a crash, both would have it.
        await self.handed.flush()
        logger.warning(
            "%s is given up: %s. Its unfinished work of steps %s is for the other ranks", lost.name, error.cause, steps
        )

    def _follow_the_ranks(self) -> None:
        """The balancer plans for those that are left, and for one that has come back."""
        if len(self.ledger.wanted) == self.balancer.config.dp_size:
            return
        self.balancer.reconfigure(dp_size=len(self.ranks.numbers))

    # -- what happens --------------------------------------------------------------------------------------------------

    def reconfigured(self, before: BalancerConfig) -> None:
        """More ranks, or fewer, take part from now on."""
        dp_size = self.balancer.config.dp_size
        # the second is our own doing: the balancer follows the ranks, not the other way round
        if dp_size not in (before.dp_size, len(self.ranks.numbers)):
            self.ranks.resize(dp_size)
            # who is no more lacks the steps that others go on with: the next controller must not ask it for one
            for member in self.ranks.values():
                if member.sessions:
                    self.handed.note(member.came)
            self.transport.resize(self.ranks.num_places)
            self.wake()

    def ended(self) -> None:
        """Ranks may be waited for that have left."""
        self.wake()

    def acknowledged(self, batch: Batch) -> None:
        """The user has acknowledged a step, if the ledger has it yet."""
        # an acknowledgement that the ledger itself has ordered comes back here
        if batch.step in self.ledger.steps:
            self.ledger.acknowledged_by_user(batch.step)
            self.wake()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """The condition may hold once what follows from new facts was carried out."""
        while not condition():
            await self.changes.wait()


_LEAVE_S = 60.0  # a feed that is iterated leaves by itself; one that was dropped must not keep the controller for ever
_NOT_BACK = "it did not come back after the controller was started again"

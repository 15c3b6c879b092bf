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
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeAlias

import anyio

from stream_balancer.config import BalancerConfig
from stream_balancer.core.observer import Observer
from stream_balancer.core.steps.ledger import Ledger
from stream_balancer.core.steps.state import TRAIN, RankId
from stream_balancer.errors import RankLostError
from stream_balancer.host.balancer import StreamBalancer
from stream_balancer.host.columns import Columns, check_roles
from stream_balancer.host.options import Care, check_knobs
from stream_balancer.host.peers import Peers
from stream_balancer.host.plans import Plan, cut_again, items_of, uid_of
from stream_balancer.host.ranks import Member, Ranks
from stream_balancer.host.records import Came
from stream_balancer.host.sending import InFlight, Sender
from stream_balancer.host.stalls import why_stalled
from stream_balancer.host.transport import TorchTransport, Transport, service_of
from stream_balancer.host.wakeups import StallReporter
from stream_balancer.net.listener import split_address
from stream_balancer.types import Batch

__all__ = ["serve"]

logger = logging.getLogger("stream_balancer.dispatch")

OnRankLoss: TypeAlias = Literal["raise", "replan"]


async def serve(
    balancer: StreamBalancer,
    transport: Transport | str,
    *,
    rejoin_timeout_s: float = 0.0,
    on_rank_loss: OnRankLoss = "raise",
    move_late: bool = False,
    report_after_s: float = 60.0,
    roles: Mapping[str, Sequence[str]] | None = None,
    open: bool = False,
) -> None:
    """Deliver every batch of ``balancer`` to the ranks that connect to ``transport``, until ``batches()`` ends.

    ``transport``: an address "tcp://host:port", at which this listens; or a :class:`TorchTransport`.

    Returns when every rank has acknowledged everything and was sent the end. A rank that is lost may come back within
    ``rejoin_timeout_s`` (``math.inf`` = for ever) under a new incarnation and gets again what it had not acknowledged,
    same plan, same order. The default 0 raises at once: without an elastic launcher nobody would come back. A rank that
    was lost before ``serve`` began is waited for without limit, as one that has not come yet.

    ``on_rank_loss="replan"`` goes on without a rank that has not come back in that time: what it owed is planned again
    over the ranks that are left, within the step. The next batch is for one rank fewer; should the lost one come after
    all, for one more. Where ranks share rollouts or meet at every micro-batch, those that share with it begin the step
    again. The last rank's loss is raised. See docs/elastic.md.

    ``move_late=True`` is for a rank that is slow without notice: once half of the ranks have nothing left to do in a
    step, they take over the micro-batches that the others have not begun. See docs/elastic.md. Both are for ranks
    that iterate their step and call ``step.finish()``. Raises ConfigError for ``mini_batches``, in which ranks meet
    several times in a step.

    You may acknowledge too, with ``balancer.acknowledge_through(step)`` at a checkpoint: what ranks report of these
    steps later changes nothing, and a rank that comes back does not get them again.

    When nothing was dispatched for ``report_after_s``, a warning in the log says why: which rank gives no credit, or
    how many rollouts wait for what; again after twice that time, and so on (``math.inf`` = never).

    ``roles={"ref": ["ref_logprobs"]}``: another model computes these columns, on ``dp_size`` ranks of its own, which
    open ``RankFeed(..., role="ref")`` and give them item by item. The trainer's ranks begin with a micro-batch once its
    columns are here. A step that is with a role holds a credit of the trainer's ranks, so memory is bounded as without.

    ``open=True``: a step begins before it is complete; see :meth:`StreamBalancer.batches`.

    Another ``dp_size`` (:meth:`StreamBalancer.reconfigure`) holds from the next batch on. A rank that is no more does
    what it was given, and its iteration ends; a new one is waited for. See docs/elastic.md.

    If ``serve`` is cancelled or raises, nothing is lost: what was not acknowledged stays in flight in the balancer, and
    the next ``serve`` delivers it again. Raises ValueError at once if ``transport`` is for another number of ranks than
    ``balancer``; RankLostError, naming rank, step and cause.
    """
    if not rejoin_timeout_s >= 0:
        raise ValueError(f"rejoin_timeout_s must be >= 0 (math.inf = wait for ever), not {rejoin_timeout_s}")
    if on_rank_loss not in ("raise", "replan"):
        raise ValueError(f"on_rank_loss must be 'raise' or 'replan', not {on_rank_loss!r}")
    check_roles(roles or {})
    care = Care(rejoin_timeout_s, on_rank_loss == "replan", move_late, open, report_after_s, roles or {})
    check_knobs(balancer.config, care)
    if isinstance(transport, str):
        host, port = split_address(transport)
        dp_size = balancer.config.dp_size
        async with TorchTransport.listen(dp_size=dp_size, host=host, port=port, advertise=host) as listening:
            await _Server(balancer, listening, care).run()
    else:
        if balancer.config.dp_size != transport.dp_size:
            raise ValueError(
                f"the transport is for dp_size={transport.dp_size} ranks, but the balancer plans for "
                f"dp_size={balancer.config.dp_size}. Give both the same number of data-parallel ranks; if that has "
                "changed since the transport was made, call transport.resize() first"
            )
        await _Server(balancer, transport, care).run()


class _Server(Observer):
    """A run of ``serve``."""

    def __init__(self, balancer: StreamBalancer, transport: Transport, care: Care) -> None:
        self._balancer, self._transport, self._care = balancer, transport, care
        self._core, self._consumer = balancer.parts.core, balancer.parts.consumer
        self._lockstep = care.replan and balancer.config.sync == "micro_batch"
        self._shares = care.replan or care.move_late
        self._speeds = dict(enumerate(balancer.config.speeds or ()))  # by the rank's number
        self._service = service_of(transport)
        handed = self._consumer.handed
        ledger = Ledger(meets=self._shares, moves=care.move_late, generation=_new_generation())
        # ranks may live longer than this run, and than the controller: what is known of them is passed on
        came = [*handed.came.values()]
        self._ranks = Ranks(ledger, care.roles, transport.dp_size, care.rejoin_timeout_s, self._next_step, came)
        self._here = InFlight(balancer, ledger, self._ranks, Columns(care.roles), handed)
        self._sender = Sender(self._here, lockstep=self._lockstep, speeds=self._speeds)
        self._peers = Peers(self._here, self._service, care.roles, self._wake, self._on_joined)
        self._reporter = StallReporter(care.report_after_s, partial(why_stalled, self._here), logger)
        self._facts, self._changes = anyio.Event(), anyio.Event()
        self._failure: Exception | None = None

    async def run(self) -> None:
        for batch in self._balancer.in_flight():
            self._balancer.nack(batch.step)  # batches() gives all of them again, in the order of their steps
        # from here on nack() is refused, and why_no_batch() knows of the ranks
        self._consumer.rank_states = self._ranks.states
        self._balancer.observers.append(self)
        try:
            async with anyio.create_task_group() as tasks:
                scope = tasks.cancel_scope
                # nobody sets this event: the reporter waits as long as serve runs
                tasks.start_soon(self._reporter.wait, anyio.Event())
                # Planning is no task of its own: its end is the end of the others.
                await self._or_fail(partial(self._plan, tasks), scope)
                scope.cancel()
        finally:
            self._consumer.rank_states = None
            self._balancer.observers.remove(self)
            # before the next serve(): its ranks must dial again, and say anew what they have
            self._peers.leave()
            self._here.handed.end()
        if self._failure is not None:
            raise self._failure

    async def _or_fail(self, job: Callable[[], Awaitable[None]], scope: anyio.CancelScope) -> None:
        """An error of one task ends all, and is raised by ``serve`` as it is, not in a group."""
        try:
            await job()
        except Exception as error:  # noqa: BLE001 - raised by run()
            self._failure = self._failure or error
            scope.cancel()

    # -- the plan ------------------------------------------------------------------------------------------------------

    async def _plan(self, tasks: anyio.abc.TaskGroup) -> None:
        scope = tasks.cancel_scope
        self._follow_the_ranks()
        batches = self._balancer.batches(auto_ack=False, open=self._care.open)
        await self._restore(batches)
        # after what was in flight is known: ranks say at once what they have of it
        tasks.start_soon(self._or_fail, self._peers.attend, scope)
        tasks.start_soon(self._or_fail, self._act, scope)
        while True:
            # As late as possible, when every rank has room: until then rollouts stay in the window, where later ones
            # may still make a better step.
            # Once nothing more comes, nobody need have room for it: after a restart, ranks may have left that know it.
            await self._until(lambda: self._wants_step() or self._core.finished)
            all_ready_at = anyio.current_time()
            try:
                batch = await anext(batches)
            except StopAsyncIteration:
                break
            members = self._here.ledger.members(TRAIN)
            if batch.is_last:
                await self._note_plan([batch], uid_of(batch, members), members)
            if not self._fits(batch):
                batches.give_back(batch)  # there is a new rank, which it must not wait for
                continue
            await self._add(batches, batch, all_ready_at)
            del batch  # it must not outlive its acknowledgement here
        self._reporter.moved()
        self._here.ledger.end()
        self._wake()
        await self._until(lambda: not self._ranks.unfinished)

    def _on_joined(self) -> None:
        self._follow_the_ranks()
        self._wake()

    def _wants_step(self) -> bool:
        ledger = self._here.ledger
        members = ledger.members(TRAIN)
        # Who is to do what lost ranks owe of earlier steps must not begin with later ones.
        if len(members) != self._balancer.config.dp_size or any(step.settling for step in ledger.steps.values()):
            return False
        return ledger.wants_step and self._all_take_part(members)

    def _fits(self, batch: Batch) -> bool:
        """True for a batch for as many ranks as there are."""
        members = self._here.ledger.members(TRAIN)
        # ranks may have come or gone while the batch was planned and written
        return len(batch.ranks) == len(members) and self._all_take_part(members)

    def _all_take_part(self, members: Sequence[RankId]) -> bool:
        """All have come at some time. One that is wanted again after it was told of the end leaves first."""
        return all(self._ranks[one].was_here and not self._ranks[one].ended for one in members)

    async def _restore(self, batches: AsyncIterator[Batch]) -> None:
        """Steps that were in flight before, or in the journal, go on if their plan fits the ranks there are. Where lost
        ranks are replaced, they go on with the ranks that they were planned for: some may have met in them."""
        ledger, handed = self._here.ledger, self._here.handed
        while self._core.state.in_flight.again:
            before = self._core.state.in_flight.next_redelivery()
            # What ranks were given is noted unless they were the first ones, and so is who of these was given up since:
            # a plan of which nothing is noted, where they are others, no rank has seen.
            is_first = [one.number for one in ledger.members(TRAIN)] == [*range(len(ledger.members(TRAIN)))]
            may_be_given = is_first or (before is not None and before.step in handed.acked)
            batch = self._core.give_as_planned() if self._care.replan and may_be_given else None
            if batch is None:
                batch = await anext(batches)
                remade = before is None or len(batch.ranks) != len(before.ranks)
                self._restore_step(batch, ledger.members(TRAIN), remade=remade)
            else:
                there = handed.acked.get(batch.step)
                numbers = (there and there.planned_for) or range(len(batch.ranks))
                self._restore_step(batch, [RankId(TRAIN, number) for number in numbers])
        # what is said of steps that are over must not be taken for later ones of the same number
        handed.keep(self._here.plans)
        # steps below are done: whoever still has one is told to drop it
        ledger.last_acked = min(self._here.plans, default=self._next_step()) - 1
        self._expect()

    def _restore_step(self, batch: Batch, ranks: Sequence[RankId], *, remade: bool = False) -> None:
        plan, there = self._planned(batch, ranks), self._here.handed.acked.get(batch.step)
        rows = cut_again(batch, [] if there is None else there.rows)
        # its salt is lost with the process that planned it, so the uid cannot be made again from the plan
        if there is not None and len(rows) > 1:
            plan.uid = there.uid  # of an open step, which is complete by now
        known = self._here.handed.of_plan(batch.step, plan.uid)
        items = [item for row in rows for item in self._items(plan, row)]
        acked = [RankId(TRAIN, rank) for rank in known.ranks]
        # others were given their parts before the crash: they must not be waited for
        left = [one for one in plan.ranks if one.number not in known.lost]
        self._here.ledger.restore(batch.step, plan.uid, items, left, acked=acked, gone=known.gone, remade=remade)

    def _expect(self) -> None:
        """Ranks that were there before the controller was started again are lost, if they do not come back."""
        if not self._care.replan:
            return
        ledger = self._here.ledger
        came = {RankId(came.role, came.rank) for came in self._here.handed.came.values()}
        # only who would meet in a step to come, or has a part in one under way
        awaited = came.intersection(chain.from_iterable(map(ledger.members, ledger.wanted)))
        self._ranks.expect(awaited.union(*(step.participants for step in ledger.steps.values())))

    def _planned(self, batch: Batch, ranks: Sequence[RankId], all_ready_at: float | None = None) -> Plan:
        now = anyio.current_time()
        # a restored step waited for no rank
        ready_at = now if all_ready_at is None else all_ready_at
        # one rollout stands for all: every rollout of a balancer has the same columns
        self._here.columns.check_new(batch.ranks[0].micro_batches[0].rollouts[0])
        plan = self._here.plans[batch.step] = Plan(
            ranks=tuple(ranks),
            batches=[batch],
            uid=uid_of(batch, ranks, 0 if batch.is_last else _new_generation()),
            planned_at=now,
            ready_s={one: max(ready_at - self._ranks[one].since, 0.0) for one in ranks},
            is_complete=batch.is_last,
        )
        return plan

    def _items(self, plan: Plan, batch: Batch) -> list[Any]:
        roles = {role: self._here.ledger.members(role) for role in self._care.roles}
        return items_of(plan, batch, roles, share=self._shares, lockstep=self._lockstep)

    async def _add(self, batches: AsyncIterator[Batch], batch: Batch, all_ready_at: float) -> None:
        """A batch leaves; of an open step its first row, and the others as they form."""
        ledger = self._here.ledger
        plan = self._planned(batch, ledger.members(TRAIN), all_ready_at)
        items = self._items(plan, batch)
        ledger.planned(batch.step, items, complete=batch.is_last, uid=plan.uid)
        self._left()
        while not plan.is_complete:
            row = await anext(batches)
            plan.batches.append(row)
            if row.is_last:
                await self._note_plan(plan.batches, plan.uid, plan.ranks)
            plan.is_complete = row.is_last
            ledger.appended(row.step, self._items(plan, row), complete=row.is_last)
            self._left()
        self._follow_the_ranks()

    async def _note_plan(self, rows: Sequence[Batch], uid: int, ranks: Sequence[RankId]) -> None:
        """Facts of the plan that its row in the journal does not have are on the disk before ranks can meet."""
        numbers = [one.number for one in ranks]
        # what is known of an earlier plan of this step must not be taken for this one's
        if len(rows) > 1 or numbers != [*range(len(numbers))] or rows[0].step in self._here.handed.acked:
            cut = [[len(one.micro_batches) for one in row.ranks] for row in rows]
            self._here.handed.planned(rows[0].step, uid, numbers, cut)
            await self._here.handed.flush()

    def _left(self) -> None:
        self._reporter.moved()
        for one, member in self._ranks.members.items():
            member.note_readiness(ready=self._here.ledger.room(one) > 0)
        self._wake()

    def _next_step(self) -> int:
        return self._core.state.in_flight.next_step

    # -- orders --------------------------------------------------------------------------------------------------------

    async def _act(self) -> None:
        """Carry out what follows from facts, until cancelled. Raises a lost rank's error once its time is over."""
        while True:
            facts = self._facts
            while orders := self._here.ledger.orders():
                await self._sender.carry_out(orders)
            # after the orders: what the lost rank said last may have been all that was missing
            lost = self._ranks.next_to_give_up
            if lost.give_up_at <= anyio.current_time():
                await self._give_up(lost)
                continue
            self._changes.set()
            self._changes = anyio.Event()
            with anyio.CancelScope(deadline=lost.give_up_at):
                await facts.wait()

    async def _give_up(self, lost: Member) -> None:
        """A rank has not come back in time: the others go on without it, if they can."""
        ledger, error = self._here.ledger, lost.error or lost.lost(_NOT_BACK)
        others = [one for one in ledger.members(lost.id.role) if one != lost.id]
        steps = ledger.unacknowledged(lost.id)
        shares = lost.id.role and any(item.group for step in steps for item in ledger.items_of(step, lost.id))
        if shares:
            text = f"{error}. It computed rollouts together with other ranks of its role, which cannot do its part"
            error = RankLostError(text, rank=error.rank, step=error.step, cause=error.cause)
        # the last one of its kind, and who holds parts of what others hold, cannot be replaced
        if not self._care.replan or not others or shares:
            raise error
        # first the ledger: orders made from here on name it no more
        ledger.gave_up(lost.id)
        self._ranks.remove(lost)
        self._here.handed.note(Came(*lost.id, lost.incarnation, True, sorted(lost.fenced)))
        for step in () if lost.id.role else steps:
            self._here.handed.add(step, self._here.plans[step].uid, lost=[lost.id.number])
        # Before others are sent its work: after a crash, both would have it.
        await self._here.handed.flush()
        logger.warning(
            "%s is given up: %s. What it owed of steps %s is for the other ranks", lost.name, error.cause, steps
        )
        self._follow_the_ranks()

    def _follow_the_ranks(self) -> None:
        """The balancer plans for those that are left, and for one that has come back; not in the midst of a step."""
        numbers = self._ranks.numbers
        # the rows of one step are for the same ranks, as a gradient is
        is_open = any(not plan.is_complete for plan in self._here.plans.values())
        if is_open or len(numbers) == self._balancer.config.dp_size:
            return
        speeds = tuple(self._speeds.get(number, 1.0) for number in numbers) if self._speeds else None
        self._balancer.reconfigure(dp_size=len(numbers), **({"speeds": speeds} if speeds else {}))

    # -- events of the balancer ----------------------------------------------------------------------------------------

    def reconfigured(self, before: BalancerConfig) -> None:
        """There are more ranks from now on, or fewer."""
        dp_size = self._balancer.config.dp_size
        # the second is our own doing: the balancer follows the ranks, not the other way round
        if dp_size in (before.dp_size, len(self._ranks.numbers)):
            return
        self._ranks.resize(dp_size)
        self._transport.resize(self._ranks.num_places)
        self._wake()

    def ended(self) -> None:
        """Ranks may be waited for that have left."""
        self._wake()

    def acknowledged(self, batch: Batch) -> None:
        """By the user, if the ledger has it yet."""
        # an acknowledgement that the ledger itself has ordered comes back here
        if batch.step in self._here.ledger.steps:
            self._here.ledger.acknowledged_by_user(batch.step)
            self._wake()

    # -- waiting -------------------------------------------------------------------------------------------------------

    async def _until(self, condition: Callable[[], bool]) -> None:
        """The condition may hold once what follows from new facts was carried out."""
        while not condition():
            await self._changes.wait()

    def _wake(self) -> None:
        """There are new facts."""
        # replaced, not cleared: who waits on the old event is woken, who comes later waits for the next fact
        self._facts.set()
        self._facts = anyio.Event()


_NOT_BACK = "it did not come back after the controller was started again"
_generation = 0
_YEAR_2020 = 1_577_836_800  # seconds since the epoch: ids count in the bits above these seconds


def _new_generation() -> int:
    """Larger than all before it, in this process and, as long as clocks go forward, in those before."""
    global _generation
    _generation = max(_generation + 1, int(time.time()) - _YEAR_2020)
    return _generation

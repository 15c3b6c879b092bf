"""Batches to ranks: ``serve`` and its tasks. On the controller::

    import stream_balancer as sb

    async with sb.StreamBalancer(config) as balancer, sb.TorchTransport.listen(dp_size=config.dp_size) as transport:
        print(transport.address)                       # "tcp://127.0.0.1:PORT": give it to the ranks
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, balancer, transport)
            ...                                        # await balancer.put(rollout), in rollout workers
            balancer.end()                             # serve returns once every rank has acknowledged everything

and on every rank, a process of its own::

    for batch in sb.RankFeed("tcp://127.0.0.1:PORT", rank=rank, dp_size=dp_size):
        for micro_batch in batch.micro_batches:
            train(micro_batch.packed())

Inside an initialised torch.distributed world (torchrun) ``RankFeed()`` and ``TorchTransport(store, dp_size=...)``
meet in that world's store instead; the controller may be a thread of rank 0 that runs ``anyio.run(...)``.

What waits for what: ``serve`` takes a batch only when every rank has a credit (so the window stays full and the
choice late), each link sends as soon as it has both a rank batch and a credit, and a step is acknowledged to the
balancer when its last rank is done.

What is decided on the way is in :mod:`stream_balancer.controller.delivery` and
:mod:`~stream_balancer.controller.open_steps`; here is only who waits for what.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Literal, NamedTuple, TypeAlias

import anyio

from stream_balancer.config import BalancerConfig
from stream_balancer.controller.balancer import StreamBalancer
from stream_balancer.controller.batches import Batches
from stream_balancer.controller.delivery import Delivery
from stream_balancer.controller.open_steps import Source
from stream_balancer.controller.producers import attend
from stream_balancer.controller.roles import Roles, check_roles
from stream_balancer.controller.serve_checks import check_may_move_late, check_may_open, check_may_replan
from stream_balancer.controller.stall_reporter import StallReporter
from stream_balancer.core.diagnosis import why_ranks_wait
from stream_balancer.core.observer import Observer
from stream_balancer.errors import ConfigError
from stream_balancer.transport import Link, Transport
from stream_balancer.transport.admission import AdmittingTransport
from stream_balancer.types import Batch
from stream_balancer.wire.partial_batch import is_remote

__all__ = ["serve"]

logger = logging.getLogger("stream_balancer.dispatch")


OnRankLoss: TypeAlias = Literal["raise", "replan"]


async def serve(
    balancer: Source,
    transport: Transport,
    *,
    rejoin_timeout_s: float = 0.0,
    on_rank_loss: OnRankLoss = "raise",
    move_late: bool = False,
    report_after_s: float = 60.0,
    roles: Mapping[str, Sequence[str]] | None = None,
    open: bool = False,
) -> None:
    """Deliver every batch of ``balancer`` to the ranks that connect to ``transport``, until ``batches()`` ends.

    Returns when every rank has acknowledged everything and was sent the end. A rank that is lost may come back
    within ``rejoin_timeout_s`` (``math.inf`` = for ever) under a new incarnation and gets again what it had not
    acknowledged, same plan, same order; the others notice nothing. The default 0 raises at once: without an elastic
    launcher nobody would come back. A rank that was lost before ``serve`` began is waited for without limit, as one
    that has not come yet.

    ``on_rank_loss="replan"`` goes on without a rank that has not come back in that time: what it owed is planned again
    over the ranks that are left, within the step, and they get it from :meth:`RankFeed.reassigned`, which every rank
    must iterate in every step. The next batch is for one rank fewer; should the lost one come after all, for one more.
    Raises ConfigError for ranks that meet at every micro-batch or mini-batch. The last rank's loss is raised, as is one
    in a step whose payloads lie with producers. See docs/elastic.md.

    ``move_late=True`` is for a rank that is slow without notice: once half of the ranks have nothing left to do in a
    step, they take over the micro-batches that the others have not begun. For ranks that iterate
    :meth:`RankFeed.micro_batches`; from others nothing is taken. Raises ConfigError unless ranks meet once a step, each
    with its own number of micro-batches, and rollouts may go to any rank. See docs/slow_ranks.md.

    You may acknowledge too, with ``balancer.acknowledge_through(step)`` at a checkpoint: what ranks report of these
    steps later changes nothing, and a rank that comes back does not get them again.

    When nothing was dispatched for ``report_after_s``, a warning in the log says why: which rank gives no credit, or
    how many rollouts wait for what; again after twice that time, and so on (``math.inf`` = never).

    ``roles={"ref": ["ref_logprobs"]}``: another model computes these columns, on ``dp_size`` ranks of its own, which
    open ``RankFeed(..., role="ref")`` and give them with ``batch.ack(columns=...)``. They have the trainer's plan; its
    ranks get a step once all roles are through with it, with the columns joined. A step that is with a role holds a
    credit of the trainer's ranks, so memory is bounded as without. A lost rank of a role is waited for as any other.
    Not together with ``on_rank_loss="replan"`` (ConfigError), nor with another ``dp_size`` while it runs (ValueError).

    ``open=True``: a step begins before it is complete, in rows; see :meth:`StreamBalancer.batches`. A rank that is lost
    in the middle of a step gets it again from its first row on. Not together with ``roles``, ``move_late`` or
    ``on_rank_loss="replan"``, nor with payloads that stay with their producers (ConfigError).

    Another ``dp_size`` (:meth:`StreamBalancer.reconfigure`) holds from the next batch on. A rank that is no more does
    what it was given, and its iteration ends; a new one is waited for. The others go on, and ``batch.dp_size`` says
    how many they are. See docs/elastic.md.

    If ``serve`` is cancelled or raises, nothing is lost: what was not acknowledged stays in flight in the balancer,
    and the next ``serve`` delivers it again. Raises ValueError at once if ``transport`` is for another number of ranks
    than ``balancer``; RankLostError, naming rank, step and cause.
    """
    if not rejoin_timeout_s >= 0:
        raise ValueError(f"rejoin_timeout_s must be >= 0 (math.inf = wait for ever), not {rejoin_timeout_s}")
    if isinstance(balancer, StreamBalancer) and balancer.config.dp_size != transport.dp_size:
        raise ValueError(
            f"the transport is for dp_size={transport.dp_size} ranks, but the balancer plans for "
            f"dp_size={balancer.config.dp_size}. Give both the same number of data-parallel ranks; if that has "
            "changed since the transport was made, call transport.resize() first"
        )
    if on_rank_loss == "replan":
        check_may_replan(balancer)
    elif on_rank_loss != "raise":
        raise ValueError(f"on_rank_loss must be 'raise' or 'replan', not {on_rank_loss!r}")
    check_roles(roles or {})
    if roles and on_rank_loss == "replan":
        raise ConfigError(
            f"on_rank_loss='replan' with roles {list(roles)}: what they compute for a rank cannot be planned again "
            "over others. Leave on_rank_loss out, and give a rejoin_timeout_s"
        )
    if move_late:
        check_may_move_late(balancer, roles or {})
    if open:
        check_may_open(balancer, {"roles": roles, "move_late": move_late, "on_rank_loss": on_rank_loss != "raise"})
    care = _Care(rejoin_timeout_s, on_rank_loss, move_late, open)
    await _Server(balancer, transport, care, report_after_s, roles or {}).run()


class _Care(NamedTuple):
    """What is done for ranks that are lost, or slow: see :func:`serve`."""

    rejoin_timeout_s: float
    on_rank_loss: OnRankLoss
    move_late: bool
    open: bool


class _Server(Observer):
    """One run of ``serve``. Links report through callbacks in the event loop; only :meth:`run` and its tasks wait."""

    def __init__(
        self,
        balancer: Source,
        transport: Transport,
        care: _Care,
        report_after_s: float,
        roles: Mapping[str, Sequence[str]],
    ) -> None:
        self._balancer = balancer
        self._on_rank_loss, self._open = care.on_rank_loss, care.open
        speeds = balancer.config.speeds if isinstance(balancer, StreamBalancer) else None
        self._speeds = dict(enumerate(speeds or ()))  # by the rank's number
        self._transport = transport
        make_delivery = partial(
            Delivery, dp_size=transport.dp_size, rejoin_timeout_s=care.rejoin_timeout_s, on_change=self._wake
        )
        self._delivery = make_delivery(balancer, move_late=care.move_late)
        self._roles = Roles(roles, balancer, lambda role: make_delivery(role, role=role), self._delivery.add)
        self._deliveries = {"": self._delivery, **self._roles.deliveries}
        self._reporter = StallReporter(report_after_s, self._why_stalled, logger)
        self._links: list[Link] = []
        self._changed: set[Link] = set()
        self._waiters: list[anyio.Event] = []
        self._failure: Exception | None = None

    async def run(self) -> None:
        for batch in self._balancer.in_flight():
            self._balancer.nack(batch.step)  # batches() gives all of them again, in the order of their steps
        if isinstance(self._balancer, StreamBalancer):
            self._balancer.parts.consumer.rank_states = self._delivery.states
            self._balancer.observers.append(self)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, tasks.cancel_scope)
                if isinstance(self._balancer, StreamBalancer):
                    tasks.start_soon(self._push_versions, self._balancer)
                tasks.start_soon(self._reporter.wait, anyio.Event())
                if isinstance(self._balancer, StreamBalancer) and isinstance(self._transport, AdmittingTransport):
                    tasks.start_soon(partial(attend, direct=True), self._balancer, self._transport)
                # Delivering is no task of its own: its end is the end of the others.
                tasks.start_soon(self._or_fail, self._accept_all, tasks.cancel_scope)
                await self._or_fail(self._deliver_all, tasks.cancel_scope)
                tasks.cancel_scope.cancel()
        finally:
            if isinstance(self._balancer, StreamBalancer):
                self._balancer.parts.consumer.rank_states = None
                self._balancer.observers.remove(self)
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as closing:
                    for link in self._links:
                        closing.start_soon(link.aclose)
        if self._failure is not None:
            raise self._failure

    def reconfigured(self, before: BalancerConfig) -> None:
        """An event of the balancer: perhaps there are more ranks from now on, or fewer."""
        assert isinstance(self._balancer, StreamBalancer)
        dp_size = self._balancer.config.dp_size
        if dp_size == before.dp_size:
            return
        if self._roles.deliveries:
            self._failure = ValueError(
                f"dp_size is {dp_size} now, but steps for {before.dp_size} ranks may be with roles "
                f"{list(self._roles.deliveries)}. Serve the balancer anew, through a transport for {dp_size}"
            )
        elif isinstance(self._transport, AdmittingTransport):
            self._delivery.resize(dp_size)
            self._transport.resize(self._delivery.num_places)
        else:
            self._failure = ValueError(
                f"dp_size is {dp_size} now, but {self._transport!r} is for {before.dp_size} ranks and no "
                "AdmittingTransport, which could be for others. Serve the balancer through a new one"
            )
        self._wake()

    async def _or_fail(self, job: Callable[[], Awaitable[None]], scope: anyio.CancelScope) -> None:
        """An error of one task ends all, and is raised by ``serve`` as it is, not in a group."""
        try:
            await job()
        except Exception as error:  # noqa: BLE001 - raised by run()
            self._failure = self._failure or error
            scope.cancel()

    async def _push_versions(self, balancer: StreamBalancer) -> None:
        def push(version: int) -> None:
            for delivery in self._deliveries.values():
                delivery.push_version(version)

        with balancer.parts.versions.subscribed(push):
            await anyio.sleep_forever()

    async def _deliver_all(self) -> None:
        if self._open and isinstance(self._balancer, StreamBalancer):
            batches: AsyncIterator[Batch] = self._balancer.batches(auto_ack=False, open=True)
        else:
            batches = aiter(self._balancer.batches(auto_ack=False))
        while True:
            # The batch is asked for as late as possible, when every rank has room: until then rollouts stay in the
            # window, where later ones may still make a better step.
            await self._until(self._all_ready)
            all_ready_at = anyio.current_time()
            try:
                batch = await anext(batches)
            except StopAsyncIteration:
                break
            if self._open and any(is_remote(one) for one in batch.ranks):
                raise ConfigError(
                    "open=True with payloads that stay with their producers: what a step divides by is agreed before "
                    "it begins. Connect producers without direct hand-over"
                )
            if isinstance(batches, Batches) and not self._delivery.fits(batch):
                batches.give_back(batch)  # there is a new rank, which it must not wait for
            else:
                self._roles.add(batch, all_ready_at)
            del batch  # it must not outlive its acknowledgement here
            self._reporter.moved()
        self._reporter.moved()
        self._roles.end()
        await self._until(lambda: self._roles.num_held == 0)
        self._delivery.end()
        await self._until(lambda: all(delivery.all_finished for delivery in self._deliveries.values()))

    def _all_ready(self) -> bool:
        """Everybody has room for one more. A step that waits for columns holds a place at the trainer's ranks, so that
        roles do not run ahead of them without bound."""
        roles = self._roles
        return self._delivery.has_room(roles.num_held) and all(role.has_room() for role in roles.deliveries.values())

    async def _accept_all(self) -> None:
        while True:
            link = await self._transport.accept()
            if not link.live:
                logger.warning("rank %d connected and was lost before serve() took notice: waiting for it", link.rank)
                await link.aclose()
                continue
            deliveries = self._deliveries.values()
            self._links = [old for old in self._links if any(delivery.uses(old) for delivery in deliveries)]
            self._links.append(link)
            delivery = self._deliveries.get(link.role)
            if delivery is None:
                link.close(self._roles.not_asked(link))
                continue
            # Subscribed before it is attached: a report that comes in between is noted and read by _watch, not lost.
            link.subscribe(partial(self._on_change, link))
            delivery.attach(link)
            self._follow_the_ranks()

    async def _watch(self, scope: anyio.CancelScope) -> None:
        """Act on what links report. End everything on a failure, or when a lost rank has not come back in time."""
        while self._failure is None:
            # Nothing is awaited between the last look at the set and the event that _change() makes below: what is
            # noted from then on sets it.
            while self._changed:
                link = self._changed.pop()
                self._deliveries[link.role].advance(link)
            deliveries = self._deliveries.values()
            give_up_at, lost = min((delivery.next_to_give_up for delivery in deliveries), key=itemgetter(0))
            if give_up_at <= anyio.current_time():
                if self._go_on_without_it():
                    continue
                self._failure = lost
            self._failure = next(filter(None, (delivery.failure for delivery in deliveries)), self._failure)
            if self._failure is None:
                with anyio.CancelScope(deadline=give_up_at):
                    await self._change()
        scope.cancel()

    def _go_on_without_it(self) -> bool:
        """A lost rank has not come back in time."""
        if self._on_rank_loss == "raise" or not isinstance(self._balancer, StreamBalancer):
            return False
        if not self._delivery.give_up(self._balancer):
            return False
        self._follow_the_ranks()
        self._wake()
        return True

    def _follow_the_ranks(self) -> None:
        """The balancer plans for those that are left, and for one that has come back."""
        if not isinstance(self._balancer, StreamBalancer) or self._delivery.dp_size == self._balancer.config.dp_size:
            return
        speeds = tuple(self._speeds.get(rank, 1.0) for rank in self._delivery.ranks) if self._speeds else None
        try:
            self._balancer.reconfigure(dp_size=self._delivery.dp_size, **({"speeds": speeds} if speeds else {}))
        except ConfigError as error:
            self._failure = error
            self._wake()

    def _on_change(self, link: Link) -> None:
        """In the event loop but in no task, where few things may be done: note it, and wake the task that acts on
        it."""
        self._changed.add(link)
        self._wake()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._change()

    async def _change(self) -> None:
        event = anyio.Event()
        self._waiters.append(event)
        await event.wait()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for event in waiters:
            event.set()

    def _why_stalled(self, seconds: float) -> str:
        owing = self._delivery.owing
        if owing is not None:
            who = ", ".join([f"ranks {owing}", *self._roles.owing()])
            return f"all batches were sent {seconds:.0f} s ago; not yet done with them: {who}"
        reasons = [why_ranks_wait([*self._delivery.states(), *self._roles.states()]), self._roles.why_held()]
        if isinstance(self._balancer, StreamBalancer):
            reasons.append(self._balancer.why_no_batch())
        return f"no batch for {seconds:.0f} s: " + "; ".join(filter(None, reasons))

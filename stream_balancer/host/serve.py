"""Batches to ranks: ``serve``. On the controller::

    import stream_balancer as sb

    async with sb.StreamBalancer(config) as balancer, anyio.create_task_group() as tasks:
        tasks.start_soon(sb.serve, balancer, "tcp://127.0.0.1:29400")
        ...                                        # await balancer.put(rollout), in rollout workers
        balancer.end()                             # serve returns once every rank has acknowledged every step

and on every rank, a process of its own::

    for step in sb.RankFeed("tcp://127.0.0.1:29400", rank=rank, dp_size=dp_size):
        for micro_batch in step:
            train(micro_batch.packed())

Inside an initialised torch.distributed world (torchrun) ``RankFeed()`` and ``TorchTransport.in_world()`` meet in that
world's store instead; the controller may be a thread of rank 0 that runs ``anyio.run(...)``.

Tasks and their triggers::

    attend       peers      turns joins, calls and reports of peers into facts of the ledger
    plan         room       asks for a batch when every rank has room: until then the window stays full
    act          facts      carries out the ledger's orders, and gives up a lost rank at the end of its wait
    reporter     silence    writes a line to the log

Class :class:`Server`: its methods take facts, and ``_act`` carries out orders, rows before messages.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import anyio
import msgspec

from stream_balancer.config import BalancerConfig
from stream_balancer.core.in_flight import StepTiming
from stream_balancer.core.observer import Observer
from stream_balancer.errors import AlreadyInUseError, ConfigError, WireError, refused_error
from stream_balancer.host.balancer import StreamBalancer
from stream_balancer.host.batches import Batches
from stream_balancer.host.plans import first_attempt, ids_of, is_remote, message_of
from stream_balancer.host.producers import Producers
from stream_balancer.host.ranks import Arrival, Member, Ranks
from stream_balancer.host.records import Attempt, PeerFact, plan_of
from stream_balancer.host.stalls import why_stalled
from stream_balancer.host.transport import TorchTransport, Transport
from stream_balancer.net.errors import ConnectionEnd
from stream_balancer.net.listener import split_address
from stream_balancer.net.messages import Admitted, Join, Report
from stream_balancer.net.service import Host, Peer
from stream_balancer.rollouts import Batch, RankBatch
from stream_balancer.steps import state as steps
from stream_balancer.steps.ledger import Ledger
from stream_balancer.steps.state import Meets, PeerRow, Phase, PlanRow, Process, Weights
from stream_balancer.wire.codec import Encoded, RemoteRollout

logger = logging.getLogger("stream_balancer.dispatch")

OnRankLoss: TypeAlias = Literal["raise", "replan"]
_LEAVE_S = 60.0
"""Seconds that serve() waits at the end for feeds that are still open."""
_MOST_NAMED = 5
_NOT_BACK = "it did not come back after the controller was started again"


async def serve(
    balancer: StreamBalancer,
    transport: Transport | str,
    *,
    rejoin_timeout_s: float = 0.0,
    on_rank_loss: OnRankLoss = "raise",
) -> None:
    """Deliver every batch of ``balancer`` to the ranks that connect to ``transport``, until ``batches()`` ends.

    ``transport``: an address "tcp://host:port" to listen at, or a :class:`TorchTransport`.

    ``serve`` returns when every rank has acknowledged every step and was sent the end. A lost rank may come back within
    ``rejoin_timeout_s`` seconds (``math.inf`` = for ever) under a new incarnation, and gets the steps that its weights
    lack, with the same plan. The default 0 raises without a wait: only an elastic launcher restarts ranks. ``serve``
    waits without limit for ranks that were lost before it began or have not come yet; with ``"replan"`` it waits
    ``rejoin_timeout_s`` for the former, 5 s at least.

    ``on_rank_loss="replan"`` gives up a rank that has not come back in that time: the remaining ranks get a new plan of
    each unfinished step, and compute the whole step again. Example: of 8 ranks 7 go on, and 8 again once the lost rank
    joins. The loss of the last rank raises. See docs/elastic.md.

    ``"replan"`` requires ranks to call ``step.finish()``, and ``step.failed()`` after a failed collective. Raises
    ConfigError for the combinations in docs/tuning.md.

    ``balancer.acknowledge_through(step)`` acknowledges from the controller, at a checkpoint: later reports of these
    steps change nothing, and a rank that comes back does not get them again.

    After the balancer's ``report_after_s`` without a dispatch, a warning in the log names the cause: ranks without
    room, or the number of rollouts that wait and their obstacle. The warning repeats after twice that time, and so on.

    A new ``dp_size`` (:meth:`StreamBalancer.reconfigure`) applies from the next batch on. A leaving rank finishes its
    steps, then its iteration ends; ``serve`` waits for a new rank. See docs/elastic.md.

    Nothing is lost if ``serve`` is cancelled or raises: unacknowledged steps stay in flight in the balancer, and the
    next ``serve`` delivers them again. Raises ValueError before it starts if ``transport`` has another number of ranks
    than ``balancer``; AlreadyInUseError while another ``serve`` delivers its batches; RankLostError, naming rank, step
    and cause.
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
        # the constructor of the balancer cannot check this: it does not know the options of serve()
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
        meets = Meets.BARRIER if on_rank_loss == "replan" else Meets.OWN
        await Server(balancer, transport, rejoin_timeout_s, meets=meets).run()


class ReportedTimes(NamedTuple):
    """Times that a rank reports of a finished step."""

    seconds: float
    compute_s: float | None
    waited_s: float | None


class _Changes(Observer):
    """Changes that the user makes while ``serve`` runs."""

    def __init__(self, wake: Callable[[], None], resize: Callable[[], None]) -> None:
        self._wake, self._resize = wake, resize
        self.acknowledged_steps: set[int] = set()

    def acknowledged(self, batch: Batch) -> None:
        self.acknowledged_steps.add(batch.step)
        self._wake()

    def reconfigured(self, before: BalancerConfig) -> None:
        # without delay: new ranks may join as soon as reconfigure() returns
        self._resize()
        self._wake()

    def ended(self) -> None:
        self._wake()


class Server(Host):
    """One run of ``serve``: takes facts from peers and from the user, and carries out the ledger's orders."""

    def __init__(
        self, balancer: StreamBalancer, transport: Transport, rejoin_timeout_s: float, *, meets: Meets
    ) -> None:
        self._balancer, self._transport, self._meets = balancer, transport, meets
        self._shell, self._core, self._handed = balancer.parts, balancer.parts.core, balancer.parts.handed
        self._facts, self._acted = anyio.Event(), anyio.Event()
        self._changes = _Changes(self._wake, self._resize)
        self._failure: Exception | None = None
        self._ready_s: dict[int, dict[int, float]] = {}
        """Seconds that each rank had had room when a step was planned, by step."""
        self._trained: set[int] = set()
        """Steps that are in the weights of all their ranks."""
        self._slow: tuple[int, int] | None = None  # rank and first step of the straggler that was logged
        self._lost_from = -1  # first of the lost steps that were logged
        self._is_over = False
        plans = self._plans()
        self._term = first_attempt(max((row.attempt for row in plans), default=0) + 1)
        self._ledger = Ledger(
            self._lay_out,
            meets=meets,
            first_attempt=self._term,
            next_step=self._core.in_flight.next_step,
            plans=plans,
            peers=[PeerRow(one.rank, one.incarnation, one.seats, one.fenced, one.ended) for one in self._handed.peers],
        )
        self._ranks = Ranks(self._ledger, transport.dp_size, rejoin_timeout_s)
        # Expect back: with "replan" earlier members and ranks that owe a step, otherwise owing ranks not wanted now.
        owe = {rank for row in plans for rank in row.parts}
        came = {one.rank for one in self._handed.peers if one.incarnation >= 0 and not one.ended}
        lost = (came & self._ledger.wanted) | owe if meets is not Meets.OWN else owe - self._ledger.wanted
        self._ranks.expect(rank for rank in lost if not self._ledger.ranks[rank].is_given_up)
        self._producers = Producers(balancer, transport.service)
        self.methods = self._producers.methods
        self._follow_ranks()

    def _plans(self) -> list[PlanRow]:
        """Steps in flight of an earlier ``serve``, loop or controller."""
        rows = []
        for batch in self._core.in_flight.batches():
            found = self._handed.attempt(batch.step)
            # without a row of its attempt, the step was given to no rank
            if found is None or len(found.ranks) != len(batch.ranks):
                found = Attempt(batch.step, 0, [*range(len(batch.ranks))])
            parts = dict(zip(found.ranks, batch.ranks, strict=True))
            rows.append(PlanRow(batch.step, ids_of(batch), found.attempt, parts, frozenset(), is_remote(batch)))
        return rows

    async def run(self) -> None:
        """Serve until ``batches()`` ends and every rank has left."""
        shell, reporter, observers = self._shell, self._shell.reporter, self._balancer.observers
        before = reporter.why, reporter.log
        # setting rank_states refuses nack(), and shows the ranks to why_no_batch()
        reporter.why, reporter.log = partial(why_stalled, self._balancer, self._ledger, self._ranks), logger
        shell.rank_states = self._ranks.states
        observers.append(self._changes)
        try:
            async with anyio.create_task_group() as tasks:
                # this event is never set: the reporter runs until serve() ends
                tasks.start_soon(reporter.wait, anyio.Event())
                for job in (partial(self._producers.attend, self), self._act):
                    tasks.start_soon(self._or_fail, job, tasks)
                await self._or_fail(self._plan, tasks)
                tasks.cancel_scope.cancel()
        finally:
            shell.rank_states, reporter.why, reporter.log = None, *before
            observers.remove(self._changes)
            self._leave()
        if self._failure is not None:
            raise self._failure

    async def _or_fail(self, job: Callable[[], Awaitable[None]], tasks: anyio.abc.TaskGroup) -> None:
        """Run a task. Its error cancels all tasks, and ``serve`` raises it without a group."""
        try:
            await job()
        except Exception as error:  # noqa: BLE001 - raised by run()
            self._failure = self._failure or error
            tasks.cancel_scope.cancel()

    def _leave(self) -> None:
        """Disconnect ranks: before the end as a loss, so that they join the next ``serve``. Producers stay."""
        for member in self._ranks.connected:
            for peer in member.peers.values():
                if self._is_over or member.is_finished:
                    # End arrives before this close, also if the transport closes at once
                    peer.ending = True
                    peer.close("all is done")
                else:
                    peer.abort()
        self._handed.end()

    def _wake(self) -> None:
        """Wake the tasks that wait for facts."""
        # a new event, not clear(): tasks on the old event must wake, later tasks must wait
        self._facts.set()
        self._facts = anyio.Event()

    async def _until(self, condition: Callable[[], object]) -> None:
        """Wait for the condition. Test it after each turn of ``_act``."""
        while not condition():
            await self._acted.wait()

    # the plan

    async def _plan(self) -> None:
        batches = self._shell.iterate(auto_ack=False)
        # the ledger already has the batches in flight
        while self._core.give_as_planned() is not None:
            pass
        while await self._next_step(batches):
            pass
        self._shell.reporter.moved()
        self._ledger.is_ended = True
        self._wake()
        await self._until(lambda: not self._ledger.steps and not self._ranks.unfinished)
        # a rank may still ask for statistics() after its last acknowledgement
        with anyio.move_on_after(_LEAVE_S):
            await self._until(lambda: not self._ranks.connected)
        if left := self._ranks.connected:
            logger.warning(
                "%s: all is done, and the feed was not closed for %d s. serve() ends without; close() a feed that is "
                "not iterated to its end",
                ", ".join(member.name for member in left),
                _LEAVE_S,
            )
        self._is_over = True

    async def _next_step(self, batches: Batches) -> bool:
        """Ask for a batch once every rank has room: until then, new rollouts widen the choice. False at the end."""
        # after a restart, ranks that were told of the end may be gone: `finished` ends the wait for them
        await self._until(lambda: self._ledger.wants_step() or self._core.finished)
        ready_at = anyio.current_time()
        batch = await anext(batches, None)
        if batch is None:
            return False
        ledger, ranks = self._ledger, self._ledger.members()
        self._ready_s[batch.step] = {one: max(ready_at - self._ranks[one].since, 0.0) for one in ranks}
        # a rank may have left while the batch was planned: without parts the ledger asks for another layout
        parts = dict(zip(ranks, batch.ranks, strict=True)) if len(ranks) == len(batch.ranks) else None
        ledger.planned(ids_of(batch), remote=is_remote(batch), parts=parts)
        for member in self._ranks.values():
            member.note_readiness()
        self._wake()
        return True

    def _lay_out(self, step: int, rollouts: Iterable[str], ranks: list[int]) -> dict[int, RankBatch]:
        """Parts of a new attempt of a step."""
        missing = {*ids_of(self._core.in_flight.planned(step)[0])}.difference(rollouts)
        self._core.mark_missing(step, missing)
        return dict(zip(ranks, self._core.replan(step, len(ranks)).ranks, strict=True))

    # facts of peers

    def admit(self, peer: Peer, join: Join) -> Any:
        """See :class:`Host`, also for the next methods."""
        if join.kind == "producer":
            return self._producers.admit(peer, join)
        if join.kind != "rank":
            raise WireError(f"a {join.kind} joins, and nobody here expects one")
        incarnation = self._ranks.admit(peer, join)
        return Admitted(incarnation, self._term, self._meets is Meets.BARRIER)

    def on_peer(self, peer: Peer) -> None:
        if peer.kind == "producer":
            self._producers.on_peer(peer)
            return
        member = self._ranks.attach(peer)
        self._follow_ranks()
        self._producers.tell_version(peer)
        if not peer.data.is_start:
            # a new process confirms its weights later, when it asks for its first step
            self._note_trained()
        member.note_readiness()
        self._wake()

    def on_end(self, peer: Peer, end: ConnectionEnd) -> None:
        if peer.kind == "producer":
            self._producers.on_end(peer, end)
        elif self._ranks.detach(peer, end) is not None:
            self._wake()

    def on_gone(self, peer: Peer, end: ConnectionEnd) -> None:
        if peer.kind == "producer":
            self._producers.on_gone(peer, end)

    def on_report(self, peer: Peer, report: Report) -> None:
        """Raises WireError for an impossible report. Weights that do not fit refuse the rank. Both end the
        connection."""
        arrival: Arrival = peer.data
        process, link, ledger = arrival.process, arrival.link, self._ledger
        member = self._ranks[process.rank]
        if member.peers.get(process.seat) is not peer:
            return
        step, attempt, why = report.step, report.attempt, None
        match report.fact:
            case "ready" | "failed":
                ledger.reported(process, link, step, attempt, Phase[report.fact.upper()])
            case "missing":
                self._miss(process, link, report)
            case "finished":
                self._record(process, report)
                why = ledger.finished(process, link, step, attempt)
            case "loaded":
                why = ledger.loaded(process, link, Weights(step, attempt))
            case "forgot":
                ledger.forgot(process, link)
            case "acked":
                ledger.acked(process, link, step)
            case _:
                raise WireError(f"{member.name} reports {report.fact!r}, which nobody knows")
        if why is not None:
            peer.fail(refused_error("value", f"{member.name}: {why}"))
        self._note_trained()
        member.note_readiness()
        self._wake()

    def _miss(self, process: Process, link: int, report: Report) -> None:
        """Log payloads that were lost with their producer. The acknowledgement of the step counts them."""
        causes: dict[str, str] = _read(report, dict[str, str])
        step, batch = self._ledger.steps.get(report.step), self._core.in_flight.get(report.step)
        if step is None or batch is None or step.attempt != report.attempt:
            return
        lost = [one for one in batch.rollouts if one.rollout_id in causes and not one.is_padding]
        self._ledger.missing(process, link, report.step, report.attempt, [one.rollout_id for one in lost])
        texts = []
        for rollout in lost[:_MOST_NAMED]:
            label = rollout.handle.owner.label if isinstance(rollout, RemoteRollout) else None
            texts.append(f"{rollout.rollout_id!r} (put by {label}: {causes[rollout.rollout_id]})")
        if lost:
            logger.warning(
                "step %d, rank %d: %d rollouts are gone with their producer, and the step goes on without: %s%s",
                report.step, process.rank, len(lost), ", ".join(texts), ", ..." if len(lost) > _MOST_NAMED else "",
            )  # fmt: skip

    def _record(self, process: Process, report: Report) -> None:
        """Record times of a finished step, from seat 0 only: the processes of a rank work at the same time."""
        times: ReportedTimes | None = _read(report, ReportedTimes | None)
        step = self._ledger.steps.get(report.step)
        if times is None or step is None or process.seat or step.attempt != report.attempt:
            return
        if process.rank not in step.parts:
            raise WireError(f"rank {process.rank} reports times of step {step.number}, in which it has no part")
        timing = StepTiming(
            report.step,
            [*step.parts].index(process.rank),
            times.seconds if times.compute_s is None else times.compute_s,
            own=times.compute_s is not None,
            waited_s=times.waited_s,
            ready_s=self._ready_s.get(report.step, {}).get(process.rank, 0.0),
        )
        try:
            self._core.record_step(timing, anyio.current_time())
        except ValueError as error:
            raise WireError(f"rank {process.rank}, step {step.number}: {error}") from None

    def _note_trained(self) -> None:
        for number in self._ledger.steps:
            if number not in self._trained and self._ledger.is_trained(number):
                # the step no longer counts against max_versions: another step of the same age may leave
                self._trained.add(number)
                self._shell.worked_through(number)

    # orders

    async def _act(self) -> None:
        """Carry out the ledger's orders until cancelled. Raises the error of a lost rank at the end of its wait."""
        while True:
            facts = self._facts
            while orders := self._orders():
                await self._carry_out(orders)
            until, lost = self._ranks.next_to_give_up()
            if until <= anyio.current_time():
                self._give_up(lost)
                continue
            self._acted.set()
            self._acted = anyio.Event()
            with anyio.CancelScope(deadline=until):
                await facts.wait()

    def _orders(self) -> list[steps.Order]:
        """Orders of this turn, after the user's acknowledgements."""
        acknowledged, self._changes.acknowledged_steps = self._changes.acknowledged_steps, set()
        # acknowledgements that the ledger ordered are observed too: keep only steps that it still has
        self._ledger.acknowledged_by_user(acknowledged & self._ledger.steps.keys())
        return self._ledger.orders()

    def _resize(self) -> None:
        """Apply the user's ``dp_size`` to ledger and transport."""
        dp_size = self._balancer.config.dp_size
        if dp_size != len(self._ledger.wanted):
            self._ranks.resize(dp_size)
            self._transport.resize(self._ranks.num_places)

    def _follow_ranks(self) -> None:
        """Apply the number of ranks that take part to the balancer's ``dp_size``."""
        if self._balancer.config.dp_size != len(self._ledger.wanted):
            self._balancer.reconfigure(dp_size=len(self._ledger.wanted))

    async def _carry_out(self, orders: list[steps.Order]) -> None:
        """Write rows, then send messages. Raises like :func:`encode` for work that cannot be sent."""
        is_news, sends = False, list[tuple[steps.ToProcess, Peer | None]]()
        for order in orders:
            match order:
                case steps.WritePlan(row) | steps.WritePeer(row):
                    is_news |= self._write(row)
                case steps.Release():
                    self._release(order)
                case _:
                    sends.append((order, self._peer(order.to)))
        if is_news:
            await self._handed.flush()
        encoded: dict[tuple[int, int], Encoded] = {}
        for to_process, peer in sends:
            # skip a process that was replaced while the disk was awaited: its successor's join has new orders
            if peer is not None and self._peer(to_process.to) is peer:
                self._warn_of_loss(to_process)
                peer.send(*message_of(to_process, self._ledger, peer.data.max_batch_bytes, encoded))
                self._ranks[to_process.to.rank].note_sent(to_process)

    def _warn_of_loss(self, order: steps.ToProcess) -> None:
        """Warn once if all ranks went back to a checkpoint that is older than acknowledged steps."""
        if isinstance(order, steps.Work) and self._ledger.steps[order.step].is_lossy:
            first = self._ledger.ranks[order.to.rank].seats[order.to.seat].weights.next_step
            # the rank may hold later steps
            lost = [one for one in range(first, order.step) if one not in self._ledger.steps]
            if lost and first > self._lost_from:
                self._lost_from = first
                logger.warning(
                    "no weights contain steps %d to %d, which were acknowledged: their rollouts are lost. All ranks go "
                    "on with step %d. Acknowledge a step when its checkpoint is saved: RankFeed(auto_ack=False)",
                    lost[0], lost[-1], order.step,
                )  # fmt: skip

    def _peer(self, process: Process) -> Peer | None:
        return self._ranks[process.rank].peers.get(process.seat)

    def _write(self, row: PlanRow | PeerRow) -> bool:
        if isinstance(row, PeerRow):
            return self._handed.note(PeerFact(row.rank, row.incarnation, row.seats, row.fenced, row.ended))
        batch = self._core.in_flight.get(row.step)
        # one transaction with its layout: an old layout under a new number would mix two plans
        layout = [] if batch is None else [plan_of(batch, self._core.in_flight.left_out(row.step))]
        return self._handed.note(Attempt(row.step, row.attempt, [*row.parts]), *layout)

    def _release(self, order: steps.Release) -> None:
        """End a step: count its lost rollouts and acknowledge it."""
        step, batch = order.step, self._core.in_flight.get(order.step)
        self._ready_s.pop(step, None)
        self._trained.discard(step)
        if batch is None:
            # the user acknowledged first: acknowledge_through() at a checkpoint
            self._handed.forget(step)
            return
        found = self._handed.attempt(step)
        lost = [] if found is None else [found.ranks.index(rank) for rank in order.lost_ranks]
        gone = {one.rollout_id for place in lost for one in batch.ranks[place].rollouts}
        self._core.mark_missing(step, gone | order.gone)
        with suppress(ValueError):
            self._balancer.acknowledge(step)
        self._handed.forget(step)
        straggler = self._balancer.straggler()
        slow = None if straggler is None else (straggler.rank, straggler.since_step)
        # one warning for each straggler
        if slow is not None and slow != self._slow:
            logger.warning("%s", straggler)
        self._slow = slow

    def _give_up(self, lost: Member) -> None:
        """Give up a rank at the end of its wait: replan its steps for the remaining ranks, or raise its error."""
        ledger, error = self._ledger, lost.error or lost.lost(_NOT_BACK)
        # the rank may have left after an End that a crash lost: no step remains to be done
        if ledger.is_ended and not ledger.steps:
            lost.error, lost.give_up_at = error, float("inf")
            return
        is_needed = self._meets is Meets.OWN and (lost.is_wanted or lost.error is not None)
        if is_needed or not {*ledger.members()} - {lost.id}:
            raise error
        steps_of = lost.steps
        ledger.gave_up(lost.id)
        self._ranks.remove(lost)
        self._follow_ranks()
        logger.warning(
            "%s is given up: %s. Its steps %s are planned again for the other ranks", lost.name, error.cause, steps_of
        )


def _read(report: Report, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(report.about, type=kind)
    except msgspec.DecodeError as error:
        raise WireError(f"what is said of {report.fact!r} cannot be read: {error}") from None

"""Steps in flight, as one run of ``serve`` knows them: what its parts share, what the next controller must know, and
why nothing has moved for long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import anyio

from stream_balancer.core.diagnosis import why_ranks_wait
from stream_balancer.core.steps.ledger import Ledger
from stream_balancer.core.steps.state import Item
from stream_balancer.host.balancer import StreamBalancer
from stream_balancer.host.plans import StepPlan, laid_out_anew, new_generation
from stream_balancer.host.ranks import Ranks
from stream_balancer.host.records import Acked
from stream_balancer.host.transport import Transport


class InFlight:
    """Steps in flight, and the ranks that have them."""

    def __init__(
        self, balancer: StreamBalancer, transport: Transport, rejoin_timeout_s: float, *, replan: bool
    ) -> None:
        self.balancer, self.transport, self.core = balancer, transport, balancer.parts.core
        self.shell, self.handed = balancer.parts, balancer.parts.handed
        self.replan = replan
        """Others take over the work of a lost rank."""
        self.lockstep = replan and balancer.config.sync == "micro_batch"
        """Ranks meet at every micro-batch, and others may take over the work of a lost one."""
        self.ledger = Ledger(self._lay_out, meets=replan, generation=new_generation())
        # ranks may live longer than this run, and than the controller: what is known of them is passed on
        self.ranks = Ranks(self.ledger, self.core, transport.dp_size, rejoin_timeout_s, self.handed.came)
        self.plans: dict[int, StepPlan] = {}
        """By step."""
        self.facts, self.changes = anyio.Event(), anyio.Event()

    def wake(self) -> None:
        """New facts are there: the task that acts looks at them."""
        # replaced, not cleared: who waits on the old event is woken, who comes later waits for the next fact
        self.facts.set()
        self.facts = anyio.Event()

    def _lay_out(self, step: int, old: list[Item], over: list[int]) -> list[Item]:
        plan, core = self.plans[step], self.core
        return laid_out_anew(plan, old, over, self.ledger, core, lockstep=self.lockstep)

    def note(self, plan: StepPlan) -> None:
        """Write what the next controller must know of a step and what follows from no plan: who has acknowledged it,
        what is masked, and which of its ranks are given up. O(ranks)."""
        step = self.ledger.steps.get(plan.batch.step)
        there = {*plan.ranks} if step is None else step.participants
        acked = [] if step is None else [one for one in there if step.shares[one].is_acked]
        self.handed.note(
            Acked(
                plan.batch.step, plan.uid, sorted(acked), [] if step is None else sorted(step.gone),
                [*plan.ranks], [one for one in plan.ranks if one not in there],
            )
        )  # fmt: skip

    # why nothing moves

    def why_stalled(self, seconds: float) -> str:
        """A line that names who is missing, after so many seconds without a step."""
        if self.ledger.ended:
            return f"all batches were sent {seconds:.0f} s ago; not yet done with them: {self._why_not_done()}"
        why_ranks = why_ranks_wait(self.ranks.states())
        reasons = [why_ranks, *self._why_steps_wait(), self.balancer.why_no_batch()]
        return f"no batch for {seconds:.0f} s: " + "; ".join(filter(None, reasons))

    def _why_not_done(self) -> str:
        """Ranks that the end waits for, and what to do about one that may have left for good."""
        left = self.ranks.unfinished or self.ranks.connected
        # who has not acknowledged keeps the others: its rank is named alone
        late = [member for member in left if member.rank.active] or left
        names = ", ".join(member.name for member in late)
        # a controller before this one may have died with an acknowledgement that was not on the disk
        away = [member for member in late if member.rank.active and not member.peers]
        if not away:
            return names
        who, last = ", ".join(member.name for member in away), max(max(member.rank.active) for member in away)
        return (
            f"{names}. Not connected: {who}. If it has left, with these steps in its weights, "
            f"balancer.acknowledge_through({last}) ends the wait"
        )

    def _why_steps_wait(self) -> Iterator[str]:
        """Ranks that the oldest step waits for; later steps wait for it."""
        for number in sorted(self.ledger.steps)[:1]:
            step = self.ledger.steps[number]
            absent = self._names(step.participants - step.at_barrier) if step.at_barrier else ""
            if absent and not step.is_met and step.seal is None:
                yield f"step {number} waits for {absent}"

    def _names(self, ranks: Iterable[int]) -> str:
        return ", ".join(self.ranks[one].name for one in sorted(ranks))

"""Why ``serve`` has dispatched nothing for long, in a line that names who is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stream_balancer.core.diagnosis import why_ranks_wait
from stream_balancer.core.steps.state import RankId
from stream_balancer.host.sending import InFlight


def why_stalled(here: InFlight, seconds: float) -> str:
    """The line after so many seconds without a step."""
    if here.ledger.ended:
        # who has not acknowledged keeps the others: its rank is named alone
        left = here.ranks.unfinished
        names = ", ".join(one.name for one in [m for m in left if here.ledger.unacknowledged(m.id)] or left)
        return f"all batches were sent {seconds:.0f} s ago; not yet done with them: {names}"
    why_ranks = why_ranks_wait(here.ranks.states([*here.ledger.wanted]))
    reasons = [why_ranks, *_why_steps_wait(here), here.balancer.why_no_batch()]
    return f"no batch for {seconds:.0f} s: " + "; ".join(filter(None, reasons))


def _why_steps_wait(here: InFlight) -> Iterator[str]:
    """Ranks that the oldest step waits for; later steps wait for it."""
    for number in sorted(here.ledger.steps)[:1]:
        step = here.ledger.steps[number]
        missed = {item.owner for item in step.items.values() if item.role and not item.has_columns}
        if late := _names(here, (one for one in missed if one is not None)):
            yield f"step {number} waits for the columns of {late}"
        absent = _names(here, step.participants - step.at_barrier) if step.at_barrier else ""
        if absent and not step.is_met and step.seal is None:
            yield f"step {number} waits for {absent}"


def _names(here: InFlight, ranks: Iterable[RankId]) -> str:
    return ", ".join(here.ranks[one].name for one in sorted(ranks))

"""Why ``serve`` has dispatched nothing for long, in a line that names who is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stream_balancer.core.diagnosis import why_ranks_wait
from stream_balancer.core.steps.state import RankId
from stream_balancer.host.sending import InFlight


def why_stalled(here: InFlight, seconds: float) -> str:
    """The line after so many seconds without a step."""
    if here.ledger.ended:
        return f"all batches were sent {seconds:.0f} s ago; not yet done with them: {_why_not_done(here)}"
    why_ranks = why_ranks_wait(here.ranks.states([*here.ledger.wanted]))
    reasons = [why_ranks, *_why_steps_wait(here), here.balancer.why_no_batch()]
    return f"no batch for {seconds:.0f} s: " + "; ".join(filter(None, reasons))


def _why_not_done(here: InFlight) -> str:
    """Ranks that the end waits for, and what to do about one that may have left for good."""
    left = here.ranks.unfinished or here.ranks.connected
    # who has not acknowledged keeps the others: its rank is named alone
    late = [(member, steps) for member in left if (steps := [*member.rank.active])]
    names = ", ".join(member.name for member, _ in late) or ", ".join(member.name for member in left)
    # a controller before this one may have died with an acknowledgement that was not on the disk
    away = [(member.name, steps) for member, steps in late if not member.peers]
    if not away:
        return names
    who, last = ", ".join(name for name, _ in away), max(steps[-1] for _, steps in away)
    return (
        f"{names}. Not connected: {who}. If it has left, with these steps in its weights, "
        f"balancer.acknowledge_through({last}) ends the wait"
    )


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

"""Why ``serve`` has dispatched nothing for long, in a line that names who is missing."""

from __future__ import annotations

from stream_balancer.core.diagnosis import why_ranks_wait
from stream_balancer.host.sending import InFlight

__all__ = ["why_stalled"]


def why_stalled(here: InFlight, seconds: float) -> str:
    """After so many seconds without a step."""
    if here.ledger.ended:
        # who owes an acknowledgement keeps the others: it is named alone
        left = here.ranks.unfinished
        names = ", ".join(one.name for one in [m for m in left if here.ledger.unacknowledged(m.id)] or left)
        return f"all batches were sent {seconds:.0f} s ago; not yet done with them: {names}"
    reasons = [
        why_ranks_wait(here.ranks.states([*here.ledger.wanted])),
        *_why_steps_wait(here),
        here.balancer.why_no_batch(),
    ]
    return f"no batch for {seconds:.0f} s: " + "; ".join(filter(None, reasons))


def _why_steps_wait(here: InFlight) -> list[str]:
    """Ranks that the oldest step waits for."""
    if not here.ledger.steps:
        return []
    # later steps wait for this one
    step = here.ledger.steps[min(here.ledger.steps)]
    missed = [item for item in step.items.values() if item.role and not item.has_columns]
    owing = sorted({item.owner for item in missed if item.owner is not None})
    absent = sorted(step.participants - step.at_barrier) if step.at_barrier else []
    reasons = []
    if owing:
        names = ", ".join(here.ranks[one].name for one in owing)
        reasons.append(f"step {step.number} waits for the columns of {names}")
    if absent and not step.is_met and step.seal is None:
        reasons.append(f"step {step.number} waits for {', '.join(here.ranks[one].name for one in absent)}")
    return reasons

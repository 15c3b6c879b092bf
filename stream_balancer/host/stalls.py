"""Log line for a ``serve`` that has planned no step for long: the ranks that keep it waiting."""

from __future__ import annotations

from stream_balancer.core.diagnosis import why_ranks_wait
from stream_balancer.host.balancer import StreamBalancer
from stream_balancer.host.ranks import Ranks
from stream_balancer.steps.ledger import Ledger


def why_stalled(balancer: StreamBalancer, ledger: Ledger, ranks: Ranks, seconds: float) -> str:
    """A line that names the missing ranks, after ``seconds`` without a step."""
    if ledger.is_ended:
        return f"all batches were sent {seconds:.0f} s ago; not yet done with them: {_why_not_done(ranks)}"
    reasons = [why_ranks_wait(ranks.states()), _why_step_waits(ledger), balancer.why_no_batch()]
    return f"no batch for {seconds:.0f} s: " + "; ".join(filter(None, reasons))


def _why_not_done(ranks: Ranks) -> str:
    """Ranks that the end waits for, and the remedy for a rank that may have left for ever."""
    left = ranks.unfinished or ranks.connected
    # a rank that has not acknowledged keeps the other ranks, so name only such ranks
    late = [member for member in left if member.steps] or left
    names = ", ".join(member.name for member in late)
    # an earlier controller may have died before an acknowledgement was on the disk
    away = [member for member in late if member.steps and not member.peers]
    if not away:
        return names
    who, last = ", ".join(member.name for member in away), max(member.steps[-1] for member in away)
    return (
        f"{names}. Not connected: {who}. If it has left, with these steps in its weights, "
        f"balancer.acknowledge_through({last}) ends the wait"
    )


def _why_step_waits(ledger: Ledger) -> str:
    """Ranks that the oldest step waits for; later steps wait for that step."""
    if not ledger.steps:
        return ""
    oldest = min(ledger.steps)
    late = ledger.waits_for(oldest)
    # if every rank is late, no rank waits for another
    is_waited_for = len(late) < len(ledger.steps[oldest].parts)
    return f"step {oldest} waits for {', '.join(f'rank {one}' for one in sorted(late))}" if is_waited_for else ""

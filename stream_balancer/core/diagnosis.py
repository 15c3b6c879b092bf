"""Why nothing is dispatched, in a sentence an operator can act on. Pure: time and state are arguments.

Not here: when that is logged (``host.wakeups``), and how a stopped peer is distinguished from a slow one
(``transport``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stream_balancer.config import BalancerConfig
from stream_balancer.core.state import BalancerState
from stream_balancer.statistics import Statistics

_MOST_NAMED = 3  # ranks, groups: of a thousand that wait for one cause, a line in the log names a few

Taker: TypeAlias = Literal["asking", "busy", "serve", "nobody"]
"""Taker of batches: a trainer that waits for the next one, or works on its last; ``serve()``; or nobody so far."""

_READY: dict[Taker, str] = {
    "asking": "a batch is ready and leaves now",
    "busy": "a batch is ready; the loop over batches() is busy with its last one",
    "serve": "a batch is ready and leaves once every rank has room",
    "nobody": "a batch is ready; nobody iterates batches()",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """Knowledge of the controller about one rank."""

    rank: int
    ready: bool
    """The rank is connected and has room for a batch."""
    since_s: float
    """Seconds since that was last otherwise, or since ``serve`` began."""
    connected: bool
    lost: str | None = None
    """Why its link broke, if it was there before."""
    queue: int = 0
    """Rank batches it has been sent and has not acknowledged."""
    step: int | None = None
    """The oldest step it has been sent and has not acknowledged."""


def why_no_batch(
    state: BalancerState, statistics: Statistics, *, taker: Taker = "asking", ready: bool = False, ended: bool = False
) -> str:
    """Reason for which the balancer waits: ``"37 rollouts wait (window 64), the oldest for 812 s; no deadline_s is
    set"``.

    ``ready``: a batch would leave if it were asked for. ``ended``: no more rollouts will come.
    """
    config, held_back = state.config, state.staleness.num_held_back
    reasons = [_what_waits(config, statistics, ended)]
    if held_back:
        reasons.append(
            f"{held_back} are too old (staleness.max_versions={config.staleness.max_versions}) to leave before the "
            f"trainer is through with the {state.in_flight.steps_ahead} batches ahead of them"
        )
    if ready:
        reasons.append(_READY[taker])
    elif statistics.waiting:
        reasons += _why_not_ready(config, statistics)
        if groups := incomplete_groups(state):
            oldest_s = statistics.oldest_open_group_s
            reasons.append(f"groups that wait for siblings, the oldest for {oldest_s:.0f} s: {groups}")
    if not ready and taker == "nobody":
        reasons.append("nobody iterates batches()")
    if evicted := [f"{number} {reason}" for reason, number in statistics.evicted.items() if number]:
        reasons.append(f"evicted so far: {', '.join(evicted)}")
    if statistics.blocked_puts:
        reasons.append(f"{statistics.blocked_puts} puts wait for room")
    return "; ".join(reasons)


def _what_waits(config: BalancerConfig, statistics: Statistics, ended: bool) -> str:
    if statistics.waiting:
        many = "1 rollout waits" if statistics.waiting == 1 else f"{statistics.waiting} rollouts wait"
        return f"{many} (window {config.window}), the oldest for {statistics.oldest_wait_s:.0f} s"
    if ended:
        return "end() was called and nothing waits"
    return f"no rollout waits; {config.window} make a window"


def _why_not_ready(config: BalancerConfig, statistics: Statistics) -> list[str]:
    reasons = []
    if config.deadline_s is None:
        reasons.append("no deadline_s is set")
    elif statistics.oldest_wait_s < config.deadline_s:
        reasons.append(f"deadline_s is {config.deadline_s:g}")
    elif statistics.waiting < config.min_batch_size:
        reasons.append(
            f"deadline_s ({config.deadline_s:g}) sends no fewer than min_batch_size ({config.min_batch_size})"
        )
    return reasons


def incomplete_groups(state: BalancerState) -> str:
    """Groups of which some rollouts wait for siblings, by name, with how many have come; ``""`` for none."""
    groups = state.buffer.groups
    incomplete = list(groups.incomplete().items())
    named = [f"{name!r} ({came} of {groups.size_of(name)})" for name, came in incomplete[:_MOST_NAMED]]
    return ", ".join(named) + (f" and {len(incomplete) - _MOST_NAMED} more" if len(incomplete) > _MOST_NAMED else "")


def why_ranks_wait(ranks: Sequence[RankState]) -> str:
    """Which ranks hold everybody up, longest first; ``""`` if every rank has room for a batch."""
    # the first that stopped is most often the cause, and the others wait for it
    holding = sorted((rank for rank in ranks if not rank.ready), key=lambda rank: -rank.since_s)
    reasons = [_why_rank_waits(rank) for rank in holding[:_MOST_NAMED]]
    if len(holding) > _MOST_NAMED:
        reasons.append(f"so do {len(holding) - _MOST_NAMED} more ranks")
    return "; ".join(reasons)


def _why_rank_waits(rank: RankState) -> str:
    who, ago = f"rank {rank.rank}", f"{rank.since_s:.0f} s"
    if rank.lost is not None:
        return f"{who} was lost {ago} ago ({rank.lost}) and has not come back"
    if not rank.connected:
        return f"{who} has not connected in {ago}"
    if rank.step is None:
        return f"{who} has given no credit for {ago}"
    return f"{who} has given no credit for {ago}; the oldest step it has not acknowledged is {rank.step}"

"""Orders of the ledger as messages, and numbers of attempts."""

from __future__ import annotations

import time

from stream_balancer.net import messages
from stream_balancer.net.messages import Message
from stream_balancer.rollouts import Batch, RankBatch
from stream_balancer.steps import state as steps
from stream_balancer.steps.ledger import Ledger
from stream_balancer.wire.codec import Encoded, RemoteRollout, encode
from stream_balancer.wire.payload import NOTHING, Payload


def ids_of(batch: Batch) -> tuple[str, ...]:
    """Ids of the rollouts of a batch, without padding copies."""
    return tuple(one.rollout_id for one in batch.rollouts if not one.is_padding)


def is_remote(batch: Batch) -> bool:
    """True if producers keep some payloads."""
    return any(isinstance(one, RemoteRollout) for one in batch.rollouts)


def message_of(
    order: steps.ToProcess, ledger: Ledger, max_bytes: int, encoded: dict[tuple[int, int], Encoded]
) -> tuple[Message, Payload]:
    """An order as a message with its bytes. ``encoded``: parts encoded in this turn, by step and rank: all processes of
    a rank get the same bytes. Copies no token. Raises ValueError for a part of more than ``max_bytes``."""
    match order:
        case steps.Work():
            part: RankBatch = order.part
            key = order.step, order.to.rank
            its = encoded[key] = encoded.get(key) or encode(part.micro_batches, max_bytes=max_bytes)
            work = messages.Work(
                step=order.step,
                attempt=order.attempt,
                ranks=order.ranks,
                place=part.rank,
                needs_commit=order.needs_commit,
                load=part.load,
                sizes=part.denominators,
                mini_batches=part.mini_batch_sizes,
                header=its.header,
            )
            return work, its.payload
        case steps.Commit():
            return messages.Commit(order.step, order.attempt, tuple(sorted(order.masked))), NOTHING
        case steps.Drop():
            text = _why_behind(ledger, order.to, order.step) if order.lacking else ""
            return messages.Drop(order.step, order.attempt, order.lacking, text), NOTHING
        case steps.Behind():
            return messages.Behind(order.step, _why_behind(ledger, order.to, order.step)), NOTHING
        case steps.End():
            return messages.Notify(end=True), NOTHING


def _why_behind(ledger: Ledger, process: steps.Process, lacking: int) -> str:
    """Text for a process whose weights lack a step of another rank."""
    seats = [(seat.weights.next_step, number) for number, rank in ledger.ranks.items() for seat in rank.seats.values()]
    newest, other = max(seats)
    mine = ledger.ranks[process.rank].seats[process.seat].weights.next_step
    return (
        f"the weights of rank {process.rank} contain all steps before {mine} and lack step {lacking}; those of rank "
        f"{other} contain all before {newest}. Load the weights of rank {other} and call feed.load_state_dict() with "
        "its feed's state_dict(), or take all ranks back to one checkpoint"
    )


_last = 0


def first_attempt(least: int) -> int:
    """A number above every attempt of earlier controllers: above ``least``, above every earlier call in this process,
    and above the clock's milliseconds since 1970 times 2^20 (20 bits for the attempts of one millisecond)."""
    global _last
    _last = max(_last + (1 << 20), least, int(time.time() * 1000) << 20)
    return _last

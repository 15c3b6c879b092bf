"""A rank's part of an attempt as a message, and numbers of attempts."""

from __future__ import annotations

import time

from stream_balancer.net.messages import Work
from stream_balancer.rollouts import Batch, RankBatch
from stream_balancer.steps import state as steps
from stream_balancer.wire.codec import Encoded, RemoteRollout, encode


def ids_of(batch: Batch) -> tuple[str, ...]:
    """Ids of the rollouts of a batch, without padding copies."""
    return tuple(one.rollout_id for one in batch.rollouts if not one.is_padding)


def is_remote(batch: Batch) -> bool:
    """Some payloads are with their producers."""
    return any(isinstance(one, RemoteRollout) for one in batch.rollouts)


def work_of(order: steps.Work, max_bytes: int, encoded: dict[int, Encoded]) -> tuple[Work, Encoded]:
    """The message and its bytes. ``encoded``: bytes of ranks that were encoded before, since all processes of a rank
    get the same. Copies no token. Raises ValueError if the part needs more than ``max_bytes``."""
    part: RankBatch = order.part
    if order.to.rank not in encoded:
        encoded[order.to.rank] = encode(part.micro_batches, max_bytes=max_bytes)
    its = encoded[order.to.rank]
    work = Work(
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
    return work, its


_last = 0


def first_attempt(least: int) -> int:
    """A number above every attempt of earlier controllers: above ``least``, above every earlier call in this process,
    and above the clock's milliseconds since 1970 with 20 bits for the attempts of one millisecond."""
    global _last
    _last = max(_last + (1 << 20), least, int(time.time() * 1000) << 20)
    return _last

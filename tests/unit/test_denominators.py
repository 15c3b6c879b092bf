"""What all ranks divide by when payloads are gone: what is left, counted once, the same for all."""

from __future__ import annotations

from helpers import polled
from hypothesis import given
from hypothesis import strategies as st

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.host.plans import StepPlan
from stream_balancer.host.seals import seal_of
from stream_balancer.net.messages import Seal, Sizes
from stream_balancer.testing import make_rollouts
from stream_balancer.types import Batch


def a_batch(lengths: list[int], dp_size: int) -> Batch:
    core = BalancerCore(sb.BalancerConfig(dp_size=dp_size, batch_size=max(len(lengths), dp_size)))
    for rollout in make_rollouts(lengths):
        core.add(rollout, 0.0)
    core.end()
    return polled(core)


def sealed(batch: Batch, *gone: str) -> Seal:
    return seal_of(StepPlan((), [batch], 0, 0.0), 1, range(len(batch.ranks)), gone)


@given(st.data(), st.lists(st.integers(2, 50), min_size=4, max_size=12), st.integers(1, 4))
def test_what_is_left_is_what_is_counted(data: st.DataObject, lengths: list[int], dp_size: int) -> None:
    batch = a_batch(lengths, dp_size)
    gone = data.draw(st.lists(st.sampled_from([r.rollout_id for r in batch.rollouts]), unique=True))
    left = [r for r in batch.rollouts if not r.is_padding and r.rollout_id not in gone]
    seal = sealed(batch, *gone)
    assert seal.sizes == Sizes(
        rollouts=max(len(left), 1),
        tokens=max(sum(r.num_tokens for r in left), 1),
        loss_tokens=max(sum(r.num_loss_tokens for r in left), 1),
        executions=max(len(left), 1),
    )
    assert seal == sealed(batch, *reversed(gone)), "in whichever order it was said"

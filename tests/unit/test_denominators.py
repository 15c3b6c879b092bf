"""What all ranks divide by when payloads are gone: what is left, agreed once, the same for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stream_balancer.host.denominators import StepAgreement
from stream_balancer.wire.messages import Denominators, MissingRollout

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.testing import make_rollouts
from stream_balancer.types import Batch


def a_batch(lengths: list[int], dp_size: int) -> Batch:
    core = BalancerCore(sb.BalancerConfig(dp_size=dp_size, batch_size=max(len(lengths), dp_size)))
    for rollout in make_rollouts(lengths):
        core.add(rollout, 0.0)
    core.end()
    batch = core.poll(0.0)
    assert batch is not None
    return batch


def missing(batch: Batch, rank: int, *indices: int) -> list[MissingRollout]:
    return [MissingRollout(i, batch.ranks[rank].rollouts[i].rollout_id, "worker 3", "it is gone") for i in indices]


@given(st.data(), st.lists(st.integers(1, 50), min_size=4, max_size=12), st.integers(1, 4))
def test_what_is_left_is_what_is_counted(data: st.DataObject, lengths: list[int], dp_size: int) -> None:
    batch = a_batch(lengths, dp_size)
    agreement = StepAgreement(batch)
    left = [r for r in batch.rollouts if not r.is_padding]
    for rank in data.draw(st.permutations(range(dp_size))):
        assert agreement.final is None
        gone = data.draw(st.sets(st.integers(0, batch.ranks[rank].num_rollouts - 1)))
        lost = agreement.fetched(rank, missing(batch, rank, *gone))
        assert not any(rollout.is_padding for rollout in lost)
        left = [rollout for rollout in left if rollout not in lost]
    assert agreement.final == Denominators(
        batch.step,
        rollouts=max(len(left), 1),
        tokens=max(sum(r.num_tokens for r in left), 1),
        loss_tokens=max(sum(r.num_loss_tokens for r in left), 1),
        executions=max(len(left), 1),
    )


def test_a_rank_that_comes_again_replaces_its_answer_until_the_step_is_final() -> None:
    batch = a_batch([10, 20, 30, 40], 2)
    agreement = StepAgreement(batch)
    agreement.fetched(0, missing(batch, 0, 0, 1))
    agreement.fetched(0, missing(batch, 0, 0))
    agreement.fetched(1, [])
    gone = batch.ranks[0].rollouts[0]
    final = Denominators(0, rollouts=3, tokens=100 - gone.num_tokens, loss_tokens=100 - gone.num_tokens, executions=3)
    assert agreement.final == final
    assert agreement.fetched(0, missing(batch, 0, 0, 1)) == list(batch.ranks[0].rollouts)
    assert agreement.final == final


def test_nothing_is_divided_by_zero() -> None:
    batch = a_batch([10, 20], 2)
    agreement = StepAgreement(batch)
    agreement.fetched(0, missing(batch, 0, 0))
    agreement.fetched(1, missing(batch, 1, 0))
    assert agreement.final == Denominators(0, rollouts=1, tokens=1, loss_tokens=1, executions=1)


@pytest.mark.parametrize("named", [MissingRollout(9, "r1", "w", ""), MissingRollout(0, "another", "w", "")])
def test_a_rank_that_misses_what_it_was_not_given_breaks_the_protocol(named: MissingRollout) -> None:
    agreement = StepAgreement(a_batch([10, 20], 2))
    with pytest.raises(sb.WireError, match="rank 0 misses rollouts of step 0 that it was not given"):
        agreement.fetched(0, [named])

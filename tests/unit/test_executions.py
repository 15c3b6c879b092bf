"""Executions: several training samples of one agent's run leave together, and a loss can divide by executions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from codec_help import carried
from helpers import polled
from invariants import verify
from torch import Tensor

import stream_balancer as sb
from stream_balancer.core.groups import GroupSize
from stream_balancer.core.machine import BalancerCore
from stream_balancer.host.checkpoint import read_state_dict, state_dict
from stream_balancer.host.records import batch_of, plan_of
from stream_balancer.rollouts.tensors import Packed
from stream_balancer.testing import make_rollout

VOCAB_SIZE = 7


def sample(
    length: int, group: str | None, execution: str | None, *, trained: int | None = None, seed: int = 0
) -> sb.Rollout:
    generator = torch.Generator().manual_seed(seed)
    return sb.Rollout(
        tokens={
            "input_ids": torch.randint(0, VOCAB_SIZE, (length,), generator=generator),
            "loss_mask": torch.arange(length) < (length if trained is None else trained),
        },
        scalars={"advantage": float(torch.randn((), generator=generator))},
        group_id=group,
        execution_id=execution,
        rollout_id=f"{group}/{execution}/{seed}",
    )


def some_executions(groups: int = 4, seed: int = 0) -> list[list[sb.Rollout]]:
    """Of each group two executions of one to four samples; the ids of executions repeat from group to group."""
    rng, number, made = random.Random(seed), 0, []
    for group in range(groups):
        for execution in range(2):
            its = []
            for _ in range(rng.choice((1, 1, 2, 4))):
                length, number = rng.randint(1, 40), number + 1
                its.append(sample(length, f"g{group}", f"e{execution}", trained=rng.randint(0, length), seed=number))
            made.append(its)
    return made


def core_of(**knobs: object) -> BalancerCore:
    return BalancerCore(
        sb.BalancerConfig(
            **{"dp_size": 3, "batch_size": 24, "groups": {"size": 2}, "loss_mask_column": "loss_mask", **knobs}
        )  # type: ignore[arg-type]
    )


def planned(executions: Sequence[Sequence[sb.Rollout]], **knobs: object) -> sb.Batch:
    core = core_of(**knobs)
    for its in executions:
        core.add_all(its, 0.0)
    core.end()
    batch = polled(core)
    assert core.finished
    return batch


# -- gradients ---------------------------------------------------------------------------------------------------------


def token_losses(weights: Tensor, ids: Tensor, advantages: Tensor) -> Tensor:
    """[T] of some model: the gradient of each token is another one."""
    return advantages * (weights[ids] ** 2 + torch.sin(weights[ids]))


Divide = Callable[[Packed, Tensor, sb.rollouts.RankBatch], Tensor]


def by_rollouts(packed: Packed, sums: Tensor, batch: sb.rollouts.RankBatch) -> Tensor:
    return (sums * packed.rollout_weights).sum() / batch.global_num_rollouts


def by_samples_of_executions(packed: Packed, sums: Tensor, batch: sb.rollouts.RankBatch) -> Tensor:
    return (sums * packed.execution_weights).sum() / batch.global_num_executions


def by_tokens_of_executions(packed: Packed, sums: Tensor, batch: sb.rollouts.RankBatch) -> Tensor:
    return (sums / packed.execution_loss_tokens).sum() / batch.global_num_executions


DIVISORS: list[Divide] = [by_rollouts, by_samples_of_executions, by_tokens_of_executions]


def gradient_of_ranks(batch: sb.Batch, divide: Divide) -> Tensor:
    """Each rank's and micro-batch's by itself, then summed."""
    weights = torch.linspace(-1, 1, VOCAB_SIZE, dtype=torch.float64, requires_grad=True)
    for rank_batch in batch.ranks:
        for micro_batch in rank_batch.micro_batches:
            packed = micro_batch.packed(scalar_dtype=torch.float64)
            losses = token_losses(weights, packed["input_ids"], packed.per_token("advantage")) * packed["loss_mask"]
            sums = torch.stack([one.sum() for one in losses.split(packed.lengths)])
            divide(packed, sums, rank_batch).backward()
    assert weights.grad is not None
    return weights.grad


def gradient_of_one_batch(executions: Sequence[Sequence[sb.Rollout]], divide: Divide) -> Tensor:
    """The textbook, with everything in one padded batch, and Python's own idea of who belongs together."""
    weights = torch.linspace(-1, 1, VOCAB_SIZE, dtype=torch.float64, requires_grad=True)
    rollouts = [rollout for its in executions for rollout in its]
    rows = sb.rollouts.MicroBatch.of(rollouts).padded(scalar_dtype=torch.float64)
    losses = token_losses(weights, rows["input_ids"], rows["advantage"][:, None]) * rows["loss_mask"]
    sums, tokens = losses.sum(1), rows["loss_mask"].sum(1)
    of_execution = torch.tensor([number for number, its in enumerate(executions) for _ in its])
    each = [(sums[of_execution == n], tokens[of_execution == n]) for n in range(len(executions))]
    loss = {
        by_rollouts: lambda: sums.mean(),
        by_samples_of_executions: lambda: torch.stack([its.mean() for its, _ in each]).mean(),
        by_tokens_of_executions: lambda: torch.stack([its.sum() / t.sum().clamp(min=1) for its, t in each]).mean(),
    }[divide]()
    loss.backward()
    assert weights.grad is not None
    return weights.grad


def over_the_wire(batch: sb.Batch) -> sb.Batch:
    shares = [replace(one, micro_batches=carried(*one.micro_batches).micro_batches) for one in batch.ranks]
    return replace(batch, ranks=tuple(shares))


def from_the_journal(batch: sb.Batch) -> sb.Batch:
    return batch_of(plan_of(batch), {r.rollout_id: r for r in batch.rollouts if not r.is_padding})


def delivered_again(executions: Sequence[Sequence[sb.Rollout]], **knobs: object) -> sb.Batch:
    """From a checkpoint, twice."""
    core = core_of(**knobs)
    for its in executions:
        core.add_all(its, 0.0)
    core.end()
    core.poll(0.0)
    for _ in range(2):
        state, core = state_dict(core.snapshot(0.0)), core_of(**knobs)
        core.restore(read_state_dict(state)[0], 0.0)
        batch = polled(core)
    return batch


@pytest.mark.parametrize("divide", DIVISORS)
def test_gradient_equals_that_of_one_padded_batch(divide: Divide) -> None:
    executions = some_executions()
    knobs = {"micro_batches": {"max_tokens": 60, "multiple_of": 8, "oversize": "alone"}, "sync": "step"}
    batch = planned(executions, **knobs)
    assert batch.num_padding
    assert min(len(rank_batch.micro_batches) for rank_batch in batch.ranks) > 1
    assert batch.num_executions == len(executions) < batch.num_rollouts
    places = {(r.group_id, r.execution_id, one.rank) for one in batch.ranks for r in one.rollouts if not r.is_padding}
    assert len(places) > batch.num_executions, "some are on several ranks"
    whole = gradient_of_one_batch(executions, divide)
    ways = {
        "planned": batch,
        "over the wire": over_the_wire(batch),
        "from the journal": from_the_journal(batch),
        "from a checkpoint": delivered_again(executions, **knobs),
    }
    for name, way in ways.items():
        assert (gradient_of_ranks(way, divide) - whole).abs().max() <= 1e-6 * whole.abs().max(), name


def test_rollouts_without_executions_are_one_each_and_padding_none() -> None:
    core = BalancerCore(sb.BalancerConfig(dp_size=3, batch_size=3))
    core.add_all([make_rollout(3, "a")], 0.0)
    core.add_all([make_rollout(5, "b")], 0.0)
    core.end()
    batch = polled(core)
    assert (batch.num_executions, batch.num_padding) == (2, 1)
    weights = [mb.packed().execution_weights.tolist() for share in batch.ranks for mb in share.micro_batches]
    assert sorted(weights) == [[0.0], [1.0], [1.0]]
    by_hand = sb.rollouts.MicroBatch.of([sample(4, None, None, trained=0), sample(5, None, None, trained=2)])
    assert by_hand.padded().execution_loss_tokens.tolist() == [1, 1]
    assert by_hand.nested().execution_weights.tolist() == [1.0, 1.0]


# -- groups of executions ----------------------------------------------------------------------------------------------


def test_an_execution_comes_in_one_put() -> None:
    core = core_of(dp_size=1, batch_size=8, window=8)
    core.add_all([sample(3, "g", "e0", seed=n) for n in range(2)], 0.0)
    with pytest.raises(sb.errors.RolloutError, match="execution 'e0' of group 'g' has come already"):
        core.add(sample(3, "g", "e0", seed=9), 0.0)
    core.add(sample(3, "h", "e0", seed=9), 0.0)  # another group's
    core.add_all([], 0.0, GroupSize("g", 3))
    core.add_all([sample(3, "g", f"e{n}", seed=10 + n) for n in (1, 1, 2, 2)][::2], 0.0)
    with pytest.raises(sb.errors.RolloutError, match="takes 0 more"):
        core.add(sample(3, "g", "e3", seed=20), 0.0)
    verify(core)


# -- planned again -----------------------------------------------------------------------------------------------------


def counted(batch: sb.Batch) -> list[Any]:
    """Each rollout with the size of its execution in the step."""
    every = [
        (r, size)
        for share in batch.ranks
        for mb in share.micro_batches
        for r, size in zip(mb.rollouts, mb.execution_sizes, strict=True)
    ]
    return sorted((r.rollout_id, size) for r, size in every if not r.is_padding)


def in_flight(executions: Sequence[Sequence[sb.Rollout]], **knobs: object) -> tuple[BalancerCore, sb.Batch]:
    core = core_of(**knobs)
    for its in executions:
        core.add_all(its, 0.0)
    core.end()
    return core, polled(core)


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_a_step_planned_again_counts_what_is_left_of_each_execution(dp_size: int) -> None:
    executions = [
        [sample(3, "g", "whole", seed=1), sample(4, "g", "whole", seed=2)],
        [sample(5, "g", "partly", seed=3), sample(6, "g", "partly", seed=4), sample(7, "g", "partly", seed=5)],
        [sample(8, "g", None, seed=6)],
        [sample(9, "g", None, seed=7)],
    ]
    core, batch = in_flight(executions, dp_size=2, groups=sb.Groups(size=4), batch_size=8)
    gone = {f"g/{name}" for name in ("whole/1", "whole/2", "partly/4", "None/6")}
    core.mark_missing(batch.step, gone)
    again = core.replan(batch.step, dp_size)
    assert {share.denominators for share in again.ranks} == {(3, 5 + 7 + 9, 4 + 6 + 8, 2)}
    assert (again.num_rollouts, again.num_tokens, again.num_executions) == (3, 21, 2)
    assert counted(again) == [("g/None/7", (1, 8)), ("g/partly/3", (2, 10)), ("g/partly/5", (2, 10))]
    left = [[one for one in its if one.rollout_id not in gone] for its in executions]
    for divide in DIVISORS:
        whole = gradient_of_one_batch([its for its in left if its], divide)
        for name, way in {"planned": again, "wire": over_the_wire(again), "journal": from_the_journal(again)}.items():
            assert (gradient_of_ranks(way, divide) - whole).abs().max() <= 1e-6 * whole.abs().max(), name
    core.acknowledge(again.step)
    verify(core)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"micro_batches": {"max_tokens": 160, "multiple_of": 2}, "sync": "step"},
        {"groups": {"size": 2}},
        {"policy": "round_robin"},
    ],
    ids=str,
)
def test_a_step_planned_again_for_fewer_ranks_counts_as_before(more: dict[str, Any]) -> None:
    core, batch = in_flight(some_executions(16), **{"dp_size": 6, "batch_size": 64, **more})
    whole, sizes, config = counted(batch), batch.ranks[0].denominators, core.config
    for dp_size in (5, 4, 3):
        batch = core.replan(batch.step, dp_size)
        assert len(batch.ranks) == dp_size
        assert counted(batch) == whole
        for share in batch.ranks:
            assert share.denominators == sizes
            assert all(one.num_tokens <= (config.micro_batches.max_tokens or 10**9) for one in share.micro_batches)
            assert not len(share.micro_batches) % config.micro_batches.multiple_of
        assert core.in_flight.delivered() == (batch,)
        verify(core)

"""slime's and miles' schedules. They are in no registry: these run on the schedules' pinned files with their own
tests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import their_own_tests
from hypothesis import given
from hypothesis import strategies as st

import stream_balancer as sb
from stream_balancer.integrations import slime
from stream_balancer.integrations.slime import build_dp_schedule


def args_of(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"use_dynamic_batch_size": True, "max_tokens_per_gpu": 50, **changes})


def parallel(dp_size: int, cp_size: int = 1, vpp_size: int = 1, group: int = 1) -> dict[str, int]:
    names = ("dp_size", "cp_size", "vpp_size", "microbatch_group_size_per_vp_stage")
    return dict(zip(names, (dp_size, cp_size, vpp_size, group), strict=True))


@given(st.data())
def test_schedule_keeps_slimes_invariants(data: st.DataObject) -> None:
    dp_size, cp_size = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2]))
    virtual = data.draw(st.sampled_from([1, 2]))
    group = data.draw(st.integers(1, 3))
    steps = data.draw(st.integers(1, 3))
    per_step = data.draw(st.integers(dp_size * group * 12, dp_size * group * 12 + 9))
    samples_of = data.draw(st.lists(st.integers(1, 2), min_size=per_step * steps, max_size=per_step * steps + 3))
    rollout_indices = [rollout for rollout, count in enumerate(samples_of) for _ in range(count)]
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=len(rollout_indices), max_size=len(rollout_indices)))
    cap = data.draw(st.integers(40, 200))
    partitions, micro_batches, counts, sizes = build_dp_schedule(
        args_of(max_tokens_per_gpu=cap),
        parallel(dp_size, cp_size, virtual, group),
        lengths,
        global_batch_size=per_step,
        rollout_indices=rollout_indices,
    )
    kept = {i for i, rollout in enumerate(rollout_indices) if rollout < per_step * (len(samples_of) // per_step)}
    assert sorted(i for partition in partitions for i in partition) == sorted(kept)
    assert sizes == [per_step] * (len(samples_of) // per_step)
    assert len(counts) == len(sizes)
    for partition, of_rank in zip(partitions, micro_batches, strict=True):
        assert len(of_rank) == sum(counts)
        assert [i for micro_batch in of_rank for i in micro_batch] == list(range(len(partition)))
        for micro_batch in of_rank:
            tokens = sum(lengths[partition[i]] for i in micro_batch)
            assert tokens <= cap * cp_size or len(micro_batch) == 1
    assert all(count % (group if virtual > 1 else 1) == 0 for count in counts)
    starts = [sum(counts[:step]) for step in range(len(counts) + 1)]
    for step in range(len(counts)):
        of_step = {
            rollout_indices[partition[i]]
            for partition, of_rank in zip(partitions, micro_batches, strict=True)
            for micro_batch in of_rank[starts[step] : starts[step + 1]]
            for i in micro_batch
        }
        assert of_step == set(range(step * per_step, (step + 1) * per_step))


def test_ranks_that_share_a_sample_hold_as_many_times_more() -> None:
    call = {"total_lengths": [30, 20, 40, 10] * 6, "global_batch_size": 24, "rollout_indices": [*range(24)]}
    shared = build_dp_schedule(args_of(max_tokens_per_gpu=50), parallel(2, cp_size=2), **call)
    assert shared == build_dp_schedule(args_of(max_tokens_per_gpu=100), parallel(2), **call)
    assert shared != build_dp_schedule(args_of(max_tokens_per_gpu=50), parallel(2), **call)


@pytest.mark.parametrize(
    ("changes", "count", "size", "says"),
    [
        ({"use_dynamic_batch_size": False}, 8, 8, "there is nothing to plan with fixed micro-batches"),
        ({}, 7, 8, "num_rollouts=7 do not fill one step of global_batch_size=8"),
        ({}, 3, 3, "step 0 has too few samples for 4 ranks"),
    ],
)
def test_what_cannot_be_scheduled_is_said(changes: dict[str, Any], count: int, size: int, says: str) -> None:
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match=says):
            build_dp_schedule(
                args_of(**changes), parallel(4), [1] * count, global_batch_size=size, rollout_indices=[*range(count)]
            )


def test_patch_leaves_fixed_micro_batches_to_slime_and_can_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    def original(*args: Any, **options: Any) -> str:
        return "slime's"

    package, utils, home, user = (ModuleType(n) for n in ("slime", "slime.utils", "slime.utils.dp_schedule", "user"))
    home.build_dp_schedule = user.build_dp_schedule = original  # type: ignore[attr-defined]
    utils.dp_schedule = home  # type: ignore[attr-defined]
    for module in (package, utils, home, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    put_back = slime.patch(cost=sb.cost.QuadraticCost())
    call = {"global_batch_size": 4, "rollout_indices": [0, 1, 2, 3]}
    fixed = user.build_dp_schedule(args_of(use_dynamic_batch_size=False), parallel(2), [1] * 4, **call)
    assert fixed == "slime's"
    partitions = user.build_dp_schedule(args_of(), parallel(2), [9, 1, 1, 1], **call)[0]
    assert sorted(map(sorted, partitions)) == [[0], [1, 2, 3]]
    put_back()
    assert user.build_dp_schedule is home.build_dp_schedule is original


@pytest.mark.parametrize(("dp_size", "sizes"), [(2, [2, 2, 1]), (3, [2, 2])])
def test_trailing_rollouts_are_a_partial_step_where_miles_allows_it(dp_size: int, sizes: list[int]) -> None:
    rollouts = [0, 0, 1, 2, 2, 3, 4, 4]
    partitions, _, counts, found = build_dp_schedule(
        args_of(allow_partial_train_step=True),
        {**parallel(dp_size), "vpp_size": None},  # type: ignore[dict-item]
        [3] * 8,
        global_batch_size=2,
        rollout_indices=rollouts,
    )
    assert found == sizes
    assert len(counts) == len(sizes)
    trained = sorted(i for partition in partitions for i in partition)
    assert trained == [i for i, rollout in enumerate(rollouts) if rollout < sum(sizes)]


@pytest.mark.parametrize(("name", "passed"), [("slime", 9), ("miles", 15)])
def test_their_own_tests_of_the_schedule_pass_on_ours(name: str, passed: int) -> None:
    said = their_own_tests.run(name)
    assert f"\n{passed} passed" in said, said


@pytest.fixture
def miles(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(their_own_tests.checkout("radixark/miles"))
    yield importlib.import_module("miles.utils.dp_schedule")
    for name in [name for name in sys.modules if name.partition(".")[0] == "miles"]:
        del sys.modules[name]


MODEL = {"hidden_size": 2048, "num_attention_heads": 16, "num_query_groups": 8, "vocab_size": 151_936, "num_layers": 28}
MODEL |= {"ffn_hidden_size": 6144, "num_experts": None, "kv_channels": 128, "q_lora_rank": None, "kv_lora_rank": None}
MODEL |= {"qk_pos_emb_head_dim": 0, "qk_head_dim": 128, "v_head_dim": 128}


@pytest.mark.parametrize("by_flops", [False, True])
def test_ranks_wait_less_than_with_miles_schedule_and_no_cap_is_exceeded(miles: Any, *, by_flops: bool) -> None:
    args = args_of(max_tokens_per_gpu=16_384, balance_data=not by_flops, balance_by_flops=by_flops, **MODEL)
    lengths = np.minimum(np.random.default_rng(0).lognormal(7, 1, 128).astype(int) + 1, args.max_tokens_per_gpu)

    def cost(of: Any) -> Any:
        return np.array([miles.calculate_fwd_flops([int(length)], args) for length in of], dtype=float)

    def measured() -> tuple[float, int, list[int]]:
        partitions, micro_batches, counts, _ = miles.build_dp_schedule(
            args, parallel(8), lengths.tolist(), global_batch_size=128, rollout_indices=list(range(128))
        )
        loads = [cost(lengths[share]).sum() for share in partitions]
        shares = zip(partitions, micro_batches, strict=True)
        tokens = [lengths[share][one].sum() for share, of_rank in shares for one in of_rank]
        return (
            1 - float(np.mean(loads) / np.max(loads)),
            sum(count > args.max_tokens_per_gpu for count in tokens),
            counts,
        )

    theirs = measured()
    with their_own_tests.patched(slime.patch, "miles", cost=cost):
        ours = measured()
    assert ours[0] < theirs[0] / 10
    assert ours[1:] == (0, theirs[2])

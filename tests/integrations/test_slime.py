"""slime's schedule and its dict of lists, miles' schedule. They are in no registry: these run on slime's formats as its
source has them, and on the schedules' pinned files with their own tests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import their_own_tests
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import rank_batch

import stream_balancer as sb
from stream_balancer.integrations import slime
from stream_balancer.integrations.slime import build_dp_schedule, rank_data_from, rollouts_from

# --- the schedule -----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("changes", "count", "says"),
    [
        ({"use_dynamic_batch_size": False}, 8, "there is nothing to plan with fixed micro-batches"),
        ({}, 7, "num_rollouts=7 do not fill one step of global_batch_size=8"),
    ],
)
def test_what_cannot_be_scheduled_is_said(changes: dict[str, Any], count: int, says: str) -> None:
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match=says):
            build_dp_schedule(
                args_of(**changes), parallel(2), [1] * count, global_batch_size=8, rollout_indices=list(range(count))
            )


def test_too_few_samples_for_the_ranks_is_said() -> None:
    with pytest.raises(ValueError, match="step 0 has too few samples for 4 ranks"):
        build_dp_schedule(args_of(), parallel(4), [1] * 3, global_batch_size=3, rollout_indices=[0, 1, 2])


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
    put_back = slime.patch("miles", cost=cost)
    ours = measured()
    put_back()
    assert ours[0] < theirs[0] / 10
    assert ours[1:] == (0, theirs[2])


# --- train data -------------------------------------------------------------------------------------------------------


@st.composite
def train_data(draw: Any) -> dict[str, Any]:
    """What slime's ``_convert_samples_to_train_data`` makes of one group."""
    lengths = draw(st.lists(st.integers(2, 9), min_size=1, max_size=5))
    responses = [draw(st.integers(1, length - 1)) for length in lengths]
    rollout_ids = [draw(st.integers(0, 2)) for _ in lengths]
    masks = [[draw(st.integers(0, 1)) for _ in range(response)] for response in responses]
    sums = [sum(sum(m) for m, r in zip(masks, rollout_ids, strict=True) if r == mine) for mine in rollout_ids]
    data: dict[str, Any] = {
        "tokens": [[draw(st.integers(0, 99)) for _ in range(length)] for length in lengths],
        "response_lengths": responses,
        "rewards": [draw(st.floats(-2, 2)) for _ in lengths],
        "raw_reward": [draw(st.floats(-2, 2)) for _ in lengths],
        "truncated": [draw(st.integers(0, 1)) for _ in lengths],
        "sample_indices": [draw(st.integers(0, 99)) for _ in lengths],
        "rollout_ids": rollout_ids,
        "loss_masks": masks,
        "rollout_mask_sums": sums,
        "source_names": ["math"] * len(lengths),
    }
    if draw(st.booleans()):
        data["rollout_log_probs"] = [[-0.5 * i for i in range(response)] for response in responses]
        data["teacher_log_probs"] = [[-0.25 * i for i in range(response)] for response in responses]
    if draw(st.booleans()):
        data["rollout_routed_experts"] = [torch.randint(0, 9, (length - 1, 2, 2)) for length in lengths]
        data["rollout_top_p_token_ids"] = [list(range(response * 2)) for response in responses]
        data["rollout_top_p_token_offsets"] = [list(range(0, response * 2 + 1, 2)) for response in responses]
        data["multimodal_train_inputs"] = [{"pixel_values": torch.rand(length, 3).half()} for length in lengths]
    return data


def batch_of(shares: list[list[list[sb.Rollout]]]) -> sb.Batch:
    ranks = tuple(rank_batch(*share, rank=rank, dp_size=len(shares)) for rank, share in enumerate(shares))
    return sb.Batch(
        step=0, reason="drain", ranks=ranks, num_rollouts=1, num_tokens=1, loads=(1.0,), finish=1.0, lower_bound=1.0
    )


DTYPES = {"tokens": torch.int64, "loss_masks": torch.int32, "rollout_log_probs": torch.float32}
DTYPES |= {"teacher_log_probs": torch.float32, "rollout_top_p_token_ids": torch.int32}
DTYPES |= {"rollout_top_p_token_offsets": torch.int32}


@given(train_data())
def test_every_list_survives(data: dict[str, Any]) -> None:
    made = rollouts_from(data, group_id="g", version=3)
    assert {(r.group_id, r.version) for r in made} == {("g", 3)}
    assert [r.num_loss_tokens for r in made] == [sum(mask) for mask in data["loss_masks"]]
    (one,) = rank_data_from(batch_of([[made]]))
    numbers = {rollout: number for number, rollout in enumerate(dict.fromkeys(data["rollout_ids"]))}
    assert one.keys() - data.keys() == {
        *("partition", "total_lengths", "global_batch_sizes", "num_microbatches", "micro_batch_indices")
    }
    for key, values in data.items():
        if key == "rollout_ids":
            assert one[key] == [numbers[rollout] for rollout in values]
        elif key == "rollout_mask_sums":
            assert one[key].dtype is torch.float32
            assert one[key].tolist() == values
        elif key in DTYPES:
            assert all(mine.dtype is DTYPES[key] for mine in one[key])
            assert [mine.tolist() for mine in one[key]] == [torch.as_tensor(v).tolist() for v in values]
        elif key == "rollout_routed_experts":
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(one[key], values, strict=True))
        elif key == "multimodal_train_inputs":
            for mine, theirs in zip(one[key], values, strict=True):
                assert mine.keys() == theirs.keys()
                assert torch.equal(mine["pixel_values"], theirs["pixel_values"])
        else:
            assert one[key] == values, key
    assert one["total_lengths"] == [len(tokens) for tokens in data["tokens"]]


def group(name: str, lengths: list[int]) -> list[sb.Rollout]:
    ones: dict[str, Any] = {"tokens": [[7] * n for n in lengths], "response_lengths": [n - 1 for n in lengths]}
    ones |= {"loss_masks": [[1] * (n - 1) for n in lengths], "rewards": [0.5] * len(lengths)}
    ones |= {"raw_reward": [float(n) for n in lengths], "truncated": [0] * len(lengths)}
    ones |= {"rollout_ids": list(range(len(lengths))), "rollout_mask_sums": [n - 1 for n in lengths]}
    return rollouts_from(ones, group_id=name)


def test_ranks_get_their_own_and_the_whole_steps_rewards_and_lengths() -> None:
    a, b = group("a", [3, 5]), group("b", [4, 2])
    zero, one = rank_data_from(batch_of([[[a[1]], [b[1], a[0]]], [[b[0]], [b[0].padding_copy("p")]]]))
    assert (zero["partition"], one["partition"]) == ([0, 1, 2], [3, 4])
    assert zero["micro_batch_indices"] == [[0], [1, 2]]
    assert one["micro_batch_indices"] == [[0], [1]]
    assert zero["num_microbatches"] == one["num_microbatches"] == [2]
    assert zero["global_batch_sizes"] == [4]  # distinct rollouts: the padding copy counts in none
    assert zero["total_lengths"] == one["total_lengths"] == [5, 2, 3, 4, 2]  # a prompt and a response of one token
    assert zero["raw_reward"] == one["raw_reward"] == [5.0, 2.0, 3.0, 4.0, 4.0]
    assert (zero["rollout_ids"], one["rollout_ids"]) == ([0, 1, 2], [3, 3])
    assert [mask.tolist() for mask in one["loss_masks"]] == [[1, 1, 1], [0]]
    assert one["response_lengths"] == [3, 1]

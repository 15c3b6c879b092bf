"""form_micro_batches: the cap holds, ranks agree, nothing is lost, whatever the lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_balancer.planning import OversizeError, form_micro_batches

lengths_of_any_kind = st.lists(
    st.one_of(st.integers(1, 100), st.just(100), st.just(1), st.integers(48, 52)), min_size=1, max_size=40
)


def check(lengths, ranks, num_ranks, cap, *, padded=False, multiple_of=1):
    lengths = np.asarray(lengths)
    assert len(ranks) == num_ranks
    everything = [one for share in ranks for one in share]
    assert all(one.size and one.dtype == np.int64 for one in everything)
    assert sorted(np.concatenate(everything).tolist()) == list(range(lengths.size))
    for one in everything:
        held = one.size * lengths[one].max() if padded else lengths[one].sum()
        assert cap is None or held <= cap or one.size == 1
    number = -(-max(len(share) for share in ranks) // multiple_of) * multiple_of
    if lengths.size >= num_ranks * number:
        assert {len(share) for share in ranks} == {number}
    return number


@given(
    lengths_of_any_kind,
    st.integers(1, 5),
    st.sampled_from([None, 100, 101, 150, 333]),
    st.sampled_from(["step", "micro_batch"]),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from(["heaviest_first", "pipeline"]),
    st.booleans(),
)
def test_the_cap_holds_and_ranks_agree(lengths, num_ranks, cap, sync, padded, multiple_of, order, squared):
    costs = np.asarray(lengths, dtype=float) ** (2 if squared else 1)
    ranks = form_micro_batches(
        lengths, costs, num_ranks, max_tokens=cap, sync=sync, padded=padded, multiple_of=multiple_of, order=order
    )
    check(lengths, ranks, num_ranks, cap, padded=padded, multiple_of=multiple_of)


@given(
    lengths_of_any_kind, st.integers(1, 4), st.sampled_from([100, 150, 333]), st.sampled_from(["step", "micro_batch"])
)
def test_equal_counts_and_labels_and_speeds(lengths, num_ranks, cap, sync):
    n = len(lengths)
    ranks = form_micro_batches(lengths, lengths, num_ranks, max_tokens=cap, sync=sync, counts="equal")
    held = [sum(one.size for one in share) for share in ranks]
    assert max(held) - min(held) <= 1
    assert sorted(i for share in ranks for one in share for i in one) == list(range(n))
    labels = np.arange(n) // 3
    ranks = form_micro_batches(lengths, lengths, num_ranks, max_tokens=cap, sync=sync, keep_together=labels)
    homes = [{int(labels[i]) for one in share for i in one} for share in ranks]
    assert sum(map(len, homes)) == len(set(labels.tolist()))
    assert all(np.asarray(lengths)[one].sum() <= cap for share in ranks for one in share)
    speeds = np.arange(1.0, num_ranks + 1)
    check(
        lengths,
        form_micro_batches(lengths, lengths, num_ranks, max_tokens=cap, sync=sync, speeds=speeds),
        num_ranks,
        cap,
    )


def test_the_example_that_exceeds_the_cap_elsewhere():
    ranks = form_micro_batches([6000, 6000, 6000], [1.0, 1.0, 1.0], 1, max_tokens=10000)
    assert [one.size for one in ranks[0]] == [1, 1, 1]


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_a_rollout_above_the_cap_is_refused_or_sits_alone(sync):
    with pytest.raises(OversizeError, match="oversize='alone'"):
        form_micro_batches([200, 10, 10, 10], np.ones(4), 2, max_tokens=100, sync=sync)
    ranks = form_micro_batches([200, 10, 10, 10], np.ones(4), 2, max_tokens=100, sync=sync, oversize="alone")
    assert any(one.tolist() == [0] for share in ranks for one in share)


def heavy(seed, n):
    lengths = np.clip(np.random.default_rng(seed).lognormal(np.log(4096) - 0.5, 1, n), 64, 32768).astype(np.int64)
    return lengths, lengths * (lengths + 24576.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_as_few_as_possible(seed, sync):
    lengths, costs = heavy(seed, 256)
    ranks = form_micro_batches(lengths, costs, 8, max_tokens=65536, sync=sync)
    assert check(lengths, ranks, 8, 65536) == -(-lengths.sum() // (8 * 65536))


def test_micro_batches_of_one_index_are_alike():
    mean = highest = 0.0
    for seed in range(6):
        lengths, costs = heavy(seed, 256)
        ranks = form_micro_batches(lengths, costs, 8, max_tokens=65536, sync="micro_batch")
        loads = np.array([[costs[one].sum() for one in share] for share in ranks])
        mean += loads.sum() / 8
        highest += loads.max(axis=0).sum()
    assert 1 - mean / highest <= 0.035


def test_padded_neighbours_share_a_micro_batch():
    lengths = np.array([10, 1000] * 8)
    ranks = form_micro_batches(lengths, lengths, 2, max_tokens=4000, padded=True, sync="micro_batch")
    waste = sum(one.size * lengths[one].max() - lengths[one].sum() for share in ranks for one in share)
    assert waste <= 990 * 3


def test_pipeline_order_has_the_smaller_ones_at_both_ends():
    lengths = np.array([900, 500, 300, 200, 100])
    (rank,) = form_micro_batches(lengths, lengths, 1, max_tokens=900, order="pipeline", multiple_of=5)
    loads = [int(lengths[one].sum()) for one in rank]
    top = loads.index(max(loads))
    assert loads[: top + 1] == sorted(loads[: top + 1])
    assert loads[top:] == sorted(loads[top:], reverse=True)


def test_empty_and_bad_arguments():
    assert form_micro_batches([], [], 3) == [[], [], []]
    with pytest.raises(ValueError, match="one-dimensional and alike"):
        form_micro_batches([1, 2], [1.0], 2)
    with pytest.raises(ValueError, match="multiple_of"):
        form_micro_batches([1, 2], [1.0, 2.0], 2, multiple_of=0)

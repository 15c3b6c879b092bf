"""Our sampler as TransferQueue's controller calls it, on a partition that is a stand-in; test_ray_transfer_queue.py has
real processes."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transfer_queue")

import stream_balancer as sb
from stream_balancer.integrations.transfer_queue import MARK, BalancedSampler, micro_batches


class Partition:
    """What of DataPartitionStatus the sampler asks."""

    def __init__(self, lengths: dict[int, int], groups: dict[int, str] | None = None) -> None:
        self.tags: dict[int, dict[str, Any]] = {row: {"total_lengths": n} for row, n in lengths.items()}
        for row, group in (groups or {}).items():
            self.tags[row]["group"] = group
        self.ready = list(lengths)

    def get_custom_meta(self, rows: list[int]) -> dict[int, dict[str, Any]]:
        return {row: self.tags[row] for row in rows if row in self.tags}

    def set_custom_meta(self, tags: dict[int, dict[str, Any]]) -> None:
        self.tags |= tags


LENGTHS = dict(enumerate([900, 100, 200, 300, 200, 100, 800, 200]))


def ask(sampler: Any, partition: Partition, rank: int, step: int, per_rank: int = 2, **more: Any) -> list[int]:
    """What a rank gets, as the controller hands it out."""
    config = {"partition_id": "p", "task_name": "t", "dp_rank": rank, "batch_index": step, **more}
    rows, consumed = sampler.sample(partition.ready, per_rank, partition=partition, **config)
    partition.ready = [row for row in partition.ready if row not in consumed]
    return list(rows)


def test_outliers_wait_for_company_and_ranks_finish_together() -> None:
    sampler, partition = BalancedSampler(2), Partition(LENGTHS)
    shares = [ask(sampler, partition, rank, 0) for rank in (1, 0)]
    assert not {0, 6} & {row for share in shares for row in share}
    assert len({sum(LENGTHS[row] for row in share) for share in shares}) == 1


def test_a_window_is_waited_for_and_a_row_without_its_length_is_not_in_it() -> None:
    sampler, partition = BalancedSampler(2), Partition(LENGTHS)
    late = partition.ready.pop()
    assert ask(sampler, partition, 0, 0) == []
    partition.ready.append(late)
    tag = partition.tags.pop(late)
    assert ask(sampler, partition, 0, 0) == []
    partition.tags[late] = tag
    assert ask(sampler, partition, 0, 0)


def test_the_same_share_whoever_asks_first_and_again_and_after_a_checkpoint() -> None:
    sampler, partition = BalancedSampler(2), Partition({row: 10 + row for row in range(32)})
    first = ask(sampler, partition, 1, 0)
    restored = BalancedSampler(2)
    restored.load_checkpoint(pickle.loads(pickle.dumps(sampler.save_checkpoint())))  # noqa: S301 - made here
    assert ask(sampler, partition, 1, 0) == ask(restored, partition, 1, 0) == first
    assert ask(sampler, partition, 0, 0) == ask(restored, partition, 0, 0)
    sampler.clear_cache("p")
    assert sampler.save_checkpoint() == BalancedSampler(2).save_checkpoint()


@given(st.data())
def test_every_row_leaves_once_and_ranks_have_as_many_micro_batches(data: st.DataObject) -> None:
    ranks, per_rank = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    cap = data.draw(st.sampled_from([None, 300]))
    sampler = BalancedSampler(ranks, micro_batches=sb.MicroBatches(max_tokens=cap), sync="step")
    lengths = data.draw(st.lists(st.integers(1, 500), min_size=1, max_size=60))
    partition, trained, came = Partition({}), list[int](), dict[int, int]()
    ahead = data.draw(st.sampled_from([0, 1]))  # one rank may be a step further than the others
    step, steps_of = 0, [0] * ranks
    while len(trained) < len(lengths):
        for row in range(len(came), min(len(came) + ranks * per_rank * 2 - len(partition.ready), len(lengths))):
            partition.tags[row], came[row] = {"total_lengths": lengths[row]}, step
            partition.ready.append(row)
        counts = set()
        for rank in range(ranks):
            if steps_of[rank] > step:
                continue
            for _ in range(1 + (ahead and rank == 0)):
                rows = ask(sampler, partition, rank, steps_of[rank], per_rank, end=len(came) == len(lengths))
                if not rows:
                    break
                steps_of[rank] += 1
                marks = [partition.tags[row][MARK] for row in rows]
                trained += [row for row, mark in zip(rows, marks, strict=True) if mark["weight"]]
                meta = SimpleNamespace(custom_meta=[partition.tags[row] for row in rows])
                found = micro_batches(meta)
                if steps_of[rank] == step + 1:
                    counts.add(len(found))
                for places in found:
                    tokens = sum(lengths[rows[place]] for place in places)
                    assert cap is None or tokens <= cap or len(places) == 1
        assert len(counts) <= 1  # as many micro-batches on every rank
        step += 1
        assert step < 500
    assert sorted(trained) == list(range(len(lengths)))


def test_nobody_is_passed_over_too_often() -> None:
    sampler = BalancedSampler(2, max_skips=3)
    partition = Partition({row: 5000 if row == 0 else 100 for row in range(8)})
    for step in range(4):
        for rank in (0, 1):
            ask(sampler, partition, rank, step)
        for row in range(8 + 4 * step, 12 + 4 * step):
            partition.tags[row] = {"total_lengths": 100}
            partition.ready.append(row)
    assert 0 not in partition.ready


def test_a_row_that_would_be_too_old_goes_now() -> None:
    sampler, partition = BalancedSampler(2, version_key="version", max_versions=2), Partition(LENGTHS)
    for row, tags in partition.tags.items():
        tags["version"] = 3 if row == 0 else 5
    found = [row for rank in (0, 1) for row in ask(sampler, partition, rank, 0, version=5)]
    assert 0 in found, "an outlier that would wait"


def test_groups_leave_whole() -> None:
    rng = np.random.default_rng(0)
    lengths = {row: int(n) for row, n in enumerate(rng.lognormal(5, 1, 48))}
    groups = {row: f"g{row % 16}" for row in lengths}  # siblings come far apart, and in indices that are no neighbours
    sampler = BalancedSampler(2, group_key="group", group_size=3)
    partition = Partition(lengths, groups)
    del partition.ready[-3:]  # the last of three groups
    for step in range(2):
        shares = [ask(sampler, partition, rank, step, 6) for rank in (0, 1)]
        whole = [groups[row] for share in shares for row in share]
        assert all(whole.count(group) == 3 for group in whole)
    assert {row for row in partition.ready if groups[row] in {"g13", "g14", "g15"}} == {13, 14, 15, 29, 30, 31}
    assert all(ask(sampler, partition, rank, 2, 6) == [] for rank in (0, 1))  # whole ones do not fill the window
    left = [row for step in (2, 3) for rank in (0, 1) for row in ask(sampler, partition, rank, step, 6, end=True)]
    assert len(left) == len({*left}) == 21  # what lacks siblings goes, too


def test_the_deadline_sends_fewer_and_a_rank_without_rows_gets_a_copy_of_weight_zero() -> None:
    sampler, partition = BalancedSampler(2, deadline_s=0.0), Partition({5: 70})
    weights = []
    for rank in (0, 1):
        assert ask(sampler, partition, rank, 0) == [5]
        weights.append(partition.tags[5][MARK]["weight"])
    assert sorted(weights) == [0.0, 1.0]


def test_requests_without_a_rank_are_served_in_order_and_wrong_ones_are_refused() -> None:
    sampler, partition = BalancedSampler(2), Partition(LENGTHS)
    assert sampler.sample([3, 4, 5], 2, partition=partition) == ([3, 4], [3, 4])
    assert sampler.sample([3], 2, partition=partition) == ([], [])
    assert sampler.sample([], 2, partition=None, dp_rank=0, batch_index=0) == ([], [])  # nobody has put yet
    with pytest.raises(ValueError, match=r"0 <= dp_rank \(2\) < 2 and a batch_index \(0\)"):
        ask(sampler, partition, 2, 0)
    for knobs, says in (
        ({"group_size": 4}, "group_key and group_size go together"),
        ({"version_key": "version"}, "version_key and max_versions go together"),
        ({"dp_size": 0}, "dp_size must be an int >= 1"),
    ):
        with pytest.raises(ValueError, match=says):
            BalancedSampler(**{"dp_size": 2} | knobs)

"""prime-rl's packing by our plan: its pinned file, and its own tests of it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import their_own_tests

from stream_balancer.integrations.prime_rl import patch


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    source = their_own_tests.checkout("PrimeIntellect-ai/prime-rl") / "src"
    monkeypatch.syspath_prepend(source)
    yield importlib.import_module("prime_rl.trainer.batch")
    for name in [name for name in sys.modules if name.startswith("prime_rl")]:
        del sys.modules[name]


def samples(lengths: Sequence[int], **more: Any) -> list[Any]:
    """Each with tokens and log-probabilities of its own."""
    types = importlib.import_module("prime_rl.transports.rollouts.types")
    return [
        types.TrainingSample(
            token_ids=[place] * length,
            mask=[True] * length,
            logprobs=[-place / 100] * length,
            temperatures=[1.0] * length,
            advantages=[1.0] * length,
            env_name="e",
            **more,
        )
        for place, length in enumerate(lengths)
    ]


def work(lengths: Sequence[int]) -> int:
    return sum(10_000 * length + length * length for length in lengths)


def waits(ranks: Sequence[Sequence[Any]]) -> float:
    """Share of the ranks' time that they wait, meeting at every micro-batch."""
    did = [[work(one.sequence_lengths) * any(one.loss_mask) for one in rank] for rank in ranks]
    return 1 - sum(map(sum, did)) / len(ranks) / sum(map(max, zip(*did, strict=True)))


def test_its_own_tests_pass_on_ours() -> None:
    said = their_own_tests.run("prime-rl")
    # one wants three micro-batches with more than one sample; ours are lighter: [20], [18], [8, 8, 8] and [9, 9]
    assert "1 failed, 22 passed" in said, said
    assert "test_flop_aware_split_to_align_splits_heaviest_flop_bin" in said


def test_ranks_wait_less_with_the_same_samples_and_as_few_micro_batches(batch: Any) -> None:
    before, after = [], []
    for seed in range(4):
        lengths = np.minimum(np.random.default_rng(seed).lognormal(6.5, 1, 64).astype(int) + 1, 2048).tolist()
        theirs = batch.prepare_batch(samples(lengths), 2048, 8, work)
        with their_own_tests.patched(patch):
            ours = batch.prepare_batch(samples(lengths), 2048, 8, work)
        trained = sorted((ids, at) for rank in ours for one in rank for ids, at in zip(one.input_ids, one.position_ids))  # noqa: B905
        assert trained == sorted((place, at) for place, length in enumerate(lengths) for at in range(length))
        assert all(len(one.input_ids) <= 2048 for rank in ours for one in rank)
        assert [len(rank) for rank in ours] == [len(rank) for rank in theirs]
        before.append(waits(theirs))
        after.append(waits(ours))
    assert np.mean(after) < np.mean(before) / 5  # 1 % where prime-rl's wait 13 %


def test_columns_stay_with_their_tokens_truncated_and_padded_as_prime_rl_does(batch: Any) -> None:
    with their_own_tests.patched(patch):
        ((one,), (other,)) = batch.prepare_batch(samples([9, 3, 4]), 8, 2, work, pad_to_multiple_of=8)
    assert one.input_ids == [0] * 8
    assert other.input_ids == [2] * 4 + [1] * 3 + [1]
    assert other.inference_logprobs == [-0.02] * 4 + [-0.01] * 3 + [0.0]
    assert other.loss_mask == [True] * 7 + [False]


def test_prime_rls_plan_remains_where_ours_does_not_apply(batch: Any) -> None:
    types = importlib.import_module("prime_rl.transports.rollouts.types")
    pixels = types.EncodedTensor(dtype="uint8", shape=[1, 1], data=b"\0")
    experts = types.RoutedExperts(data=b"\0" * 4, shape=[4, 1, 1], dtype="uint8")
    images = samples([4], mm_kwargs={"pixel_values": pixels}, mm_token_type_ids=[0, 0, 0, 0])
    cases = [samples([5, 4, 4]) + images, samples([5, 4, 4]) + samples([4], routed_experts=experts)]
    cases += [samples([5, 4, 4]), samples([5])]  # too few for two ranks with as many micro-batches
    expected = [batch.prepare_batch(case, 5, 2, work) for case in cases]
    with their_own_tests.patched(patch):
        assert [batch.prepare_batch(case, 5, 2, work) for case in cases] == expected

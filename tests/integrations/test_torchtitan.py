"""Our rows in torchtitan's Batcher, with its grid of micro-batches and ranks: of its release, and its pinned file."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import their_own_tests

from stream_balancer.integrations.torchtitan import patch

SEQ_LEN, RANKS = 8192, 8


@pytest.fixture(params=["torchtitan", "pytorch/torchtitan"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    their_own_tests.checkout(request.param)
    module = their_own_tests.peer_files.load(request.param, "torchtitan.experiments.rl.components.batcher")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def grid_of(module: Any, lengths: list[int], rows_each: int = 1) -> list[list[list[list[int]]]]:
    """``[micro_batch][rank][row]`` -> places of the samples."""

    class Batcher(module.Batcher):  # type: ignore[misc, name-defined]
        """Its rows and its grid, without the copying of tokens."""

        def _pack_training_sample_row(self, training_samples: list[Any]) -> list[int]:
            return [one.place for one in training_samples]

        @staticmethod
        def collate(rows: list[list[int]]) -> list[list[int]]:
            return rows

    config = SimpleNamespace(
        batch=SimpleNamespace(local_batch_size=rows_each, seq_len=SEQ_LEN), per_sample_pad_multiple=None
    )
    batcher = Batcher(config, num_prompts_per_train_step=1, dp_degree=RANKS, pad_id=0)
    samples = [SimpleNamespace(token_ids=range(n + 1), place=place) for place, n in enumerate(lengths)]
    rows = [batcher._pack_training_sample_row(row) for row in batcher._assign_training_samples_to_rows(samples)]
    return batcher._build_microbatch_grid(rows)  # type: ignore[no-any-return]


def step_time(grid: list[list[list[list[int]]]], lengths: list[int]) -> float:
    """Ranks meet at every micro-batch; a row costs its padded tokens, and its samples' attention, of 2,048 hidden."""
    costs = [
        [sum(24_576 * SEQ_LEN + sum(lengths[i] ** 2 for i in row) for row in rows) for rows in of_ranks]
        for of_ranks in grid
    ]
    return float(sum(map(max, costs)))


@pytest.mark.parametrize("rows_each", [1, 2])
def test_fewer_rows_and_alike_ones_meet(module: Any, rows_each: int) -> None:
    before, after, waits = [], [], []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        lengths = np.minimum(rng.lognormal(7, 1, 128).astype(int) + 1, SEQ_LEN).tolist()
        theirs = grid_of(module, lengths, rows_each)
        with their_own_tests.patched(patch):
            ours = grid_of(module, lengths, rows_each)
        rows = [row for of_ranks in ours for of_rank in of_ranks for row in of_rank]
        assert sorted(i for row in rows for i in row) == list(range(128))
        assert all(sum(lengths[i] for i in row) <= SEQ_LEN for row in rows)
        assert all(len(of_rank) == rows_each for of_ranks in ours for of_rank in of_ranks)
        assert len(ours) <= len(theirs)
        attention = [[sum(lengths[i] ** 2 for row in of_rank for i in row) for of_rank in met] for met in ours]
        waits.append(1 - sum(map(sum, attention)) / RANKS / sum(map(max, attention)))
        before.append(step_time(theirs, lengths))
        after.append(step_time(ours, lengths))
    assert np.mean(waits) < 0.2  # 0.6 where the rows are in another order
    assert np.mean(after) < 0.9 * np.mean(before)


@pytest.mark.parametrize("home", ["torchtitan.rl", "torchtitan.experiments.rl"])
def test_it_is_found_on_main_and_in_0_3_0(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with what is read of it."""

    class Batcher:
        _dp_degree, seq_len = 2, 10
        num_tokens_to_pack = staticmethod(len)

        def _assign_training_samples_to_rows(self, samples: list[str]) -> list[list[str]]:
            return [samples]

    module = ModuleType(f"{home}.components.batcher")
    module.Batcher = Batcher  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchtitan", ModuleType("torchtitan"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with their_own_tests.patched(patch):
        assert sorted(Batcher()._assign_training_samples_to_rows(["a" * 7, "b" * 6])) == [["a" * 7], ["b" * 6]]
    assert Batcher()._assign_training_samples_to_rows(["a", "b"]) == [["a", "b"]]
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(ImportError, match=r"no torchtitan\.rl\.components\.batcher and no torchtitan\.experiments"):
        patch()


def test_few_samples_are_left_to_torchtitan_and_none_are_none(module: Any) -> None:
    theirs = [grid_of(module, lengths) for lengths in ([], [5, 4, 3])]
    with their_own_tests.patched(patch):
        assert [grid_of(module, lengths) for lengths in ([], [5, 4, 3])] == theirs
    assert module.Batcher._assign_training_samples_to_rows.__module__ == module.__name__

"""Our partition in the seam that verl, slime, ROLL, OpenRLHF and TransferQueue share."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import their_own_tests
import torch
from hypothesis import given
from hypothesis import strategies as st

from stream_balancer import planning
from stream_balancer.integrations.partitions import get_seqlen_balanced_partitions, patch

PEERS = [
    "openrlhf.utils.seqlen_balancing",
    "verl.utils.seqlen_balancing",
    "transfer_queue.sampler.seqlen_balanced_sampler",
]


@given(st.lists(st.integers(0, 9000), min_size=1, max_size=60), st.integers(1, 9), st.booleans())
def test_contract(lengths: list[int], k: int, equal_size: bool) -> None:
    lengths = lengths[: max(len(lengths) // k * k, k)] if equal_size else lengths
    if len(lengths) < k:
        for kind in (ValueError, AssertionError):  # ours, and what trainers' own tests expect
            with pytest.raises(kind, match=f"{len(lengths)} items cannot fill {k} partitions"):
                get_seqlen_balanced_partitions(lengths, k, equal_size)
        return
    shares = get_seqlen_balanced_partitions(lengths, k, equal_size)
    assert len(shares) == k
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert all(share and share == sorted(share) and type(share[0]) is int for share in shares)
    if equal_size:
        assert {len(share) for share in shares} == {len(lengths) // k}
    assert shares == get_seqlen_balanced_partitions(lengths, k, equal_size)


def test_unequal_deal_is_refused() -> None:
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match="5 items cannot be split equally over 2 partitions"):
            get_seqlen_balanced_partitions([1] * 5, 2, equal_size=True)


def test_lengths_may_be_tensors_and_arrays() -> None:
    lengths = [5, 1, 4, 2]
    expected = get_seqlen_balanced_partitions(seqlen_list=lengths, k_partitions=2, equal_size=True)
    assert expected == get_seqlen_balanced_partitions(torch.tensor(lengths), 2, True)
    assert expected == get_seqlen_balanced_partitions(np.array(lengths), 2, True)


def test_patch_reaches_copies_imported_by_name_and_can_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    def original(seqlen_list: list[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
        raise NotImplementedError

    home, user, other = ModuleType("home"), ModuleType("user"), ModuleType("other")
    home.get_seqlen_balanced_partitions = user.get_seqlen_balanced_partitions = original  # type: ignore[attr-defined]
    other.get_seqlen_balanced_partitions = print  # type: ignore[attr-defined]
    for module in (home, user, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    put_back = patch(home)
    assert home.get_seqlen_balanced_partitions is user.get_seqlen_balanced_partitions is get_seqlen_balanced_partitions
    assert other.get_seqlen_balanced_partitions is print
    put_back()
    assert home.get_seqlen_balanced_partitions is user.get_seqlen_balanced_partitions is original
    with pytest.raises(AttributeError, match="get_seqlen_balanced_partitions"):
        patch(ModuleType("empty"))


# --- against the real functions ---------------------------------------------------------------------------------------


def worst_excess(lengths: list[int], shares: list[list[int]], *, equal_size: bool) -> float:
    bound = planning.lower_bound(lengths, len(shares), equal_rollouts=equal_size)
    return max(sum(lengths[i] for i in share) for share in shares) / bound - 1


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("equal_size", [True, False])
def test_in_place_of_the_real_one_and_not_worse(name: str, equal_size: bool) -> None:
    pytest.importorskip(name.split(".")[0])
    module = importlib.import_module(name)
    theirs = module.get_seqlen_balanced_partitions
    rng = np.random.default_rng(7)
    batches = [rng.lognormal(7, 1, n).astype(int).tolist() for n in (16, 32, 64, 128, 256)]
    before = [worst_excess(b, theirs(b, 8, equal_size=equal_size), equal_size=equal_size) for b in batches]
    with their_own_tests.patched(patch, module):
        ours = module.get_seqlen_balanced_partitions
        assert ours is get_seqlen_balanced_partitions
        after = [worst_excess(b, ours(b, 8, equal_size=equal_size), equal_size=equal_size) for b in batches]
    assert module.get_seqlen_balanced_partitions is theirs
    assert np.mean(after) <= np.mean(before) + 1e-4
    assert max(after) <= max(before) + 1e-4


class RollBatch:
    """What ROLL's ``batch_balance`` uses of a DataProto."""

    def __init__(self, lengths: Any) -> None:
        self.batch = {"attention_mask": (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()}
        self.order = torch.arange(len(lengths))

    def reorder(self, places: torch.Tensor) -> None:
        self.order = self.order[places]


def test_rolls_batch_balance_gives_every_rank_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    their_own_tests.checkout("alibaba/ROLL")
    monkeypatch.setenv("ROLL_LOG_DIR", str(tmp_path))
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)  # it would take pytest's handlers away
    functionals = their_own_tests.peer_files.load("alibaba/ROLL", "roll.utils.functionals")
    monkeypatch.setitem(sys.modules, functionals.__name__, functionals)
    rng = np.random.default_rng(0)
    batches = [np.minimum(rng.lognormal(7, 1, 128).astype(int) + 1, 8192) for _ in range(4)]

    def idle(**options: Any) -> float:
        shares = []
        for lengths in batches:
            batch = RollBatch(lengths.tolist())
            metrics = functionals.batch_balance(batch, dp_size=8, **options)
            assert sorted(batch.order.tolist()) == list(range(128))
            tokens = lengths[batch.order].reshape(8, 16)
            work = (24_576.0 * tokens + tokens**2).sum(axis=1)  # as it counts
            assert metrics["global_seqlen/balanced_max"] == tokens.sum(axis=1).max()
            shares.append(1 - work.mean() / work.max())
        return float(np.mean(shares))

    kinds: list[dict[str, Any]] = [{"minibatch_size": 128}, {"minibatch_size": 64, "keep_minibatch": True}]
    theirs = [idle(**kind) for kind in kinds]
    with their_own_tests.patched(patch, functionals):
        ours = [idle(**kind) for kind in kinds]
    assert all(after < before / 4 for before, after in zip(theirs, ours, strict=True)), (theirs, ours)

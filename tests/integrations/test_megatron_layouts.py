"""A shared rollout's parts are what Megatron's packed context parallelism holds: its own code, verl's, AReaL's.

megatron-core and TransformerEngine are in no environment here. Of the first, what is asked is which member this is; of
the second, the one kernel that says which tokens that member has, by its formula.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import their_own_tests
import torch
from torch import Tensor

from stream_balancer import Rollout
from stream_balancer.rollouts import MicroBatch

verl = pytest.importorskip("verl")
areal = pytest.importorskip("areal")

MEMBERS = [(size, place) for size in (2, 4, 8) for place in range(size)]
LENGTHS = (61, 8, 16, 3)  # tokens; 3 leaves members of 4 and of 8 with nothing but zeros


@pytest.fixture(params=MEMBERS, ids=lambda member: f"{member[1]} of {member[0]}")
def member(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """(members, place), which Megatron's `parallel_state` says, too."""
    size, place = request.param
    state, parameters = ModuleType("megatron.core.parallel_state"), ModuleType("megatron.core.packed_seq_params")
    state.get_tensor_model_parallel_world_size = lambda: 1  # type: ignore[attr-defined]
    state.get_context_parallel_world_size = lambda: size  # type: ignore[attr-defined]
    state.get_context_parallel_rank = lambda: place  # type: ignore[attr-defined]
    parameters.PackedSeqParams = SimpleNamespace  # type: ignore[attr-defined]
    core = ModuleType("megatron.core")
    core.parallel_state, core.packed_seq_params = state, parameters  # type: ignore[attr-defined]
    for module in (ModuleType("megatron"), core, state, parameters):
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return size, place


def from_file(package: ModuleType, path: str) -> Any:
    """One module, without the packages around it, which want a GPU."""
    spec = importlib.util.spec_from_file_location(f"alone_{Path(path).stem}", Path(package.__path__[0]) / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rollouts() -> list[Rollout]:
    """No token is 0, which is what padding is."""
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    columns = [torch.arange(end - length, end) + 1 for end, length in zip(ends, LENGTHS, strict=True)]
    # nothing predicts a first token
    return [Rollout(tokens={"input_ids": ids, "loss_mask": (ids % 3 != 0) & (ids > ids[0])}) for ids in columns]


@pytest.fixture
def ours(member: tuple[int, int], rollouts: list[Rollout]) -> Any:
    size, place = member
    return MicroBatch.of(rollouts, cp_group=tuple(range(size)), cp_rank=place).packed()


def padded_whole(rollouts: list[Rollout], size: int, name: str) -> Tensor:
    """[T] a column of the whole rollouts, each with zeros up to the next multiple of 2 g, as Megatron's data comes."""
    columns = [rollout.tokens[name] for rollout in rollouts]
    return torch.cat([torch.cat((one, one.new_zeros(-len(one) % (2 * size)))) for one in columns])


def test_verl_cuts_the_same(ours: Any, rollouts: list[Rollout]) -> None:
    util = from_file(verl, "models/mcore/util.py")
    ids = torch.nn.utils.rnn.pad_sequence([rollout.tokens["input_ids"] for rollout in rollouts], batch_first=True)
    theirs, parameters = util.preprocess_packed_seqs(ids, ids != 0)
    assert theirs[0].equal(ours["input_ids"])
    assert parameters.qkv_format == "thd"
    assert parameters.cu_seqlens_q_padded.equal(ours.whole_cu_seqlens_padded)
    assert parameters.cu_seqlens_q_padded.dtype == ours.whole_cu_seqlens_padded.dtype
    assert ours.whole_cu_seqlens.diff().tolist() == list(LENGTHS)


def test_areal_cuts_the_same(member: tuple[int, int], ours: Any, rollouts: list[Rollout]) -> None:
    cut = from_file(areal, "engine/megatron_utils/packed_context_parallel.py")
    boundaries = ours.whole_cu_seqlens_padded
    theirs, _ = cut.preprocess_packed_seqs_context_parallel(padded_whole(rollouts, member[0], "input_ids"), boundaries)
    assert theirs[0].equal(ours["input_ids"])
    mask = cut.split_packed_seqs_for_context_parallel(padded_whole(rollouts, member[0], "loss_mask"), boundaries)
    assert mask.equal(ours["loss_mask"])


def thd_partitioned_indices(cu_seqlens: Tensor, total_tokens: int, size: int, place: int) -> Tensor:
    """As TransformerEngine's kernel does it (fused_attn/context_parallel.cu): of each sequence, halves of a member's
    share are shifted by `place` and by `2 (size - 1) - place` halves."""
    starts = cu_seqlens // size
    token = torch.arange(total_tokens // size, dtype=starts.dtype)
    sequence = torch.searchsorted(starts, token, right=True) - 1
    half = starts.diff()[sequence] // 2
    within = token - starts[sequence]
    shift = torch.where(within < half, place, 2 * (size - 1) - place)
    return within + starts[sequence] * size + half * shift


def test_megatrons_release_cuts_the_same(
    member: tuple[int, int], ours: Any, rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    their_own_tests.checkout("megatron-core")
    utils = their_own_tests.peer_files.load("megatron-core", "megatron.core.utils")
    kernel = SimpleNamespace(thd_get_partitioned_indices=thd_partitioned_indices)
    monkeypatch.setattr(utils, "tex", kernel, raising=False)
    monkeypatch.setattr(utils, "is_te_min_version", lambda _: True)
    size, place = member
    batch = {
        "tokens": padded_whole(rollouts, size, "input_ids")[None],
        "loss_mask": padded_whole(rollouts, size, "loss_mask")[None],
    }
    padded = ours.whole_cu_seqlens_padded
    longest = padded.diff().max()[None]
    cut, parameters = utils.get_thd_batch_on_this_cp_rank(batch, ours.whole_cu_seqlens, padded, longest, size, place)
    assert cut["tokens"][0].equal(ours["input_ids"])
    assert cut["loss_mask"][0].equal(ours["loss_mask"])
    assert parameters.qkv_format == "thd"

"""Our drop-ins against verl's own functions: same signatures, same conventions, and never a worse answer."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import ending_with_us
from guard import GUARD_S
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("verl")

import verl.utils.seqlen_balancing as theirs
import verl.workers.engine.utils as engine_utils
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl import DataProto

from stream_balancer.integrations import verl as ours

NAMES = ["get_seqlen_balanced_partitions", "rearrange_micro_batches"]
seldom_small = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def patched() -> Any:
    put_back = ours.patch()
    yield
    put_back()


@pytest.mark.parametrize("name", NAMES)
def test_the_signature_is_verls(name: str) -> None:
    def shape(function: Any) -> dict[str, object]:
        return {p.name: p.default for p in inspect.signature(function).parameters.values()}

    mine, its = shape(getattr(ours, name)), shape(getattr(theirs, name))
    assert list(mine) == list(its)
    # ROLL's copy has a default where verl's has none
    assert {key: mine[key] for key in its if its[key] is not inspect.Parameter.empty} == {
        key: default for key, default in its.items() if default is not inspect.Parameter.empty
    }


def test_groups_stay_together_through_our_partition(patched: None) -> None:
    lengths = [100] * 4 + [200] * 4 + [150] * 4 + [50] * 4
    uids = [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    parts = theirs.get_group_balanced_partitions(lengths, uids, k_partitions=2)
    assert sorted(chain.from_iterable(parts)) == list(range(16))
    assert [len({uids[i] for i in part}) for part in parts] == [2, 2]
    assert [sum(lengths[i] for i in part) for part in parts] == [1000, 1000]


# --- micro-batches ----------------------------------------------------------------------------------------------------


def padded_batch(lengths: list[int], width: int) -> TensorDict:
    """Left-padded rows of different lengths."""
    mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, width - length :] = 1
    ids = torch.arange(mask.numel()).reshape(mask.shape)
    return TensorDict({"input_ids": ids, "attention_mask": mask}, batch_size=[len(lengths)])


def jagged_batch(lengths: list[int]) -> TensorDict:
    rows = [torch.arange(length) + 1000 * row for row, length in enumerate(lengths)]
    ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    batch = TensorDict({"input_ids": ids}, batch_size=[len(lengths)])
    batch["uid"] = NonTensorStack.from_list([NonTensorData(f"uid-{row}") for row in range(len(lengths))])
    batch["temperature"] = NonTensorData(0.7)
    return batch


def outcome(function: Any, *args: Any, **knobs: Any) -> Any:
    try:
        return function(*args, **knobs)
    except (AssertionError, ValueError) as error:
        return type(error)


@seldom_small
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=24),
    cap=st.integers(30, 120),
    jagged=st.booleans(),
    divided_by=st.sampled_from([None, 1, 2, 3]),
    at_least=st.sampled_from([None, 1, 3, 7]),
    balance=st.booleans(),
    group=st.sampled_from([1, 1, 2, 3]),
)
def test_micro_batches_as_verl_returns_them(
    lengths: list[int], cap: int, jagged: bool, divided_by: int | None, at_least: int | None, balance: bool, group: int
) -> None:
    batch = jagged_batch(lengths) if jagged else padded_batch(lengths, 40)
    knobs: dict[str, Any] = {
        "num_batches_divided_by": divided_by,
        "min_num_micro_batch": at_least,
        "use_dynamic_bsz_balance": balance,
        "force_group_size": group,
    }
    own = outcome(ours.rearrange_micro_batches, batch, cap, **knobs)
    verls = outcome(theirs.rearrange_micro_batches, batch, cap, **knobs)
    if isinstance(own, type):
        assert issubclass(own, ValueError)
        # verl's main asserts, or exceeds the cap, where 0.9.1 has a ValueError
        over = not isinstance(verls, type) and max(sum(lengths[i] for i in one) for one in verls[1]) > cap
        assert over or issubclass(own, verls)
        return
    micro_batches, positions = own
    assert all(type(one) is list and all(type(i) is int for i in one) for one in positions)
    assert sorted(chain.from_iterable(positions)) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in one) <= cap or len(one) == group > 1 for one in positions)
    assert len(positions) % (divided_by or 1) == 0
    assert len(positions) >= (at_least or 1)
    for one in positions:
        starts = one[::group]
        assert all(start % group == 0 for start in starts)
        assert one == [start + k for start in starts for k in range(group)]
    assert len(micro_batches) == len(positions)
    for micro_batch, one in zip(micro_batches, positions, strict=True):
        rows = micro_batch["input_ids"].unbind()
        assert all(torch.equal(row, batch["input_ids"][i]) for row, i in zip(rows, one, strict=True))
        if jagged:
            assert micro_batch["uid"] == [f"uid-{i}" for i in one]
            assert micro_batch["temperature"] == 0.7
    work = [float(theirs.calculate_workload(torch.tensor([lengths[i] for i in one])).sum()) for one in positions]
    if balance:  # up to the heaviest, and down again
        peak = work.index(max(work))
        assert work[: peak + 1] == sorted(work[: peak + 1])
        assert work[peak:] == sorted(work[peak:], reverse=True)
    else:
        assert work == sorted(work, reverse=True)


@pytest.mark.parametrize("cap", [101, 150])
def test_fewer_micro_batches_than_verl_where_they_are_nearly_full(cap: int) -> None:
    own = verls = least = 0
    for seed in range(60):
        lengths = np.random.default_rng(seed).integers(1, 41, 24).tolist()
        batch = jagged_batch(lengths)
        own += len(ours.rearrange_micro_batches(batch, cap)[1])
        verls += len(theirs.rearrange_micro_batches(batch, cap)[1])
        least += -(-sum(lengths) // cap)
    assert least <= own <= verls
    assert own - least <= (verls - least) / 2


def test_a_forced_group_above_the_cap_is_alone_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    from stream_balancer.integrations.verl import seqlen_balancing as module

    logged: list[str] = []  # not caplog: AReaL, imported beside, makes all loggers anew
    monkeypatch.setattr(module.logger, "warning", lambda text, *args: logged.append(text % args))
    lengths = [30, 31, 10, 10, 5, 6, 29, 40]
    _, positions = ours.rearrange_micro_batches(jagged_batch(lengths), 60, force_group_size=2)
    assert sorted(positions) == [[0, 1], [2, 3, 4, 5], [6, 7]]
    assert "2 of 4 forced groups exceed max_token_len=60 (the longest has 69 tokens)" in "".join(logged)


def test_rows_without_a_token_are_placed() -> None:
    _, positions = ours.rearrange_micro_batches(padded_batch([0, 5, 0, 7], 8), 8)
    assert sorted(chain.from_iterable(positions)) == [0, 1, 2, 3]


# --- installed into verl ----------------------------------------------------------------------------------------------


def test_patch_reaches_every_module_and_can_be_undone() -> None:
    before = {name: getattr(theirs, name) for name in NAMES}
    put_back = ours.patch()
    assert theirs.get_seqlen_balanced_partitions is ours.get_seqlen_balanced_partitions
    assert theirs.rearrange_micro_batches is ours.rearrange_micro_batches
    assert engine_utils.rearrange_micro_batches is ours.rearrange_micro_batches
    ours.patch()  # again: the first one knows verl's own
    put_back()
    assert {name: getattr(theirs, name) for name in NAMES} == before
    assert engine_utils.rearrange_micro_batches is before["rearrange_micro_batches"]
    assert all(getattr(ours, name) is not before[name] for name in NAMES)


def test_verls_callers_work_on_ours(patched: None) -> None:
    lengths = [3, 9, 4, 8, 1, 7, 2, 6]
    data = DataProto.from_single_dict(dict(padded_batch(lengths, 10).items()) | {"uid": np.array(list("abcdefgh"))})
    micro_batches, positions = theirs.prepare_dynamic_batch(data, max_token_len=20)
    assert len(micro_batches) == 2
    ids = torch.cat([one.batch["input_ids"] for one in micro_batches])
    assert torch.equal(theirs.restore_dynamic_batch(ids, positions), data.batch["input_ids"])
    assert [list(one.non_tensor_batch["uid"]) for one in micro_batches] == [
        ["abcdefgh"[i] for i in p] for p in positions
    ]

    jagged = jagged_batch(lengths)
    for key, value in {"use_dynamic_bsz": True, "max_token_len_per_gpu": 10, "sp_size": 2}.items():
        jagged[key] = NonTensorData(value)
    micro_batches, positions = engine_utils.prepare_micro_batches(jagged)
    assert sorted(chain.from_iterable(positions)) == list(range(8))
    assert [len(one) for one in micro_batches] == [len(one) for one in positions]


def test_verl_patches_itself_where_the_environment_says_so() -> None:
    code = (
        "import verl, verl.utils.seqlen_balancing as theirs; from stream_balancer.integrations import verl as ours\n"
        "print(theirs.rearrange_micro_batches is ours.rearrange_micro_batches)"
    )
    environment = {**os.environ, "VERL_USE_EXTERNAL_MODULES": "stream_balancer.integrations.verl.autopatch"}
    said = subprocess.check_output(ending_with_us(sys.executable, "-c", code), env=environment, timeout=GUARD_S)
    assert said.split() == [b"True"]


def test_the_ranks_of_a_group_agree(tmp_path: Path) -> None:
    """Three gloo processes whose shares differ; see verl_rank.py for what each asserts."""
    script = Path(__file__).with_name("verl_rank.py")
    path = os.pathsep.join([str(script.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = ending_with_us(sys.executable, script, f"file://{tmp_path}/rendezvous")
    subprocess.run(command, check=True, timeout=GUARD_S, env=os.environ | {"PYTHONPATH": path})

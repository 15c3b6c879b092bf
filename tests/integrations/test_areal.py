"""AReaL's seam with our allocation, and its trajectories in and out, against the real package."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from any_rollouts import DTYPES, column
from children import ending_with_us
from forked import free_port
from guard import GUARD_S
from hypothesis import given, settings
from hypothesis import strategies as st
from their_own_tests import patched

from stream_balancer.integrations.areal import allocate, patch, rollouts_from, trajectories_from
from stream_balancer.testing import make_rollout

pytest.importorskip("areal")

from areal.api.cli_args import MicroBatchSpec
from areal.infra import dist_rollout
from areal.infra.rpc.serialization import serialize_value
from areal.infra.workflow_executor import check_trajectory_format
from areal.utils import data, seqpack

# --- allocation -------------------------------------------------------------------------------------------------------

allocations = st.tuples(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.integers(60, 200),
    st.one_of(st.none(), st.integers(1, 6)),
    st.integers(1, 4),
)


@given(allocations)
def test_allocations_keep_the_contract_and_need_no_more_groups_than_ffd(arguments: Any) -> None:
    values, capacity, min_groups, divisor = arguments
    try:
        theirs = seqpack.ffd_allocate(values, capacity, min_groups, divisor)
    except RuntimeError:
        theirs = None
    try:
        ours = allocate(values, capacity, min_groups, divisor)
    except ValueError:
        assert theirs is None
        return
    assert sorted(i for group in ours for i in group) == list(range(len(values)))
    assert all(group and sum(values[i] for i in group) <= capacity for group in ours)
    assert len(ours) >= (min_groups or 1)
    assert len(ours) % divisor == 0 or len(ours) == len(values)  # one each: as kk has it
    assert theirs is None or len(ours) <= len(theirs)
    assert ours == allocate(np.array(values), capacity, min_groups, divisor)


def test_what_cannot_be_allocated_is_said() -> None:
    with pytest.raises(ValueError, match="a sequence of 9 tokens does not fit into a capacity of 8"):
        allocate([1, 9], 8, 1)
    with pytest.raises(ValueError, match="2 sequences cannot be put into at least 3 groups"):
        allocate([1, 2], 8, 3)
    with pytest.raises(ValueError, match="3 sequences cannot be put into at least 4 groups"):
        allocate([1, 2, 3], 8, 1, 4)


def test_patched_areal_balances_ranks_and_micro_batches_by_name() -> None:
    with pytest.raises(ValueError, match="packing_algorithm must be one of"):
        MicroBatchSpec(packing_algorithm="balanced")
    originals = (seqpack.get_allocate_fn, data.get_allocate_fn, dist_rollout.get_allocate_fn)
    rng = np.random.default_rng(5)
    lengths = rng.lognormal(6, 1, 64).astype(int).tolist()
    cap = max(lengths) * 2
    with patched(patch):
        assert dist_rollout.get_allocate_fn("balanced") is data.get_allocate_fn("balanced") is allocate
        assert data.get_allocate_fn("kk") is seqpack.kk_allocate
        with pytest.raises(ValueError, match="Unknown packing algorithm 'fast'"):
            data.get_allocate_fn("fast")
        found = {
            name: data.allocate_balanced_mbs(MicroBatchSpec(max_tokens_per_mb=cap, packing_algorithm=name), lengths)
            for name in ("ffd", "kk", "balanced")
        }
    assert originals == (seqpack.get_allocate_fn, data.get_allocate_fn, dist_rollout.get_allocate_fn)
    assert "balanced" not in seqpack.PACKING_ALGORITHMS
    heaviest = {name: max(sum(lengths[i] for i in mb) for mb in mbs) for name, mbs in found.items()}
    assert len(found["balanced"]) == math.ceil(sum(lengths) / cap)
    assert len(found["balanced"]) <= len(found["ffd"])
    assert heaviest["balanced"] <= cap


def test_areals_own_micro_batching_splits_what_we_give_out() -> None:
    trajectories = trajectories_from([make_rollout(n, f"r{n}", prompt_tokens=1) for n in (3, 9, 4, 5, 2, 8)])
    with patched(patch):
        spec = MicroBatchSpec(max_tokens_per_mb=12, packing_algorithm="balanced")
        split = data.split_padded_tensor_dict_into_mb_list(data.concat_padded_tensors(trajectories), spec)
    sums = [int(mb["attention_mask"].sum()) for mb in split.mbs]
    assert sum(sums) == 31
    assert max(sums) <= 12
    assert len(sums) == 3


@contextmanager
def worker(module: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """AReaL's worker process, as its local scheduler starts it, and its port."""
    port = free_port()
    options = f"--experiment-name e --trial-name t --role actor --worker-index 0 --host 127.0.0.1 --port {port}"
    folders = ["--nfs-record-root", str(folder / "names"), "--fileroot", str(folder / "files")]
    command = ending_with_us(sys.executable, "-m", module, *options.split(), *folders)
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield process, port
    finally:
        process.kill()
        process.wait()


def configured(process: subprocess.Popen[bytes], port: int, config: Any) -> str:
    """The worker's answer to a config."""
    body = json.dumps({"config": config, "rank": 0}).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/configure", body, {"Content-Type": "application/json"}, method="POST"
    )
    while True:
        assert process.poll() is None
        try:
            with urllib.request.urlopen(asked, timeout=GUARD_S) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return error.read().decode()
        except urllib.error.URLError:  # not listening yet
            time.sleep(0.1)


def test_a_worker_process_knows_the_algorithm(tmp_path: Path) -> None:
    with patched(patch):
        config = serialize_value(MicroBatchSpec(packing_algorithm="balanced"))
    with (
        worker("areal.infra.rpc.rpc_server", tmp_path / "theirs") as theirs,
        worker("stream_balancer.integrations.areal.worker", tmp_path / "ours") as ours,
    ):  # a config of an experiment has a seed; what lacks one is named by its type
        # AReaL 2.0 takes the name unseen, and its first batch fails
        assert re.search("'(dict|MicroBatchSpec)' object has no attribute 'seed'", configured(*theirs, config))
        assert "'MicroBatchSpec' object has no attribute 'seed'" in configured(*ours, config)


# --- trajectories -----------------------------------------------------------------------------------------------------


@st.composite
def trajectories(draw: Any) -> list[dict[str, Any]]:
    """What AReaL's workflows return: the documented columns, and any others."""
    keys = {"loss_mask": torch.int32, "logprobs": torch.float32, "versions": torch.int32}
    keys |= {name: draw(st.sampled_from(DTYPES)) for name in draw(st.sets(st.sampled_from(["values", "x"])))}
    trailing = {name: draw(st.sampled_from([(), (2,)])) for name in keys if name in ("values", "x")}
    images = draw(st.booleans())
    flags = draw(st.booleans())
    found = []
    for _ in range(draw(st.integers(1, 4))):
        lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
        rows = len(lengths)
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        one: dict[str, Any] = {"input_ids": column(draw, mask.shape, torch.int32), "attention_mask": mask}
        one |= {name: column(draw, (*mask.shape, *trailing.get(name, ())), dtype) for name, dtype in keys.items()}
        for name in ("input_ids", *keys):  # AReaL pads with zeros
            one[name][~mask] = 0
        if draw(st.booleans()):
            one["versions"][:, 0] = -1
        one["rewards"] = column(draw, (rows,), torch.float32) / 7
        if flags:
            one["truncated"] = column(draw, (rows,), torch.bool)
            one["turns"] = [draw(st.integers(0, 9)) for _ in lengths]
            one["source"] = draw(st.text("ab"))
        if images:
            one["multi_modal_input"] = [
                {"pixel_values": column(draw, (draw(st.integers(1, 3)), 2), torch.bfloat16)} for _ in lengths
            ]
        found.append(one)
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@given(trajectories(), st.randoms())
@settings(max_examples=60)
def test_every_entry_survives(given_trajectories: list[dict[str, Any]], random: Any) -> None:
    for one in given_trajectories:
        if "multi_modal_input" not in one:
            check_trajectory_format(one)
    made = rollouts_from(given_trajectories)
    firsts = [made[sum(len(one["rewards"]) for one in given_trajectories[:k])] for k in range(len(given_trajectories))]
    random.shuffle(made)
    back = trajectories_from(made)
    order = [[r.rollout_id.partition("/")[0] for r in made].index(r.rollout_id.partition("/")[0]) for r in firsts]
    expected = [one for _, one in sorted(zip(order, given_trajectories, strict=True), key=lambda pair: pair[0])]
    assert len(back) == len(expected)
    for mine, theirs in zip(expected, back, strict=True):
        assert same(mine, theirs), (mine, theirs)
        if "multi_modal_input" not in theirs:
            check_trajectory_format(theirs)


def trajectory(versions: list[list[int]], **more: Any) -> dict[str, Any]:
    tensor = torch.tensor(versions, dtype=torch.int32)
    return {"input_ids": tensor.clone(), "attention_mask": torch.ones_like(tensor).bool(), "versions": tensor, **more}


def test_groups() -> None:
    pair, (single,) = rollouts_from([trajectory([[1], [2]])]), rollouts_from([trajectory([[1]])])
    assert pair[0].group_id == pair[1].group_id is not None
    assert single.group_id is None
    assert [len(one["input_ids"]) for one in trajectories_from([*pair, single])] == [2, 1]


def test_a_padding_copy_is_nobodys_sibling_and_has_a_zero_loss_mask() -> None:
    one = make_rollout(3, "r", group_id="g")
    original, copy = trajectories_from([one, one.padding_copy("p")])
    assert original["loss_mask"].all()
    assert not copy["loss_mask"].any()


def test_what_is_no_trajectory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a trajectory has no \['attention_mask'\]; it has \['input_ids'\]"):
        rollouts_from([{"input_ids": torch.ones(1, 1)}])

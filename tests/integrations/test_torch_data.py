"""The dataset face of a feed, under the real DataLoader; under Lightning and accelerate where they are installed."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import rank_batch
from torch.utils.data import DataLoader
from two_ranks import HERE, torchrun

import stream_balancer as sb
from stream_balancer.integrations.torch_data import RolloutDataset
from stream_balancer.rollouts import Denominators, RankBatch
from stream_balancer.testing import make_rollouts


class Feed:
    """A rank's feed that has all its shares already, and remembers what was acknowledged."""

    def __init__(self, shares: Sequence[RankBatch], auto_ack: bool = True) -> None:
        self._left = deque(shares)
        self.auto_ack = auto_ack
        self.taken = 0
        self.acknowledged: list[int] = []

    def __next__(self) -> RankBatch:
        if self.auto_ack:
            self.acknowledge_through(self.taken - 1)
        if not self._left:
            raise StopIteration
        self.taken += 1
        return self._left.popleft()

    def acknowledge_through(self, step: int) -> None:
        self.acknowledged += range(len(self.acknowledged), step + 1)


def shares_of(steps: Sequence[Sequence[Sequence[int]]]) -> list[RankBatch]:
    """``steps[step][micro_batch]``: lengths of its rollouts."""
    return [
        rank_batch(
            *(make_rollouts(lengths, prefix=f"s{step}m{index}r") for index, lengths in enumerate(micro_batches)),
            step=step,
            dp_size=2,
            denominators=Denominators(100 + step, 200 + step, 300 + step, 100 + step),
        )
        for step, micro_batches in enumerate(steps)
    ]


def dataset_of(steps: Sequence[Sequence[Sequence[int]]], *, auto_ack: bool = True, **options: Any) -> Any:
    feed: Any = Feed(shares_of(steps), auto_ack)
    return RolloutDataset(feed, **options)


def dataset_with(**rollout: Any) -> RolloutDataset:
    """One step of one rollout."""
    feed: Any = Feed([rank_batch([sb.Rollout(**rollout)])])
    return RolloutDataset(feed)


def loader(dataset: RolloutDataset, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=None, **options)


def boundaries(items: Sequence[dict[str, Any]]) -> list[tuple[int, int, bool]]:
    return [(item["step"], item["micro_batch"], item["is_last_micro_batch"]) for item in items]


STEPS = [[[3, 1], [2]], [[5]], [[1], [1], [4, 4]]]
BOUNDARIES = [(0, 0, False), (0, 1, True), (1, 0, True), (2, 0, False), (2, 1, False), (2, 2, True)]

some_steps = st.lists(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=3), min_size=1, max_size=4
)


@given(some_steps)
def test_every_micro_batch_comes_once_with_its_boundaries_and_denominators(steps: list[list[list[int]]]) -> None:
    items = list(loader(dataset_of(steps)))
    assert boundaries(items) == [
        (step, index, index == len(mbs) - 1) for step, mbs in enumerate(steps) for index in range(len(mbs))
    ]
    expected = iter(mb for share in shares_of(steps) for mb in share.micro_batches)
    for item in items:
        packed = next(expected).packed(shift=True)
        assert set(item) == {
            *packed,
            *("cu_seqlens", "max_seqlen", "position_ids"),
            *("rollout_weights", "execution_weights", "execution_loss_tokens"),
            *("step", "micro_batch", "is_last_micro_batch"),
            *("global_num_rollouts", "global_num_tokens", "global_num_loss_tokens", "global_num_executions"),
        }
        beside = {name: getattr(packed, name) for name in ("cu_seqlens", "position_ids", "rollout_weights")}
        for name, column in {**packed, **beside}.items():
            assert item[name].dtype == column.dtype, name
            assert torch.equal(item[name], column), name
        assert item["max_seqlen"] == packed.max_seqlen
        denominators = [item[f"global_num_{of}"] - item["step"] for of in ("rollouts", "tokens", "loss_tokens")]
        assert denominators == [100, 200, 300]


def test_a_share_is_acknowledged_when_the_next_is_asked_for_and_not_before() -> None:
    dataset = dataset_of(STEPS)
    feed = dataset._feed
    seen = [(item["step"], list(feed.acknowledged), feed.taken) for item in loader(dataset)]
    assert seen == [(0, [], 1), (0, [], 1), (1, [0], 2), (2, [0, 1], 3), (2, [0, 1], 3), (2, [0, 1], 3)]
    assert feed.acknowledged == [0, 1, 2]


def test_leaving_early_acknowledges_nothing_and_loses_nothing() -> None:
    dataset = dataset_of(STEPS)
    items: list[dict[str, Any]] = []
    while len(items) < len(BOUNDARIES):
        for item in loader(dataset):
            items.append(item)
            break
        assert dataset._feed.acknowledged == list(range(items[-1]["step"]))
    assert boundaries(items) == BOUNDARIES
    assert list(loader(dataset)) == [] == list(loader(dataset))  # the end is the end
    assert dataset._feed.acknowledged == [0, 1, 2]


def test_a_loop_may_acknowledge_for_itself() -> None:
    dataset = dataset_of(STEPS, auto_ack=False)
    for item in loader(dataset):
        assert dataset._feed.acknowledged == ([0, 1] if item["step"] == 2 else [])
        if item["micro_batch"] == 0:  # of steps 0 and 2 there is more to come
            dataset.acknowledge(item)
    assert dataset._feed.acknowledged == [0, 1]
    dataset.acknowledge(item)
    dataset.acknowledge(item)
    assert dataset._feed.acknowledged == [0, 1, 2]


BESIDE = ("attention_mask", "position_ids", "lengths", "rollout_weights")


@pytest.mark.parametrize(
    ("layout", "beside"),
    [
        (functools.partial(sb.rollouts.MicroBatch.padded, padding_side="left", pad_values={"input_ids": -1}), BESIDE),
        (functools.partial(sb.rollouts.MicroBatch.padded, padding_side="right"), BESIDE),
        (sb.rollouts.MicroBatch.nested, ("rollout_weights",)),
    ],
)
def test_other_layouts(layout: Any, beside: tuple[str, ...]) -> None:
    micro_batches = [mb for share in shares_of(STEPS) for mb in share.micro_batches]
    for item, mb in zip(loader(dataset_of(STEPS, layout=layout)), micro_batches, strict=True):
        rows = layout(mb)
        for name, value in {**rows, **{name: getattr(rows, name) for name in beside}}.items():
            found = [item[name], value]
            one, other = (column.values() if column.is_nested else column for column in found)
            assert torch.equal(one, other), name


def test_tensordict_whole_or_by_column() -> None:
    pytest.importorskip("tensordict")
    dataset = dataset_of([[[3, 2]]], layout=lambda mb: {"rollouts": mb.tensordict()})
    (item,) = loader(dataset, collate_fn=lambda item: item)  # torch's own takes a TensorDict apart
    assert item["rollouts"].batch_size == torch.Size([2])
    (item,) = loader(dataset_of([[[3, 2]]], layout=sb.rollouts.MicroBatch.tensordict))
    assert [row.numel() for row in item["input_ids"].unbind()] == [3, 2]
    assert item["advantage"].tolist() == [1.0, 1.0]


def test_a_layout_that_raises_loses_no_micro_batch() -> None:
    fails = [True]

    def layout(mb: sb.rollouts.MicroBatch) -> sb.rollouts.MicroBatch | Any:
        if fails.pop() if fails else False:
            raise KeyError("once")
        return mb.packed()

    dataset = dataset_of(STEPS, layout=layout)
    with pytest.raises(KeyError, match="once"):
        next(iter(dataset))
    assert boundaries(list(loader(dataset))) == BOUNDARIES


@pytest.mark.parametrize("name", ["step", "cu_seqlens"])
def test_a_column_of_the_datasets_own_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"columns or scalars named \\['{name}'\\], which RolloutDataset gives"):
        next(iter(dataset_with(tokens={"input_ids": [1]}, scalars={name: 1.0})))


def test_own_position_ids_are_the_rollouts() -> None:
    (item,) = loader(dataset_with(tokens={"input_ids": [1, 2], "position_ids": [7, 8]}))
    assert item["position_ids"].tolist() == [7, 8]


@pytest.mark.slow
def test_workers_are_refused() -> None:
    dataset = dataset_of(STEPS)
    with pytest.raises(RuntimeError, match="RolloutDataset needs num_workers=0"):
        next(iter(loader(dataset, num_workers=1, multiprocessing_context="fork")))
    with pytest.raises(TypeError, match="RolloutDataset needs num_workers=0"):
        copy.deepcopy(dataset)  # what spawned workers, and nothing else, would need
    assert boundaries(list(loader(dataset))) == BOUNDARIES


# --- Lightning --------------------------------------------------------------------------------------------------------


def lightning_module(dataset: RolloutDataset, *, prefetch: bool) -> Any:
    """A LightningModule that notes what it trains on, and what was acknowledged by then."""
    lightning = pytest.importorskip("lightning")

    class Base(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.trained: list[tuple[int, int, bool]] = []
            self.acknowledged: list[list[int]] = []

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_on(self, batch: dict[str, Any]) -> Any:
            self.trained += boundaries([batch])
            self.acknowledged.append(list(dataset._feed.acknowledged))
            return (self.weight * batch["logprobs"]).sum() / batch["global_num_loss_tokens"]

    class Ahead(Base):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.train_on(batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if not dataset._feed.auto_ack:
                dataset.acknowledge(batch)

    class ByItself(Base):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, _, _ = next(dataloader_iter)
            return self.train_on(batch)

    return (Ahead if prefetch else ByItself)()


def fit(module: Any, dataset: RolloutDataset, **options: Any) -> None:
    lightning = pytest.importorskip("lightning")
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    lightning.Trainer(accelerator="cpu", **quiet, **options).fit(module, loader(dataset))


@pytest.mark.parametrize(
    ("auto_ack", "options"),
    [
        (True, {"max_epochs": 1}),
        (True, {"max_epochs": 3, "limit_train_batches": 2}),
        (False, {"max_epochs": 1}),  # in a hook
    ],
)
def test_lightning_with_dataloader_iter_or_acknowledgements_in_a_hook(*, auto_ack: bool, options: Any) -> None:
    dataset = dataset_of(STEPS, auto_ack=auto_ack)
    module = lightning_module(dataset, prefetch=not auto_ack)
    fit(module, dataset, **options)
    assert module.trained == BOUNDARIES
    # when each micro-batch is trained on
    assert module.acknowledged == [[], [], [0], [0, 1], [0, 1], [0, 1]]
    assert auto_ack or dataset._feed.acknowledged == [0, 1, 2]


def test_lightning_that_would_acknowledge_too_early_is_refused() -> None:
    dataset = dataset_of(STEPS)
    module = lightning_module(dataset, prefetch=True)
    with pytest.raises(RuntimeError, match="Lightning fetches one batch ahead"):
        fit(module, dataset, max_epochs=1)
    assert dataset._feed.taken == 0


# --- accelerate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("auto_ack", [True, False])
def test_accelerate_that_prepared_the_loader_is_refused(auto_ack: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    dataset = dataset_of(STEPS, auto_ack=auto_ack)
    prepared = accelerate.Accelerator(cpu=True).prepare(loader(dataset))
    with pytest.raises(RuntimeError, match=r"went through accelerator.prepare\(\)"):
        next(iter(prepared))
    assert dataset._feed.taken == 0


# --- both, on two ranks -----------------------------------------------------------------------------------------------


def test_two_ranks_have_the_gradients_of_each_sequence_by_itself_and_wait_less(tmp_path: Path) -> None:
    """The loops of docs/trl.md; see torch_data_rank.py."""
    for name in ("lightning", "accelerate"):
        pytest.importorskip(name)
    found = torchrun(HERE / "torch_data_rank.py", tmp_path)
    for of in ("by_accelerate", "by_lightning"):
        assert found[of]["gradients_apart"] < 1e-6
        assert found[of]["idle"] < found["plain"]["idle"] / 2

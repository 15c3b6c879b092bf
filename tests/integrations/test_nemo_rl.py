"""NeMo-RL's sampler protocol. PyPI's nemo-rl is a placeholder without code, so these run on a stand-in of a class of
its source; with the source on PYTHONPATH they run on the real one."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_balancer.integrations.nemo_rl import BalancedSampler

REAL = importlib.util.find_spec("nemo_rl") is not None

if REAL:
    from nemo_rl.algorithms.async_utils.staleness_sampler import PromptGroupSampler
    from nemo_rl.data_plane import KVBatchMeta
else:

    @dataclass
    class KVBatchMeta:  # type: ignore[no-redef]
        partition_id: str
        task_name: str | None
        sample_ids: list[str]
        sequence_lengths: list[int] | None = None

        def concat(self, *others: KVBatchMeta) -> KVBatchMeta:
            metas = (self, *others)
            return replace(
                self,
                sample_ids=[one for meta in metas for one in meta.sample_ids],
                sequence_lengths=[n for meta in metas for n in meta.sequence_lengths or []],
            )


class Buffer:
    """What a sampler sees of NeMo-RL's TQReplayBuffer."""

    def __init__(self) -> None:
        self.meta_list: list[Any] = []
        self.start_weight_list: list[int] = []
        self.ready_list: list[bool] = []

    def add(self, name: str, weight: int, lengths: list[int] | None, *, ready: bool = True) -> None:
        ids = [f"{name}_g{n}" for n in range(len(lengths or [1]))]
        meta = KVBatchMeta(partition_id="p", task_name="train", sample_ids=ids, sequence_lengths=lengths)
        self.meta_list.append(meta if ready else None)
        self.start_weight_list.append(weight)
        self.ready_list.append(ready)

    def finish(self, slot: int, name: str, lengths: list[int]) -> None:
        self.add(name, self.start_weight_list[slot], lengths)
        for column_ in (self.meta_list, self.start_weight_list, self.ready_list):
            column_[slot] = column_.pop()  # type: ignore[index]

    async def remove(self, idxs: list[int], remove_in_dp: bool) -> int:
        assert not remove_in_dp  # rows must stay readable for the trainer
        for slot in sorted(idxs, reverse=True):
            del self.meta_list[slot], self.start_weight_list[slot], self.ready_list[slot]
        return len(idxs)


def select(sampler: BalancedSampler, weight: int, least: int, most: int) -> tuple[Any, int]:
    return asyncio.run(sampler.select(current_train_weight=weight, min_prompt_groups=least, max_prompt_groups=most))


def test_it_is_a_prompt_group_sampler() -> None:
    sampler = BalancedSampler(Buffer(), dp_size=2)
    assert asyncio.run(sampler.evict(current_train_weight=9)) == 0
    assert sampler.should_abort_inflight(start_weight_version=0, current_train_weight=99) is False
    assert (sampler.is_on_policy, BalancedSampler(Buffer(), dp_size=2, max_staleness_versions=0).is_on_policy) == (0, 1)
    if REAL:
        from nemo_rl.algorithms.async_utils.staleness_sampler import CustomSamplerConfig, create_sampler

        assert isinstance(sampler, PromptGroupSampler)
        target = "stream_balancer.integrations.nemo_rl:BalancedSampler"
        config = CustomSamplerConfig(target=target, dp_size=4, max_staleness_versions=1, window_groups=6)
        built = create_sampler(Buffer(), config)
        assert isinstance(built, BalancedSampler)
        assert built.required_buffer_capacity(4) == 8


OF_TWO: dict[str, list[int]] = {"a": [90, 1], "b": [10, 10], "c": [10, 10], "d": [88, 3]}
OLD = {"old": [1000], "a": [10], "b": [10]}
OF_ANY = {"a": [50], "b": [20, 30], "c": [1], "d": [7, 7, 7]}


@pytest.mark.parametrize(
    ("lengths", "weights", "knobs", "taken"),
    [
        (OF_TWO, {}, {}, ({"a", "d"}, {"b", "c"})),
        (OF_ANY, {}, {"cost": "quadratic"}, ({"a", "b"},)),  # counted as groups, whatever their size
        # as old as allowed: it goes though it does not balance
        (OLD, {"old": 3}, {"max_staleness_versions": 2}, ({"old", "a"}, {"old", "b"})),
        ({"a": [1], "b": [1]}, {"b": 6}, {}, ({"a"},)),  # of a future version
    ],
)
def test_what_is_chosen(
    lengths: dict[str, list[int]], weights: dict[str, int], knobs: dict[str, Any], taken: tuple[set[str], ...]
) -> None:
    buffer = Buffer()
    for name, of_group in lengths.items():
        buffer.add(name, weights.get(name, 5), of_group)
    meta, count = select(BalancedSampler(buffer, dp_size=2, **knobs), 5, 1, 2)
    chosen = {one.partition("_")[0] for one in meta.sample_ids}
    assert chosen in taken
    assert count == len(chosen) == len(lengths) - len(buffer.meta_list)
    assert len(meta.sample_ids) == len(meta.sequence_lengths) == sum(len(lengths[name]) for name in chosen)


def test_it_waits_for_its_window_only_while_something_is_being_generated() -> None:
    buffer = Buffer()
    sampler = BalancedSampler(buffer, dp_size=1, window_groups=3)
    buffer.add("a", 0, [1])
    buffer.add("b", 0, [1])
    buffer.add("c", 0, None, ready=False)
    assert select(sampler, 0, 1, 2) == (None, 0)
    buffer.finish(2, "c", [1])
    assert select(sampler, 0, 1, 2)[1] == 2
    assert select(sampler, 0, 2, 2) == (None, 0)  # NeMo-RL's own minimum
    assert select(sampler, 0, 1, 2)[1] == 1


@given(st.data(), st.booleans())
@settings(max_examples=30)
def test_no_group_is_older_than_allowed_and_every_one_is_trained_once(data: st.DataObject, in_time: bool) -> None:
    """The whole loop: gated admission, groups that finish at once or late and in any order, one selection a step."""
    lookahead, groups, steps = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4)), 10
    rng = random.Random(data.draw(st.integers(0, 2**20)))
    buffer = Buffer()
    sampler = BalancedSampler(buffer, dp_size=2, max_staleness_versions=lookahead)
    names: list[str] = []
    trained: list[str] = []

    async def run() -> None:
        for version in range(steps):
            while await admits(sampler, version):
                for _ in range(groups):
                    names.append(f"group{len(names)}")
                    buffer.add(names[-1], version, None, ready=False)
            assert len(names) == (version + lookahead + 1) * groups
            count = 0
            while count < groups:
                for slot, ready in enumerate(buffer.ready_list):
                    if not ready and (in_time or rng.random() < 0.4):
                        lengths = [rng.randint(1, 99) for _ in range(2)]
                        buffer.finish(slot, names_in(buffer, slot), lengths)
                if in_time:
                    assert max(version - weight for weight in buffer.start_weight_list) <= lookahead
                meta, taken = await sampler.select(
                    current_train_weight=version, min_prompt_groups=groups - count, max_prompt_groups=groups - count
                )
                count += taken
                trained.extend(one for one in meta.sample_ids if one.endswith("_g0")) if taken else None

    def names_in(buffer: Buffer, slot: int) -> str:
        taken = {one.removesuffix("_g0") for one in trained}
        here = {meta.sample_ids[0].removesuffix("_g0") for meta in buffer.meta_list if meta is not None}
        unready_before = sum(not ready for ready in buffer.ready_list[:slot])
        return [name for name in names if name not in taken | here][unready_before]

    asyncio.run(run())
    left = [meta.sample_ids[0] for meta in buffer.meta_list if meta is not None]
    assert len(trained) == steps * groups
    assert len(set(trained + left)) == len(trained) + len(left)


async def admits(sampler: BalancedSampler, version: int) -> bool:
    """Now; who is not admitted does not wait."""
    waiting = asyncio.create_task(sampler.admit(trainer_version_fn=lambda: version))
    await asyncio.sleep(0)
    return waiting.done() or (waiting.cancel() and False)


def test_admission_waits_for_the_trainer_and_resumes_where_it_was() -> None:
    sampler = BalancedSampler(Buffer(), dp_size=1, max_staleness_versions=1)
    sampler.set_dispatch_index(5)

    async def run() -> None:
        assert [await admits(sampler, version) for version in (5, 5, 5, 6)] == [True, True, False, True]

    asyncio.run(run())


def test_bad_knobs_and_calls() -> None:
    for knobs, says in (
        ({"dp_size": 0}, "dp_size must be an int >= 1"),
        ({"max_staleness_versions": -1}, r"max_staleness_versions \(-1\) must be >= 0"),
        ({"window_groups": 0}, r"window_groups \(0\) >= 1"),
        ({"cost": "flops"}, "cost 'flops': no such cost model"),
    ):
        with pytest.raises(ValueError, match=says):
            BalancedSampler(Buffer(), **{"dp_size": 1, **knobs})
    buffer = Buffer()
    sampler = BalancedSampler(buffer, dp_size=1, max_staleness_versions=1, window_groups=9)
    with pytest.raises(ValueError, match=r"window_groups \(9\) could never fill"):
        sampler.required_buffer_capacity(4)
    with pytest.raises(ValueError, match="resume_from_step must be >= 0"):
        sampler.set_dispatch_index(-1)
    with pytest.raises(ValueError, match="min_prompt_groups"):
        select(sampler, 0, 3, 2)
    buffer.add("a", 0, None)
    with pytest.raises(ValueError, match="no sequence_lengths"):
        select(sampler, 0, 1, 1)


def test_the_yaml_of_the_page_is_a_config_that_nemo_rl_starts_with() -> None:
    """Its set-up refuses a buffer below what the sampler says it needs."""
    yaml = pytest.importorskip("yaml")
    page = Path(__file__).parents[2] / "docs" / "adapters.md"
    (block,) = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S)
    config = yaml.safe_load(block)["async_rl"]
    sampler = config["sampler"]
    assert sampler.pop("name") == "custom"
    assert sampler.pop("target") == f"{BalancedSampler.__module__}:{BalancedSampler.__name__}"
    needed = BalancedSampler(None, **sampler).required_buffer_capacity(config["min_groups_for_streaming_train"])
    assert needed is not None
    assert config["max_buffered_rollouts"] >= needed

"""The balanced replay buffer on verl's own ``ReplayBufferAsync``, over a TransferQueue that lives in this process."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import verl.trainer.ppo.v1.replay_buffer as home
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta

from stream_balancer.integrations.verl import sampler
from stream_balancer.integrations.verl.sampler import SamplerKnobs


class Queue:
    """What the replay buffer uses of TransferQueue, in memory."""

    def __init__(self) -> None:
        self.partitions: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)

    def kv_list(self) -> dict[str, dict[str, dict[str, Any]]]:
        return {name: {key: dict(tag) for key, tag in one.items()} for name, one in self.partitions.items()}

    def kv_clear(self, partition_id: str, keys: list[str]) -> None:
        for key in keys:
            self.partitions[partition_id].pop(key, None)

    def put_group(
        self, uid: str, lengths: list[int], steps: int, status: str = "finished", partition: str = "train"
    ) -> None:
        for session, length in enumerate(lengths):
            self.partitions[partition][f"{uid}_{session}_0"] = {"seq_len": length, "status": "success"}
        self.partitions[partition][uid] = {"is_prompt": True, "status": status, "global_steps": steps}


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    own = Queue()
    monkeypatch.setattr(home, "tq", own)
    return own


def buffer_of(threshold: int = 1000, strategy: str = "drop", **kwargs: Any) -> Any:
    return sampler.BalancedReplayBuffer(
        trainer_mode="separate_async",
        trainer_config={},
        max_off_policy_threshold=threshold,
        max_off_policy_strategy=strategy,
        sampler_kwargs=OmegaConf.create({"dp_size": 2, **kwargs}),
        poll_interval=0.001,
        refill_fn=None,
    )


def uids(batch: KVBatchMeta) -> list[str]:
    return sorted({key.split("_")[0] for key in batch.keys})


def loads(batch: KVBatchMeta, dp_size: int) -> list[int]:
    """Tokens per rank, chunked as verl chunks."""
    per_rank = np.array([tag["seq_len"] for tag in batch.tags]).reshape(dp_size, -1)
    return per_rank.sum(axis=1).tolist()


def test_verls_trainer_builds_it() -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    settings = {
        "custom_sampler": {"path": "pkg://stream_balancer.integrations.verl.sampler", "name": "BalancedReplayBuffer"},
        "max_off_policy_threshold": 4,
        "max_off_policy_strategy": "drop",
        "sampler_kwargs": {"dp_size": 8, "max_skips": 3},
    }
    config = OmegaConf.create({"trainer": {"v1": {"sampler": settings, "separate_async": {}}}})
    trainer = SimpleNamespace(config=config, trainer_mode="separate_async", _add_prompts_to_generate=lambda n: n)
    buffer = PPOTrainer._build_replay_buffer(trainer)
    assert isinstance(buffer, sampler.BalancedReplayBuffer)
    assert isinstance(buffer, home.ReplayBufferAsync)
    assert buffer.knobs == SamplerKnobs(dp_size=8, max_skips=3)
    assert all(hasattr(buffer, name) for name in ("wait_for_sampleable", "get_sampleable_count"))


def test_what_balances_goes_and_lies_rank_by_rank(queue: Queue) -> None:
    for uid, lengths in {"a": [9000, 100], "b": [200, 300], "c": [400, 100], "d": [250, 250], "e": [300, 200]}.items():
        queue.put_group(uid, lengths, steps=0)
    buffer = buffer_of()
    batch, metrics = buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    assert isinstance(batch, KVBatchMeta)
    assert "a" not in uids(batch)  # one trajectory outweighs everything else: it waits for company
    assert len(batch) == 4
    assert max(loads(batch, 2)) - min(loads(batch, 2)) <= 100
    assert metrics["training/window/waiting"] == 5
    left = {key for key, tag in queue.partitions["train"].items() if tag.get("is_prompt")}
    assert left == set("abcde") - set(uids(batch))


def stream(queue: Queue, buffer: Any, batch_size: int, waiting: int, steps: int, seed: int = 0) -> list[list[str]]:
    """Whole groups of heavy-tailed lengths arrive as fast as they leave. -> uids of each step's batch."""
    rng = np.random.default_rng(seed)
    sampled, made = [], 0
    for step in range(1, steps + 1):
        while buffer.get_sampleable_count(step, "train") < waiting:
            size = 4 if rng.random() < 0.8 else 3  # now and then a session fails
            lengths = np.minimum(rng.lognormal(7, 1.2, size), 30_000).astype(int).tolist()
            queue.put_group(f"u{made:04}", lengths, steps=step)
            made += 1
        batch, _ = buffer.sample(step, "train", batch_size)
        assert len(uids(batch)) == batch_size
        sampled.append(uids(batch))
    return sampled


def test_every_group_leaves_once_and_none_is_passed_over_too_often(queue: Queue) -> None:
    buffer = buffer_of(max_skips=3, dp_size=4)
    sampled = stream(queue, buffer, batch_size=8, waiting=24, steps=40)
    flat = [uid for batch in sampled for uid in batch]
    assert len(flat) == len(set(flat))
    first_seen = {f"u{n:04}": max(0, (n - 24) // 8 + 1) for n in range(40 * 8 + 16)}  # the step a group came in
    passed_over = [step - first_seen[uid] for step, batch in enumerate(sampled) for uid in batch]
    assert max(passed_over) == 3
    gone = {uid for uid, seen in first_seen.items() if seen < 36}
    assert gone <= set(flat)


def test_nothing_goes_stale_that_the_oldest_first_would_have_trained_on(queue: Queue) -> None:
    buffer = buffer_of(threshold=4, max_skips=50, dp_size=4)
    sampled = stream(queue, buffer, batch_size=8, waiting=24, steps=40)  # oldest first, a group is gone after 3 steps
    waiting = {key for key, tag in queue.partitions["train"].items() if tag.get("is_prompt")}
    flat = [uid for batch in sampled for uid in batch]
    assert sorted([*flat, *waiting]) == [f"u{n:04}" for n in range(len(flat) + len(waiting))]  # none was evicted


def test_validation_takes_what_verl_takes(queue: Queue) -> None:
    for n in range(4):
        queue.put_group(f"v{n}", [100 * n + 1], steps=n, partition="val")
    batch, metrics = buffer_of().sample(1, "val", 2)
    assert uids(batch) == ["v0", "v1"]
    assert metrics == {}


def test_rows_that_cannot_be_dealt_equally_keep_verls_order(queue: Queue) -> None:
    queue.put_group("a", [5, 1, 3], steps=0)
    batch, _ = buffer_of().sample(1, "train", 1)
    assert batch.keys == ["a_0_0", "a_1_0", "a_2_0"]


class Clock:
    """Time that passes only in sleep(), and lets things happen then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.events: list[tuple[float, Any]] = []
        monkeypatch.setattr(home.time, "sleep", self.sleep)
        monkeypatch.setattr(sampler.time, "monotonic", lambda: self.now_s)

    def sleep(self, _: float) -> None:
        self.now_s += 1.0
        for due in [one for one in self.events if one[0] <= self.now_s]:
            self.events.remove(due)
            due[1]()


@pytest.mark.parametrize(
    ("third_at_s", "left_at_s"),
    [(3.0, 3.0), (50.0, 5.0), (None, 0.0)],  # in time, too late, and where nothing more can come
)
def test_it_waits_for_the_window_and_no_longer_than_the_deadline(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, third_at_s: float | None, left_at_s: float
) -> None:
    clock = Clock(monkeypatch)
    queue.put_group("a", [10], steps=0)
    queue.put_group("b", [20], steps=0)
    if third_at_s is not None:
        queue.put_group("c", [30], steps=0, status="running")
        clock.events.append((third_at_s, lambda: queue.put_group("c", [30], steps=0)))
    batch, _ = buffer_of(window=3, deadline_s=5.0).sample(1, "train", 2)
    assert clock.now_s == left_at_s
    assert len(uids(batch)) == 2


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "missing required field `dp_size`"),
        ({"dp_size": 0}, r"Expected `int` >= 1 - at `\$.dp_size`"),
        ({"dp_size": 2, "max_skips": -1}, r">= 0 - at `\$.max_skips`"),
        ({"dp_size": 2, "windows": 8}, "unknown field `windows`"),
        ({"dp_size": 2, "window": 8}, "window and deadline_s go together"),
        ({"dp_size": 2, "window": 8, "deadline_s": 0}, r"> 0.0 - at `\$.deadline_s`"),
    ],
)
def test_knobs_that_cannot_work_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampler.BalancedReplayBuffer(trainer_mode="separate_async", sampler_kwargs=kwargs)


def test_a_sync_trainer_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to choose"):
        sampler.BalancedReplayBuffer(trainer_mode="sync", sampler_kwargs={"dp_size": 2})

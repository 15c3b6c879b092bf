"""The rollout side: an engine that samples many conversations at once, and workers that make GRPO groups with it.

::

    worker 1 --generate--> Engine (continuous batching, one token of every conversation per step)
    worker 2 -->               ^ load(version, weights), between two tokens of a rollout if need be
    ...      --put_group--> balancer (a full one makes workers wait, and so the engine)

The engine stands for vLLM or SGLang. Nothing here knows how training works or where it runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import TypeAlias

import anyio
import anyio.lowlevel
import task
import torch
from model import Decoder
from torch import Tensor
from torch.nn.utils import vector_to_parameters

import stream_balancer as sb

__all__ = ["Balancer", "Engine", "Sample", "generate_groups", "group_advantages"]

Balancer: TypeAlias = sb.StreamBalancer | sb.Producer  # in this process, or in another one


@dataclass(eq=False)
class Sample:
    """One conversation while it is sampled, token by token."""

    conversation: task.Conversation
    ids: list[int] = field(default_factory=list)
    """What was said so far. The last ones may still have to go through the model."""
    logprobs: list[float] = field(default_factory=list)
    """Of the policy's tokens when they were sampled; 0.0 for the others'."""
    loss_mask: list[bool] = field(default_factory=list)
    """True for the policy's tokens: nobody learns to say what the user said."""
    versions: tuple[int, int] = (0, 0)
    """Policy versions of the first and the last token."""
    slot: int = -1
    num_seen: int = 0
    """Tokens that went through the model."""
    over: anyio.Event = field(default_factory=anyio.Event)

    def hear(self, tokens: Sequence[int]) -> None:
        """Somebody else's tokens: the prompt, or what the user says."""
        self.ids.extend(tokens)
        self.logprobs.extend(0.0 for _ in tokens)
        self.loss_mask.extend(False for _ in tokens)

    def say(self, token: int, logprob: float) -> None:
        """A token of the policy, and what the user replies to it."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.loss_mask.append(True)
        reply = self.conversation.reply(token)
        self.hear(reply)
        if not reply:
            self.over.set()


class Engine:
    """Samples from a policy, ``slots`` conversations at a time, each in its own part of one key-value cache.

    Prompts and users' words are fed token by token, like the policy's own: one code path, and a new conversation joins
    the others at any step.
    """

    def __init__(self, model: Decoder, *, slots: int, temperature: float, seed: int) -> None:
        self._model = model
        self._temperature = temperature
        self._cache = model.new_cache(slots, task.MAX_TOKENS)
        self._free_slots = list(range(slots))
        self._slot_freed = anyio.Semaphore(slots)
        self._running: list[Sample] = []
        self._wake = anyio.Event()
        self._version = 0
        self._rng = torch.Generator().manual_seed(seed)

    def load(self, version: int, weights: Tensor) -> None:
        """New weights, flat. Conversations under way go on with them, on the keys and values of the old ones."""
        vector_to_parameters(weights, self._model.parameters())
        self._version = version

    async def generate(self, sample: Sample) -> None:
        """Fill ``sample`` in, until its conversation is over."""
        async with self._slot_freed:
            sample.slot = self._free_slots.pop()
            sample.versions = (self._version, self._version)
            sample.hear(sample.conversation.opening())
            self._running.append(sample)
            self._wake.set()
            await sample.over.wait()
            self._free_slots.append(sample.slot)

    async def run(self) -> None:
        """Sample whatever there is to sample, for ever."""
        while True:
            if not self._running:
                self._wake = anyio.Event()
                await self._wake.wait()
            self._step()
            await anyio.lowlevel.checkpoint()  # others' turn: workers, the balancer, new weights

    def _step(self) -> None:
        """One token of every conversation through the model; where it was the last one known, one more is sampled."""
        running = self._running
        logits = self._model.decode(
            torch.tensor([s.ids[s.num_seen] for s in running]),
            torch.tensor([s.num_seen for s in running]),
            torch.tensor([s.slot for s in running]),
            self._cache,
        )
        logprobs = (logits / self._temperature).log_softmax(-1)
        tokens = torch.multinomial(logprobs.exp(), 1, generator=self._rng)
        sampled = zip(running, tokens[:, 0].tolist(), logprobs.gather(1, tokens)[:, 0].tolist(), strict=True)
        for sample, token, logprob in sampled:
            sample.num_seen += 1
            if sample.num_seen == len(sample.ids):
                sample.say(token, logprob)
                sample.versions = (sample.versions[0], self._version)
        self._running = [s for s in running if not s.over.is_set()]


async def generate_groups(
    engine: Engine, balancer: Balancer, *, num_groups: int, group_size: int, num_workers: int, seed: int
) -> None:
    """All workers at once, until ``num_groups`` groups were put."""
    groups = iter(range(num_groups))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        async with anyio.create_task_group() as workers:
            for _ in range(num_workers):
                workers.start_soon(_work, engine, balancer, groups, group_size, seed)
        tasks.cancel_scope.cancel()


async def _work(engine: Engine, balancer: Balancer, groups: Iterator[int], group_size: int, seed: int) -> None:
    """One worker: sample all siblings of a prompt, compare their rewards, put the group, and again."""
    for group in groups:
        rng = random.Random(f"{seed}/{group}")
        prompt = rng.randrange(10)
        samples = [Sample(task.new_user(prompt, rng)) for _ in range(group_size)]
        async with anyio.create_task_group() as siblings:
            for sample in samples:
                siblings.start_soon(engine.generate, sample)
        await balancer.put_group(_rollouts(group, samples))


def _rollouts(group: int, samples: Sequence[Sample]) -> list[sb.Rollout]:
    rewards = [s.conversation.reward for s in samples]
    return [
        sb.Rollout(
            tokens={
                "input_ids": torch.tensor(sample.ids),
                "logprobs": torch.tensor(sample.logprobs),
                "loss_mask": torch.tensor(sample.loss_mask),
            },
            scalars={"advantage": advantage, "reward": reward},
            rollout_id=str(group * len(samples) + i),
            group_id=str(group),
            version=sample.versions,
        )
        for i, (sample, reward, advantage) in enumerate(zip(samples, rewards, group_advantages(rewards), strict=True))
    ]


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """[G] reward of each sibling over their mean, in standard deviations: the G and the R of GRPO."""
    mean, deviation = fmean(rewards), pstdev(rewards)
    return [(reward - mean) / (deviation + 1e-3) for reward in rewards]

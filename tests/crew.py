"""Ranks that iterate their steps and meet once in each, in one event loop; was everything in one gradient, once?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio
from invariants import verify

import stream_balancer as sb
from stream_balancer.client.feed import RankFeed
from stream_balancer.client.step import End, Step
from stream_balancer.host.serve import serve
from stream_balancer.rollouts import MicroBatch, Rollout
from stream_balancer.testing.network import MemoryNetwork, MemoryPeer

WHENS = ["work", "barrier", "meeting", "met"]


class KilledError(Exception):
    """The trainer's process is gone."""


class Crew:
    """``die[rank]`` is ``(step, when)``: before its "work", at the "barrier" before it asks for the seal, before it is
    "meeting" the others, or having "met" them, before it acknowledges."""

    def __init__(self, network: MemoryNetwork, die: dict[int, tuple[int, str]] | None = None) -> None:
        self.network, self.die = network, die or {}
        self.met: dict[int, Counter[str]] = {}
        """By step: how often each rollout is in the gradient."""
        self.ends: dict[int, set[End]] = {}
        """What each of its ranks was told to divide by."""
        self.present: dict[int, tuple[int, ...]] = {}
        self.trained: list[tuple[int, int, str]] = []
        """(rank, step, rollout) in the order of training, thrown away or not."""
        self.seen: dict[str, Rollout] = {}
        self.replaced: list[tuple[int, int]] = []
        """(rank, step) of gradients that did not count."""
        self.errors: list[Exception] = []
        self.ended: list[int] = []
        self.peers: dict[int, MemoryPeer] = {}
        self.feeds: dict[int, RankFeed] = {}
        self.weights: dict[int, dict[str, int]] = {}
        """By rank: what its feed said of the weights after the last step."""
        self.rejoin = False
        self.is_elastic = True
        """Ranks are served with ``on_rank_loss="replan"``, and their collectives fail if one is lost."""
        self.connect: Callable[..., Any] = network.connect
        self.seconds: Callable[[int, int], float] = lambda rank, step: 1.0
        """Of a micro-batch."""
        self._here: dict[tuple[int, tuple[int, ...]], dict[int, Counter[str]]] = {}
        self._met: dict[int, anyio.Event] = {}

    async def train(self, rank: int, *, loads: int | None = None, **join: Any) -> None:
        """``loads``: the rank whose weights are loaded where those of this one lack a step."""
        options = {name: join.pop(name) for name in ("next_step", "auto_ack") if name in join}
        peer = self.peers[rank] = self.connect(rank, **{"rejoin": self.rejoin, **join})
        feed = self.feeds[rank] = RankFeed(peer, **options)
        try:
            await self.iterate(rank, feed, loads)
            self.ended.append(rank)
        except KilledError:
            self.kill(rank)
        except (sb.errors.RankLostError, sb.errors.RefusedError) as error:
            self.errors.append(error)
            await feed.aclose()  # the process ends

    async def iterate(self, rank: int, feed: RankFeed, loads: int | None) -> None:
        while True:
            try:
                async for step in feed:
                    await self.train_step(rank, step)
                return
            except sb.errors.RankLostError as error:
                if loads is None or error.cause != "other ranks have trained without it":
                    raise
                await anyio.sleep(1.0)
                self.weights[rank] = self.weights[loads]
                feed.load_state_dict(self.weights[rank])

    async def train_step(self, rank: int, step: Step) -> None:
        gradient: Counter[str] = Counter()
        self.dies(rank, step.step, "work")
        for micro_batch in step:
            await self.work(rank, step.step, micro_batch)
            self.add(rank, step.step, micro_batch, gradient)
        self.dies(rank, step.step, "barrier")
        end = await step.async_finish()
        if end is None:
            self.replaced.append((rank, step.step))
            return
        self.ends.setdefault(step.step, set()).add(end)
        for _ in range(1 if self.is_elastic else 500):  # a plain loop waits in its collective
            if await self.meet(step.step, rank, end.ranks, gradient):
                self.weights[rank] = self.feeds[rank].state_dict()
                self.dies(rank, step.step, "met")
                return
        step.failed()
        self.replaced.append((rank, step.step))

    async def work(self, rank: int, step: int, micro_batch: MicroBatch) -> None:
        """Takes as long as a forward and a backward."""
        await anyio.sleep(self.seconds(rank, step))

    def add(self, rank: int, step: int, micro_batch: MicroBatch, gradient: Counter[str]) -> None:
        for rollout in micro_batch.rollouts:
            self.seen.setdefault(rollout.rollout_id, rollout)
            if not rollout.is_padding:
                self.trained.append((rank, step, rollout.rollout_id))
                gradient[rollout.rollout_id] += 1

    def kill(self, rank: int) -> None:
        """The process is gone, with its I/O thread."""
        self.feeds[rank]._port.session.line.rejoin = False
        self.peers[rank].cut()

    def dies(self, rank: int, step: int, when: str) -> None:
        if self.die.get(rank) == (step, when):
            del self.die[rank]
            raise KilledError

    async def meet(self, step: int, rank: int, ranks: tuple[int, ...], gradient: Counter[str]) -> bool:
        """An all_reduce among these ranks; False if one of them does not come."""
        assert rank in ranks
        self.dies(rank, step, "meeting")
        here = self._here.setdefault((step, ranks), {})
        here[rank] = gradient
        met = self._met.setdefault(step, anyio.Event())
        if len(here) == len(ranks) and step not in self.met:
            self.met[step], self.present[step] = sum(here.values(), Counter()), ranks
            met.set()
        try:
            with anyio.move_on_after(5.0):
                await met.wait()
        finally:
            if step not in self.met:
                del here[rank]
        return step in self.met and rank in self.present[step]

    async def run(
        self, balancer: sb.StreamBalancer, rollouts: Sequence[Rollout], *others: Callable[[], Any], **options: Any
    ) -> None:
        """Serve, train on every rank, put, end."""
        with anyio.fail_after(3600):  # virtual
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(serve, **options), balancer, self.network)
                for rank in range(self.network.dp_size):
                    tasks.start_soon(self.train, rank)
                for other in others:
                    tasks.start_soon(other)
                for rollout in rollouts:
                    await balancer.put(rollout)
                balancer.end()

    def check(self, balancer: sb.StreamBalancer, rollouts: int) -> None:
        """Every rollout is in one step's gradient, once; and acknowledged, once."""
        total: Counter[str] = sum(self.met.values(), Counter())
        assert set(total.values()) == {1}
        assert len(total) == balancer.statistics().acknowledged == rollouts
        assert balancer.statistics().in_flight == balancer.statistics().waiting == 0
        for step, gradient in self.met.items():
            sizes = {end[1:] for end in self.ends[step] if end.ranks == self.present[step]}
            assert len(sizes) == 1, "all ranks divide by the same"
            assert next(iter(sizes))[0] == len(gradient)
        verify(balancer.parts.core)

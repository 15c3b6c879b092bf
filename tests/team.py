"""Ranks that meet once a step, in one event loop, with those that are left; was every rollout trained on once?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import anyio
from helpers import kill

import stream_balancer as sb
from stream_balancer.testing import MemoryNetwork


class KilledError(Exception):
    """The trainer's process is gone."""


class Team:
    """Ranks that meet once a step, as under DDP: with those that are left, or not at all.

    ``die[rank]`` is ``(step, when)``: before its "work", "asking" what it takes over, before it is "meeting" the
    others, or having "met" them, before it acknowledges.
    """

    def __init__(self, transport: MemoryNetwork, die: dict[int, tuple[int, str]] | None = None) -> None:
        self.transport, self.die = transport, die or {}
        self.feeds: dict[int, sb.RankFeed] = {}
        self.met: dict[int, Counter[str]] = {}
        """By step: how often each rollout is in the gradient, after all denominators."""
        self.denominators: dict[int, set[tuple[int, int]]] = {}
        self.present: dict[int, tuple[int, ...]] = {}
        self.dp_sizes: dict[int, int] = {}
        self.errors: list[sb.RankLostError] = []
        self._here: dict[tuple[int, tuple[int, ...]], dict[int, Counter[str]]] = {}
        self._met: dict[int, anyio.Event] = {}

    async def train(self, rank: int, *, incarnation: int = 0, seconds: float = 1.0) -> None:
        feed = self.feeds[rank] = sb.RankFeed(self.transport.connect(rank, incarnation=incarnation))
        try:
            async for batch in feed:
                gradient: Counter[str] = Counter()
                self.dies(rank, batch.step, "work")
                await self.work(rank, batch, gradient, seconds)
                for _ in range(5):
                    self.dies(rank, batch.step, "asking")
                    ranks = await self.take_over(rank, batch, gradient, seconds)
                    if await self.meet(batch.step, rank, ranks, gradient):
                        break
                else:
                    raise AssertionError("the ranks never met")
                self.dies(rank, batch.step, "met")
        except KilledError:
            kill(feed)
        except sb.RankLostError as error:
            self.errors.append(error)

    async def work(self, rank: int, batch: sb.RankBatch, gradient: Counter[str], seconds: float) -> None:
        """What was planned for it."""
        await anyio.sleep(seconds * (1 + rank / 10))
        self.add(batch, batch.rollouts, gradient)

    async def take_over(
        self, rank: int, batch: sb.RankBatch, gradient: Counter[str], seconds: float
    ) -> tuple[int, ...]:
        """What it does instead of others. -> who meets."""
        others = self.feeds[rank].reassigned()
        async for more in others:
            await anyio.sleep(seconds / 2)
            self.add(more, more.rollouts, gradient)
        return others.ranks

    def dies(self, rank: int, step: int, when: str) -> None:
        if self.die.get(rank) == (step, when):
            del self.die[rank]
            raise KilledError

    def add(self, batch: sb.RankBatch, rollouts: Sequence[sb.Rollout], gradient: Counter[str]) -> None:
        gradient.update(r.rollout_id for r in rollouts if not r.is_padding)
        self.denominators.setdefault(batch.step, set()).add((batch.global_num_rollouts, batch.global_num_loss_tokens))
        self.dp_sizes[batch.step] = batch.dp_size

    async def meet(self, step: int, rank: int, ranks: tuple[int, ...], gradient: Counter[str]) -> bool:
        """An all_reduce among these ranks; False if one of them does not come."""
        assert rank in ranks
        self.dies(rank, step, "meeting")
        here = self._here.setdefault((step, ranks), {})
        here[rank] = gradient
        met = self._met.setdefault(step, anyio.Event())
        if len(here) == len(ranks):
            total: Counter[str] = sum(here.values(), Counter())
            assert step not in self.met
            self.met[step], self.present[step] = total, ranks
            met.set()
        try:
            with anyio.move_on_after(5.0):
                await met.wait()
        finally:
            if step not in self.met:
                del here[rank]
        return step in self.met and rank in self.present[step]


def check_exact(balancer: sb.StreamBalancer, team: Team, rollouts: int = 60) -> None:
    """Every rollout is in one step's gradient, once; and acknowledged, once."""
    total: Counter[str] = sum(team.met.values(), Counter())
    assert set(total.values()) == {1}
    assert len(total) == balancer.statistics().acknowledged == rollouts
    assert balancer.statistics().in_flight == balancer.statistics().waiting == 0
    assert all(len(found) == 1 for found in team.denominators.values()), "all ranks divide by the same"
    assert all(sum(team.met[step].values()) == number for step, ((number, _),) in team.denominators.items())
    balancer.parts.core.verify()

"""Workers that put in every way, and ask for whatever may be asked of a balancer while its steps are under way."""

from __future__ import annotations

import inspect
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio

import stream_balancer as sb
from stream_balancer.rollouts import Rollout

__all__ = ["Workers", "in_every_way", "one_by_one"]

Job = list[tuple[Any, ...]]
"""Calls of one worker, the next one first: ("put", rollouts, complete), or what is told of a group, with arguments."""


def one_by_one(rollouts: Iterable[Rollout]) -> deque[Job]:
    return deque([[("put", [rollout], False) for rollout in rollouts]])


def in_every_way(chance: random.Random, rollouts: Sequence[Rollout], group_size: int | None) -> deque[Job]:
    """Groups, short ones and some as large as a step among them, in pieces, at once, as executions; or no groups."""
    jobs, left = deque[Job](), deque(rollouts)
    for number in range(len(rollouts)):
        if not left:
            break
        if group_size is None:
            jobs.append([("put", [left.popleft()], False)])
            continue
        name = f"group {number}"
        how = chance.choice(["alone", "at once", "closed", "closed by another", "expected", "abandoned", "executions"])
        size = {"alone": group_size, "at once": chance.choice([group_size, 12]), "expected": chance.randint(1, 6)}
        some = [left.popleft() for _ in range(min(size.get(how, chance.randint(1, group_size)), len(left)))]
        jobs.append([(call, *args) for call, *args in _calls(how, name, [replace(one, group_id=name) for one in some])])
    return jobs


def _calls(how: str, name: str, some: list[Rollout]) -> Iterator[tuple[Any, ...]]:
    match how:
        case "at once":
            yield "put", some, False
        case "closed":
            yield from (("put", [one], False) for one in some[:-1])
            yield "put", some[-1:], True
        case "executions":
            for first in range(0, len(some), 2):
                yield "put", [replace(one, execution_id=f"run {first}") for one in some[first : first + 2]], False
            yield "close_group", name
        case "abandoned":
            yield from (("put", [one], False) for one in some[:-1])
            yield "abandon_group", name
            yield "put", some[-1:], False
        case _:
            if how == "expected":
                yield "expect_group", name, len(some)
            yield from (("put", [one], False) for one in some)
            yield "close_group", name


class Workers:
    """Those who put, and what became of each rollout. ``wild``: they lose patience, their filter answers late, and
    knobs and versions change meanwhile."""

    def __init__(
        self, chance: random.Random, jobs: deque[Job], remote: Callable[[Rollout], Rollout], wild: bool
    ) -> None:
        self.chance, self.jobs, self.remote, self.wild = chance, jobs, remote, wild
        self.accepted = set[str]()
        self.given_up = set[str]()
        """Their put was cancelled, or raised, and so nothing more of their group was put."""
        self.doubtful = set[str]()
        """Their group was closed by the time a controller that was started again was asked to put them once more."""
        self.unwanted = set[str]()
        """Their group was abandoned before they were put."""
        self._under_way, self._abandoned = set[str](), set[str]()

    def accept(self, rollouts: Sequence[Rollout]) -> bool | Awaitable[bool]:
        delay, answer = self.chance.choice([None, 0.0, 0.3, 5.0]), self.chance.random()

        async def later() -> bool:
            await anyio.sleep(delay or 0.0)
            if answer > 0.97:
                raise LookupError("no reward model")
            return answer < 0.8

        return answer < 0.8 if delay is None else later()

    async def work(self, balancer: sb.StreamBalancer) -> None:
        """Return once all is put. Cancelled, as a controller is that dies, it may be called again, with another one."""
        if balancer.version is None and balancer.config.staleness.max_versions is not None:
            balancer.set_version(0)
        async with anyio.create_task_group() as others:
            if self.wild:
                others.start_soon(self._change, balancer)
            async with anyio.create_task_group() as tasks:
                for _ in range(3 if self.wild else 1):
                    tasks.start_soon(self._work, balancer)
            others.cancel_scope.cancel()

    async def _work(self, balancer: sb.StreamBalancer) -> None:
        while self.jobs:
            job = self.jobs.popleft()
            try:
                while job:
                    await anyio.sleep(self.chance.uniform(0.0, 0.4) if self.wild else 0.1)
                    call, *args = job[0]
                    with suppress(LookupError):  # of the filter, which is asked when a group is closed: told again
                        told = self._put(balancer, *args) if call == "put" else getattr(balancer, call)(*args)
                        is_in = await told if inspect.isawaitable(told) else True
                        if is_in is not False:
                            del job[0]
                            self._abandoned.update(args if call == "abandon_group" else ())
                        elif self.chance.random() < 0.5:  # no more of it will come
                            self.given_up |= {one.rollout_id for call, *args in job if call == "put" for one in args[0]}
                            job[:] = [(what, *args) for what, *args in job if what == "close_group"]
            finally:
                if job:
                    self.jobs.appendleft(job)

    async def _put(self, balancer: sb.StreamBalancer, rollouts: list[Rollout], complete: bool) -> bool:
        """False: neither accepted nor refused for good."""
        names = {one.rollout_id for one in rollouts}
        self.unwanted |= names if rollouts[0].group_id in self._abandoned else set()
        again = bool(names & self._under_way)
        self._under_way |= names
        if balancer.version is not None:
            rollouts = [replace(one, version=max(balancer.version - self.chance.randrange(3), 0)) for one in rollouts]
        remote = [self.remote(one) for one in rollouts]
        patience = self.chance.uniform(0.0, 2.0) if self.wild and self.chance.random() < 0.25 else math.inf
        is_in = False
        is_one = len(remote) == 1 and not complete
        try:
            with anyio.move_on_after(patience):
                await (balancer.put(remote[0]) if is_one else balancer.put_group(remote, complete=complete))
                is_in = True
        except sb.errors.DuplicateRolloutError:
            assert again, "it was not accepted"
            is_in = True
        except sb.errors.RolloutError:
            assert again, "its group takes it"
            self.doubtful |= names
        except LookupError:
            pass
        self._under_way -= names
        if is_in:
            self.accepted |= names
        return is_in or names <= self.doubtful

    async def _change(self, balancer: sb.StreamBalancer) -> None:
        while True:
            await anyio.sleep(self.chance.uniform(0.5, 5.0))
            size = self.chance.choice([12, 24])
            changes: list[dict[str, Any]] = [
                {"deadline_s": 10.0}, {"cost": sb.cost.QuadraticCost()}, {"cost": sb.cost.TokenCost()},
                {"capacity": 100}, {"batch_size": size, "window": size}, {"max_skips": 9}, {},
            ]  # fmt: skip
            with suppress(sb.errors.ConfigError):
                balancer.reconfigure(**self.chance.choice(changes))
            if balancer.config.groups.size is not None and self.chance.random() < 0.2:
                name = f"group {self.chance.randrange(20)}"
                balancer.abandon_group(name)
                self._abandoned.add(name)
            if balancer.version is not None:
                balancer.set_version(balancer.version + 1)

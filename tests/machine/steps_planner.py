"""A planner that cuts rollouts at random, also those that have no rank any more."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator

from steps_config import Config

from stream_balancer.core.steps.ledger import Ledger
from stream_balancer.core.steps.state import Item

Cut = tuple[int, tuple[str, ...], int | None]
"""Owner, rollouts, group."""


class Planner:
    def __init__(self, config: Config, rng: random.Random) -> None:
        self.config, self.rng = config, rng
        self.num_rollouts = 0

    def items(self, over: list[int]) -> list[Item]:
        """Items of a new step, with ids from 0."""
        ids = iter(range(1 << 20))
        cuts = list(self._cuts(over, ids))
        items = list[Item]()
        for owner, rollouts, group in sorted(cuts, key=lambda cut: cut[0]):  # rank by rank, as plans are
            remote = self.config.remote and (group % 2 == 0 if group is not None else self.rng.random() < 0.6)
            items.append(Item(next(ids), owner, rollouts, group=group, remote=remote))
        return items

    def _cuts(self, over: list[int], ids: Iterator[int]) -> Iterator[Cut]:
        rng = self.rng
        for _ in range(rng.randint(1, 3)):
            if self.config.lockstep:
                group = next(ids)
                yield from ((owner, (self._rollout(),), group) for owner in over)
                continue
            for owner in over:
                if rng.random() < 0.75:
                    yield owner, tuple(self._rollout() for _ in range(rng.randint(1, 2))), None

    def _rollout(self) -> str:
        self.num_rollouts += 1
        return f"r{self.num_rollouts}"

    def replanned(self, ledger: Ledger, old: list[Item], over: list[int]) -> list[Item]:
        """Items are cut anew, those of a group in one collective again."""
        alone = [item for item in old if item.group is None]
        groups = defaultdict[int, list[Item]](list)
        for item in old:
            if item.group is not None:
                groups[item.group].append(item)
        news = [new for item in alone for new in self._cut_anew(ledger, item, over)]
        return news + [new for items in groups.values() for new in self._group_anew(ledger, items, over)]

    def _cut_anew(self, ledger: Ledger, item: Item, over: list[int]) -> list[Item]:
        cuts = [(rollout,) for rollout in item.rollouts]
        if not cuts or self.rng.random() < 0.5:
            cuts = [item.rollouts]
        return [Item(ledger.new_id(), self.rng.choice(over), rollouts, remote=item.remote) for rollouts in cuts]

    def _group_anew(self, ledger: Ledger, items: list[Item], over: list[int]) -> list[Item]:
        group, rollouts = ledger.new_id(), [rollout for item in items for rollout in item.rollouts]
        of_rank: dict[int, tuple[str, ...]] = dict.fromkeys(over, ())
        for at, rollout in enumerate(rollouts):
            of_rank[over[at % len(over)]] += (rollout,)
        return [
            Item(ledger.new_id(), owner, own, group if len(over) > 1 else None, items[0].remote)
            for owner, own in of_rank.items()
        ]

"""A planner that cuts rollouts at random, also those that have no rank any more."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator

from steps_config import Config

from stream_balancer.core.steps.ledger import Ledger
from stream_balancer.core.steps.state import Item, Piece

Cut = tuple[int, tuple[Piece, ...], int | None]
"""Owner, pieces, group."""


class Planner:
    def __init__(self, config: Config, rng: random.Random) -> None:
        self.config, self.rng = config, rng
        self.num_rollouts = 0

    def items(self, over: list[int]) -> list[Item]:
        """Items of a new step, with ids from 0."""
        ids = iter(range(1 << 20))
        cuts = list(self._cuts(over, ids))
        items = list[Item]()
        for owner, pieces, group in sorted(cuts, key=lambda cut: cut[0]):  # rank by rank, as plans are
            remote = self.config.remote and (group % 2 == 0 if group is not None else self.rng.random() < 0.6)
            items.append(Item(next(ids), owner, pieces, group=group, remote=remote))
        return items

    def _cuts(self, over: list[int], ids: Iterator[int]) -> Iterator[Cut]:
        rng = self.rng
        for _ in range(rng.randint(1, 3)):
            if self.config.lockstep:
                group = next(ids)
                yield from ((owner, (self._piece(),), group) for owner in over)
                continue
            if self.config.shared and len(over) > 1 and rng.random() < 0.5:
                group, whole = next(ids), self._piece()
                for part, owner in enumerate(sorted(rng.sample(over, rng.randint(2, len(over))))):
                    yield owner, (Piece(whole.rollout, part),), group
            for owner in over:
                if rng.random() < 0.75:
                    yield owner, tuple(self._piece() for _ in range(rng.randint(1, 2))), None

    def _piece(self) -> Piece:
        self.num_rollouts += 1
        return Piece(f"r{self.num_rollouts}")

    def replanned(self, ledger: Ledger, old: list[Item], over: list[int]) -> list[Item]:
        """Items are cut anew, those of a group in one collective again."""
        alone = [item for item in old if item.group is None]
        groups = defaultdict[int, list[Item]](list)
        for item in old:
            if item.group is not None:
                groups[item.group].append(item)
        news = [new for item in alone for new in self._cut_anew(ledger, item, over)]
        return news + [new for parts in groups.values() for new in self._shared_anew(ledger, parts, over)]

    def _cut_anew(self, ledger: Ledger, item: Item, over: list[int]) -> list[Item]:
        rollouts = dict.fromkeys(piece.rollout for piece in item.pieces)
        cuts = [tuple(piece for piece in item.pieces if piece.rollout == rollout) for rollout in rollouts]
        if not cuts or self.rng.random() < 0.5:
            cuts = [item.pieces]
        return [Item(ledger.new_id(), self.rng.choice(over), pieces, remote=item.remote) for pieces in cuts]

    def _shared_anew(self, ledger: Ledger, parts: list[Item], over: list[int]) -> list[Item]:
        group, pieces = ledger.new_id(), [piece for item in parts for piece in item.pieces]
        chosen = list(over) if self.config.lockstep else self.rng.sample(over, min(len(over), len(pieces)))
        of_rank: dict[int, tuple[Piece, ...]] = dict.fromkeys(chosen, ())
        for at, piece in enumerate(pieces):
            of_rank[chosen[at % len(chosen)]] += (piece,)
        return [
            Item(ledger.new_id(), owner, own, group if len(over) > 1 else None, parts[0].remote)
            for owner, own in of_rank.items()
        ]

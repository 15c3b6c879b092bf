"""Cost of rollouts whose prefix is computed once: siblings that lie in one micro-batch pay it together.

    cost of a micro-batch = what each of its rollouts adds to its prefix + every prefix in it, once

A rollout that shares nothing is a sibling of nobody: it adds all it costs to a prefix of no work. Pure arithmetic, no
decisions; bench/results/planning_proofs.md has the proofs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import Floats, Ints
from .packing import Packer

_REPEATED = 0.05
"""A set may be cut, as far as the choice is concerned, into parts whose prefixes cost this much more together. Measured
at 48 rollouts on 8 ranks: with 0 lumps that cannot be filled up cost 5 points of step time where prompts are short,
with no limit the choice overlooks what cutting costs, 3 points where they are long."""


@dataclass(frozen=True, slots=True)
class Siblings:
    """Rollouts [n] in sets [S] that share a prefix; every rollout is in exactly one set."""

    added: Floats
    """[n] work of each beyond its prefix."""
    set_of: Ints
    """[n] number of its set."""
    prefixes: Floats
    """[S] work of each set's prefix."""
    tokens: Ints
    """[n] tokens of each beyond its prefix."""
    prefix_tokens: Ints
    """[S] tokens of each set's prefix."""

    @staticmethod
    def of(costs: Floats, lengths: Ints, labels: Ints, prefix_costs: Floats, prefix_lengths: Ints) -> Siblings:
        """Rollouts [n] as `Waiting` has them. Of siblings that disagree the least prefix counts. O(n log n).

        Examples:
            >>> costs, prefix_costs = np.array([900.0, 700.0, 500.0]), np.array([400.0, 400.0, 0.0])
            >>> tokens, prefix_tokens = np.array([90, 70, 50]), np.array([40, 40, 0])
            >>> siblings = Siblings.of(costs, tokens, np.array([4, 4, -1]), prefix_costs, prefix_tokens)
            >>> siblings.added, siblings.set_of, siblings.prefixes
            (array([500., 300., 500.]), array([0, 0, 1]), array([400.,   0.]))
        """
        # without a group nobody else has the prefix
        shares = (prefix_lengths > 0) & (labels >= 0)
        # who shares nothing has a label of its own, above all that are taken
        alone = int(labels.max(initial=-1)) + 1 + np.arange(labels.size)
        _, set_of = np.unique(np.where(shares, labels, alone), return_inverse=True)
        num_sets = int(set_of.max(initial=-1)) + 1
        prefixes, tokens = np.full(num_sets, np.inf), np.full(num_sets, np.iinfo(np.int64).max)
        np.minimum.at(prefixes, set_of, np.where(shares, np.minimum(prefix_costs, costs), 0.0))
        np.minimum.at(tokens, set_of, np.where(shares, prefix_lengths, 0))
        return Siblings(costs - prefixes[set_of], set_of, prefixes, lengths - tokens[set_of], tokens)

    def loads(self, place_of: Ints, num_places: int) -> Floats:
        """[num_places] work in each place (a rank, a micro-batch), given where each rollout lies ([n]). O(n log n)."""
        load: Floats = np.bincount(place_of, weights=self.added, minlength=num_places).astype(np.float64)
        there = np.unique(self.set_of * num_places + place_of)  # every set counts once in a place
        return load + np.bincount(there % num_places, weights=self.prefixes[there // num_places], minlength=num_places)

    def even_costs(self) -> Floats:
        """[n] work of each, if its set pays the prefix once and all its members as much of it."""
        sizes = np.bincount(self.set_of)
        even: Floats = self.added + (self.prefixes / sizes)[self.set_of]
        return even

    def apart(self) -> tuple[Floats, Ints]:
        """([n + S] work, tokens) of what every plan lays out at least: the rollouts without their prefixes, and every
        prefix as one more of them, wherever one of its siblings lies. So their bounds are bounds of the plan."""
        # one without tokens would be a rollout of no work, and count as a place to fill
        real = self.prefix_tokens > 0
        work = np.concatenate((self.added, self.prefixes[real]))
        return work, np.concatenate((self.tokens, self.prefix_tokens[real]))

    def heaviest_alone(self) -> float:
        """Work of the heaviest rollout with its prefix."""
        return float((self.added + self.prefixes[self.set_of]).max(initial=0.0))

    def peaks(self) -> Floats:
        """[S] what a rank must carry of each set at least, unless more than 5 % of the set is repeated: the heaviest
        part after so fine a cut.

        Examples:
            >>> added, group, tokens = np.array([90.0, 60.0, 50.0, 40.0]), np.zeros(4, dtype=np.int64), np.ones(4)
            >>> Siblings(added, group, np.array([10.0]), tokens, tokens[:1]).peaks()  # 90 + 40, 60 + 50
            array([140.])
        """
        totals = np.bincount(self.set_of, weights=self.added, minlength=self.prefixes.size) + self.prefixes
        sizes = np.bincount(self.set_of, minlength=self.prefixes.size)
        # [S] parts of the finest cut
        free = self.prefixes * sizes <= _REPEATED * totals
        parts = np.where(free, sizes, _REPEATED * totals // np.where(free, 1.0, self.prefixes) + 1.0)
        parts = np.minimum(parts, sizes).astype(np.int64)
        peaks: Floats = np.where(parts == 1, totals, 0.0)
        heaviest = np.zeros(sizes.size)
        np.maximum.at(heaviest, self.set_of, self.added)
        peaks = np.where(parts == sizes, heaviest + self.prefixes, peaks)
        for one in np.flatnonzero((parts > 1) & (parts < sizes)).tolist():
            load = [0.0] * int(parts[one])
            for added in sorted(self.added[self.set_of == one].tolist(), reverse=True):
                load[load.index(min(load))] += added
            peaks[one] = max(load) + self.prefixes[one]
        return peaks

    def cut_to(self, max_tokens: int) -> Siblings:
        """Sets whose unique tokens are more than this, cut into parts that are not, each with the prefix. A sibling
        that is longer by itself is a part. O(n log n)."""
        # before ranks are found: cut afterwards, siblings are torn apart where it costs most
        held = np.bincount(self.set_of, weights=self.tokens, minlength=self.prefixes.size) + self.prefix_tokens
        set_of, origin = self.set_of.copy(), list(range(self.prefixes.size))
        for one in np.flatnonzero(held > max_tokens).tolist():
            members = np.flatnonzero(self.set_of == one)
            # each part has the prefix, so this much is left for its siblings; none at all makes every one a part
            room = max(max_tokens - int(self.prefix_tokens[one]), 1)
            parts = Packer(self.tokens[members], self.added[members], room, padded=False).tight([*range(members.size)])
            for part in (parts or [])[1:]:  # the first keeps the number
                set_of[members[part]] = len(origin)
                origin.append(one)
        return Siblings(self.added, set_of, self.prefixes[origin], self.tokens, self.prefix_tokens[origin])

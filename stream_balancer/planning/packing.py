"""Rollouts into bins under a hard token cap: a bin becomes a micro-batch.

Everything fails towards one more bin, never over the cap. Pure and deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from .arrays import Counts, Floats, Ints, rounded_up

Bins: TypeAlias = list[list[int]]


class Packer:
    """Rollouts into a given number of bins, never over the cap; a rollout over the cap sits alone."""

    def __init__(self, tokens: Ints, work: Floats, max_tokens: int | None, padded: bool) -> None:
        self.tokens = tokens
        self.work = work
        self.padded = padded
        # without a cap, one that nothing can reach: the packing then has one case less
        self.cap: int = max_tokens if max_tokens is not None else int(tokens.sum()) * max(tokens.size, 1) + 1
        self.token_list: list[int] = np.minimum(tokens, self.cap).tolist()  # alone over the cap = exactly full
        self.work_list: list[float] = work.tolist()

    def cost(self, one: list[int]) -> float:
        """Work of a bin."""
        if self.padded:
            return len(one) * max(self.work_list[i] for i in one)
        return float(sum(self.work_list[i] for i in one))

    def least_bins(self, share: Ints) -> int:
        """No packing of this share needs fewer bins than this."""
        held: int = sum(self.token_list[i] for i in share.tolist())
        return max(1, -(-held // self.cap))

    def pack(self, share: Ints, number: int) -> Bins | None:
        """`number` bins, all of them used if there are rollouts enough; None if no way was found."""
        if share.size <= number:  # no empty bin is made: the caller fills up with padding copies
            return [[i] for i in share.tolist()]
        if self.padded:
            return self._pack_neighbours(share, number)
        # by work first: that balances. Only if it finds no room, by tokens: that packs tighter, and a bin more on every
        # rank costs more than unlike bins
        by_work = share[np.lexsort((-self.tokens[share], -self.work[share]))].tolist()
        bins = self._pack_lightest(by_work, number) or self.tight(by_work, number)
        return None if bins is None else self._fill_empty(bins, number)

    def fewest(self, items: list[int]) -> Bins:
        """In as few bins as are found."""
        share = np.array(items, dtype=np.int64)
        number = self.least_bins(share)
        # ends at one rollout per bin at the latest
        while (bins := self.pack(share, number)) is None:
            number += 1
        return bins

    def tight(self, items: list[int], number: int | None = None) -> Bins | None:
        """Best-fit decreasing; None if that takes more than `number` bins."""
        tokens, cap = self.token_list, self.cap
        if number is not None and sum(tokens[i] for i in items) > number * cap:
            return None
        room: list[int] = []
        bins: Bins = []
        for i in sorted(items, key=tokens.__getitem__, reverse=True):
            size, best, least = tokens[i], -1, cap + 1
            # best fit: the fullest bin that still has room
            for one, left in enumerate(room):
                if size <= left < least:
                    best, least = one, left
            if best < 0:
                room.append(cap - size)
                bins.append([i])
            else:
                room[best] -= size
                bins[best].append(i)
        return bins if number is None or len(bins) <= number else None

    def spread(self, bins: Bins, number: int) -> Bins:
        """Content of these bins, evened out over `number` of them; one rollout in each if there are not more."""
        # alike micro-batches need less memory at the peak, and where ranks meet at each they wait less
        items = [i for one in bins for i in one]
        evened = self.pack(np.array(items, dtype=np.int64), number)
        return self._fill_empty(bins, number) if evened is None else evened

    def evened(self, shares: Sequence[list[int]], multiple_of: int, counts: Counts) -> list[Bins]:
        """[rank] the fewest bins that the packing finds, rounded up to a multiple. With "equal" counts every rank has
        the largest of these numbers. A rank without rollouts has no bins."""
        packed = [self.fewest(items) if items else [] for items in shares]
        numbers = [rounded_up(len(bins), multiple_of) for bins in packed]
        # a collective at each: the rank that needs most decides
        if counts == "equal":
            numbers = [max(numbers)] * len(numbers)
        return [self.spread(bins, number) if bins else [] for bins, number in zip(packed, numbers, strict=True)]

    def _pack_lightest(self, order: list[int], number: int) -> Bins | None:
        """Rollouts, each to the lightest bin that has room (LPT with a second, hard dimension). O(n log n), rarely
        more."""
        work = self.work_list
        # zero costs would all go into the first bin
        tie_breaker = (sum(work[i] for i in order) or 1.0) * 1e-9 / len(order)
        heap: list[tuple[float, int]] = [(0.0, one) for one in range(number)]
        room = [self.cap] * number
        bins: Bins = [[] for _ in range(number)]
        for i in order:
            size = self.token_list[i]
            full: list[tuple[float, int]] = []  # lighter bins without room for this one; smaller ones may still fit
            while heap and room[heap[0][1]] < size:
                full.append(heapq.heappop(heap))
            if not heap:
                return None
            load, one = heap[0]
            heapq.heapreplace(heap, (load + work[i] + tie_breaker, one))
            room[one] -= size
            bins[one].append(i)
            for entry in full:
                if room[entry[1]] > 0:
                    heapq.heappush(heap, entry)
        return bins

    def _pack_neighbours(self, share: Ints, number: int) -> Bins | None:
        """Padded: runs of neighbours in length, cut so that the costliest run is as cheap as can be (bisection)."""
        order = share[np.lexsort((-self.work[share], -self.tokens[share]))].tolist()
        # all in one run costs no more than this, so some level in between suffices
        high = float(len(order)) * max(self.work_list[i] for i in order)
        low, best = 0.0, self._runs(order, high, number)
        if best is None:
            return None
        for _ in range(24):  # halvings: to 1e-7 of where it began, finer than any cost model
            middle = (low + high) / 2.0
            runs = self._runs(order, middle, number)
            if runs is None:
                low = middle
            else:
                best, high = runs, middle
        return self._fill_empty(best, number)

    def _runs(self, order: list[int], level: float, number: int) -> Bins | None:
        runs: Bins = []
        longest, costliest = 0, 0.0
        for i in order:
            grown = len(runs[-1]) + 1 if runs else 0
            costliest_here = max(costliest, self.work_list[i])
            if runs and grown * longest <= self.cap and grown * costliest_here <= level:
                runs[-1].append(i)
                costliest = costliest_here
            else:
                if len(runs) == number:
                    return None
                runs.append([i])
                longest, costliest = self.token_list[i], self.work_list[i]
        return runs

    def _fill_empty(self, bins: Bins, number: int) -> Bins:
        """So many bins, none of them empty: the heaviest that can be is split (what it gives away still fits)."""
        bins = bins + [[] for _ in range(number - len(bins))]
        heap = [(-self.cost(one), place) for place, one in enumerate(bins) if len(one) > 1]
        heapq.heapify(heap)
        for place, target in enumerate(bins):
            if target:
                continue
            # what costs most shortens the step most when it is split
            _, heaviest = heapq.heappop(heap)
            source = sorted(bins[heaviest], key=self.work_list.__getitem__)
            half = len(source) // 2
            if self.padded:
                bins[place], bins[heaviest] = source[:half], source[half:]
            else:
                bins[place], bins[heaviest] = source[::2][-half:], source[1::2] + source[::2][:-half]
            for one in (heaviest, place):
                if len(bins[one]) > 1:
                    heapq.heappush(heap, (-self.cost(bins[one]), one))
        return bins

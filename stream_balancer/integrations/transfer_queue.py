"""TransferQueue: a sampler for its controller that waits for a window of rows and takes those that balance.

::

    sampler = BalancedSampler(dp_size=4, window=2.0, max_tokens_per_micro_batch=32_768)
    controller = {"sampler": sampler, "polling_mode": True}
    transfer_queue.init(OmegaConf.create({"controller": controller}, flags={"allow_objects": True}))
    ...
    meta = client.get_meta(["input_ids"], batch_size=8, partition_id="train", task_name="update", sampling_config={
        "dp_rank": 3, "batch_index": step, "partition_id": "train", "task_name": "update"})
    for rows in micro_batches(meta): ...                        # places in meta, and in client.get_data(meta)

TransferQueue carries the bytes and knows what is ready and consumed; ``planning`` chooses and deals. Rows have their
number of tokens in a tag: ``kv_batch_put(keys, "train", fields, tags=[{"total_lengths": n} for n in lengths])``.
Written against transfer_queue 0.1.11; docs/scale.md says when to take it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from transfer_queue.sampler import BaseSampler

import stream_balancer as sb
from stream_balancer import planning

__all__ = ["MARK", "BalancedSampler", "micro_batches"]

MARK = "balanced"
"""The key in a row's ``custom_meta``: its ``micro_batch`` on its rank, from 0, and its ``weight``, which is 0.0 for a
copy that completes a rank with too few rows."""

Share = list[tuple[int, dict[str, Any]]]
"""A rank's rows of a step: global index and mark, micro-batch after micro-batch."""


@dataclass
class _TaskRows:
    """Rows of a task in a partition."""

    # in the order of arrival: the controller gives indices of cleared rows again, so theirs says nothing
    seen: dict[int, float] = field(default_factory=dict)
    """Waiting row -> when it was first seen, in seconds."""
    skips: dict[int, int] = field(default_factory=dict)
    """Waiting row -> steps that passed it over."""
    planned: set[int] = field(default_factory=set)
    """Rows of a plan that their rank has not fetched: to the controller they are still ready."""
    shares: dict[tuple[int, Any], Share] = field(default_factory=dict)
    """(rank, batch_index) -> what it got, for who asks again."""
    steps: int = 0


class BalancedSampler(BaseSampler):  # type: ignore[misc] # TransferQueue says no types
    """TransferQueue's ``BaseSampler``: each step's ranks get shares of one plan, in any order, as often as they ask.

    The controller needs ``polling_mode=True``: ``sample`` runs in the one thread that serves everybody, so it never
    waits and answers "nothing yet". ``sampling_config`` holds ``dp_rank``, ``batch_index``, ``partition_id`` and
    ``task_name`` (StreamingDataset sends them); ``end=True`` in it says that no more rows will come: what is left goes
    in smaller steps. Requests without ``dp_rank`` are served in order, for a controller has one sampler for all tasks.
    """

    def __init__(
        self,
        dp_size: int,
        *,
        window: float = 2.0,
        deadline_s: float | None = None,
        max_skips: int = 16,
        group_key: str | None = None,
        group_size: int | None = None,
        counts: Literal["equal", "free"] = "free",
        max_tokens_per_micro_batch: int | None = None,
        length_key: str = "total_lengths",
        cost: str | sb.cost.CostModel = "tokens",
    ) -> None:
        """``window``: rows to wait for, in steps of ``batch_size * dp_size``. ``deadline_s``: a step goes, smaller if
        it must, once a row has waited for so long (looked at when a rank asks). ``group_key``: the tag that names a
        row's group, of ``group_size`` rows that leave in one step. ``counts``: "equal" rows on every rank.
        ``length_key``: the tag with a row's tokens; a row that has none yet waits. ``cost``: as ``BalancerConfig``
        takes it.
        """
        super().__init__()
        if dp_size < 1 or window < 1 or max_skips < 0:
            raise ValueError(f"dp_size ({dp_size}), window ({window}) must be >= 1, max_skips ({max_skips}) >= 0")
        if (group_key is None) != (group_size is None):
            raise ValueError("group_key and group_size go together: which rows are siblings, and how many there are")
        self.dp_size, self.window, self.deadline_s, self.max_skips = dp_size, window, deadline_s, max_skips
        self.group_key, self.group_size = group_key, group_size
        self.counts, self.cap = counts, max_tokens_per_micro_batch
        self.length_key = length_key
        self._cost: Any = sb.BalancerConfig(dp_size=dp_size, batch_size=dp_size, cost=cost).cost
        self._pools: dict[tuple[str, str], _TaskRows] = {}

    def sample(
        self, ready_indexes: list[int], batch_size: int, task_name: str = "", partition_id: str = "", **asked: Any
    ) -> tuple[list[int], list[int]]:
        """A rank's share of a step, ``batch_size`` rows a rank on average, and those of it to be marked as consumed;
        two empty lists where it is too early."""
        rank, step, partition = asked.get("dp_rank"), asked.get("batch_index"), asked["partition"]
        if rank is None:
            oldest = ready_indexes[:batch_size] if len(ready_indexes) >= batch_size else []
            return oldest, list(oldest)
        if partition is None:
            return [], []  # nobody has put into it yet
        if step is None or not 0 <= rank < self.dp_size:
            raise ValueError(f"sampling_config needs 0 <= dp_rank ({rank}) < {self.dp_size} and a batch_index ({step})")
        pool = self._pools.setdefault((partition_id, task_name), _TaskRows())
        if (rank, step) not in pool.shares:
            shares = self._plan(pool, ready_indexes, batch_size * self.dp_size, partition, end=asked.get("end", False))
            pool.shares |= {(of, step): share for of, share in enumerate(shares)}
        share = pool.shares.get((rank, step), [])
        # only the asker's rows are consumed: a partition that is consumed ends StreamingDataset on the other ranks
        consumed = [index for index, mark in share if mark["weight"]]
        pool.planned.difference_update(consumed)
        # the reply copies the tags right after this; another rank's copy of a row has another mark
        old = partition.get_custom_meta([index for index, _ in share])
        partition.set_custom_meta({index: {**old.get(index, {}), MARK: mark} for index, mark in share})
        return [index for index, _ in share], consumed

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """True where a rank asks: otherwise the controller answers by itself while few rows are ready, and neither
        deadline nor end is ever looked at."""
        return (sampling_config or {}).get("dp_rank") is not None

    def clear_cache(self, partition_id: str) -> None:
        """Forget a partition."""
        self._pools = {of: pool for of, pool in self._pools.items() if of[0] != partition_id}

    def save_checkpoint(self) -> dict[str, Any]:
        """Rows that wait, how often each was passed over, and the shares that were given."""
        return {"pools": self._pools}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Deadlines begin anew: another process has another clock."""
        self._pools = state["pools"]
        for pool in self._pools.values():
            pool.seen = dict.fromkeys(pool.seen, time.monotonic())

    def _plan(self, pool: _TaskRows, ready: list[int], wanted: int, partition: Any, *, end: bool) -> list[Share]:
        """Every rank's share of a step of ``wanted`` rows; none where it is too early."""
        now, lengths = time.monotonic(), self._lengths(partition, [row for row in ready if row not in pool.planned])
        pool.seen = {row: at for row, at in pool.seen.items() if row in lengths} | {
            row: now for row in lengths if row not in pool.seen
        }
        rows, labels = self._whole_groups(partition, list(pool.seen), end=end)
        full = int(self.window * wanted)
        late = self.deadline_s is not None and rows and now - min(pool.seen[row] for row in rows) >= self.deadline_s
        if not rows or (len(rows) < full and not late and not end):
            return []
        # the oldest of them only, however many wait: nobody is served meanwhile
        labels = labels[labels <= labels[:full].max()]
        # labels ascend with the rows, so the first of both belong together
        rows = rows[: labels.size]
        tokens = np.array([lengths[row] for row in rows])
        work = np.asarray(self._cost(tokens), dtype=np.float64)
        chosen = planning.choose(
            tokens,
            work,
            dp_size=self.dp_size,
            batch_size=wanted,
            max_skips=self.max_skips,
            skips=[pool.skips.get(row, 0) for row in rows],
            groups=None if self.group_key is None else labels,
            counts=self.counts if len(rows) >= wanted else "free",
            step=pool.steps,
        )
        plan = planning.form_micro_batches(
            tokens[chosen],
            work[chosen],
            self.dp_size,
            max_tokens=self.cap,
            counts=self.counts,
            oversize="alone",  # the row is accepted: here it can no longer be refused
            rotation=pool.steps,
        )
        shares = self._marked(plan, [rows[place] for place in chosen], tokens[chosen])
        gone = {rows[place] for place in chosen}
        # rows beyond the window were not chosen from, so nothing passed them over
        pool.skips = {row: pool.skips.get(row, 0) + 1 for row in rows if row not in gone}
        pool.seen = {row: at for row, at in pool.seen.items() if row not in gone}
        pool.planned |= gone
        pool.steps += 1
        return shares

    def _lengths(self, partition: Any, rows: list[int]) -> dict[int, int]:
        """Tokens of the rows whose length is known: a put announces a row before its tag is there."""
        tags = partition.get_custom_meta(rows)
        found = {row: tags.get(row, {}).get(self.length_key) for row in rows}
        return {row: max(int(length), 1) for row, length in found.items() if length is not None}

    def _whole_groups(self, partition: Any, rows: list[int], *, end: bool) -> tuple[list[int], Any]:
        """Rows whose siblings are all there, siblings side by side, and the number of each one's group, ascending."""
        if self.group_key is None:
            return rows, np.arange(len(rows))
        tags = partition.get_custom_meta(rows)
        groups: dict[Any, list[int]] = {}
        for row in rows:
            groups.setdefault(tags.get(row, {}).get(self.group_key), []).append(row)
        groups.pop(None, None)  # its tag is not there yet
        # at the end no sibling comes any more
        whole = [siblings for siblings in groups.values() if end or len(siblings) >= (self.group_size or 1)]
        return [row for siblings in whole for row in siblings], np.repeat(np.arange(len(whole)), [*map(len, whole)])

    def _marked(self, plan: list[list[Any]], rows: list[int], tokens: Any) -> list[Share]:
        """Every rank's rows and marks, and as many micro-batches on each: copies of the shortest rows complete them."""
        most = max(map(len, plan))
        shortest = [rows[place] for place in np.argsort(tokens, kind="stable")]
        shares: list[Share] = []
        for of_rank in plan:
            share = [
                (rows[place], {"micro_batch": number, "weight": 1.0})
                for number, places in enumerate(of_rank)
                for place in places
            ]
            # the shortest, which cost the rank least, and none that it has anyway: a row has one mark
            others = (row for row in shortest if row not in {own for own, _ in share})
            copies = [(next(others), {"micro_batch": number, "weight": 0.0}) for number in range(len(of_rank), most)]
            shares.append(share + copies)
        return shares


def micro_batches(meta: Any) -> list[list[int]]:
    """Places of each micro-batch's rows in a BatchMeta that the sampler answered with, and in its data."""
    found: dict[int, list[int]] = {}
    for place, tags in enumerate(meta.custom_meta):
        found.setdefault(tags[MARK]["micro_batch"], []).append(place)
    return list(found.values())

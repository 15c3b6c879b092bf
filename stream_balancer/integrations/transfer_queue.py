"""TransferQueue: a sampler for its controller that waits for a window of rows and takes those that balance.

::

    sampler = BalancedSampler(dp_size=4, window=2.0, micro_batches=sb.MicroBatches(max_tokens=32_768), sync="step")
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

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transfer_queue.sampler import BaseSampler

import stream_balancer as sb
from stream_balancer import planning
from stream_balancer.integrations._plans import choose_groups

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
    skips: dict[Any, int] = field(default_factory=dict)
    """Waiting group (a row, where nobody has siblings) -> steps that passed it over."""
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
    in smaller steps; ``version`` is that of the policy which the step trains. Requests without ``dp_rank`` are served
    in order, for a controller has one sampler for all tasks.
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
        version_key: str | None = None,
        max_versions: int | None = None,
        equal_rollouts: bool = False,
        micro_batches: sb.MicroBatches = sb.MicroBatches(),  # noqa: B008 - a frozen value
        length_key: str = "total_lengths",
        cost: str | sb.cost.CostModel = "quadratic",
        sync: Any = None,
    ) -> None:
        """``window``: rows to wait for, in steps of ``batch_size * dp_size``. ``deadline_s``: a step goes, smaller if
        it must, once a row has waited for so long (looked at when a rank asks). ``group_key``: the tag that names a
        row's group, of ``group_size`` rows that leave in one step. ``version_key``: the tag with the policy version
        that a row was generated with; one of ``max_versions`` versions ago goes now, as far as there is room.
        ``length_key``: the tag with a row's tokens; a row that has none yet waits. ``equal_rollouts``,
        ``micro_batches``, ``cost``, ``sync``: as ``BalancerConfig`` takes them. A row above
        ``micro_batches.max_tokens`` gets a micro-batch alone.
        """
        super().__init__()
        if window < 1 or max_skips < 0:
            raise ValueError(f"window ({window}) must be >= 1, max_skips ({max_skips}) >= 0")
        for key, number, words in (
            (group_key, group_size, "group_key and group_size"),
            (version_key, max_versions, "version_key and max_versions"),
        ):
            if (key is None) != (number is None):
                raise ValueError(f"{words} go together: a tag of the rows, and what is asked of it. Give both or none")
        self.window, self.deadline_s, self.max_skips = window, deadline_s, max_skips
        self.group_key, self.group_size = group_key, group_size or 1
        self.version_key, self.max_versions = version_key, max_versions or 0
        self.length_key = length_key
        # of these knobs, checked as anywhere; how many rows a step has is said by who asks
        self._config = sb.BalancerConfig(
            dp_size=dp_size,
            batch_size=1024 * dp_size,
            equal_rollouts=equal_rollouts,
            micro_batches=micro_batches,
            cost=cost,
            sync=sync,
        )
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
        ranks = self._config.dp_size
        if step is None or not 0 <= rank < ranks:
            raise ValueError(f"sampling_config needs 0 <= dp_rank ({rank}) < {ranks} and a batch_index ({step})")
        pool = self._pools.setdefault((partition_id, task_name), _TaskRows())
        if (rank, step) not in pool.shares:
            shares = self._plan(pool, ready_indexes, batch_size * ranks, partition, asked)
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

    def _plan(
        self, pool: _TaskRows, ready: list[int], wanted: int, partition: Any, asked: Mapping[str, Any]
    ) -> list[Share]:
        """Every rank's share of a step of ``wanted`` rows; none where it is too early."""
        end, version = asked.get("end", False), asked.get("version", -math.inf)
        now, tags = time.monotonic(), partition.get_custom_meta([row for row in ready if row not in pool.planned])
        # a put announces a row before its tag is there
        lengths = {row: max(int(tag[self.length_key]), 1) for row, tag in tags.items() if self.length_key in tag}
        pool.seen = {row: at for row, at in pool.seen.items() if row in lengths} | {
            row: now for row in lengths if row not in pool.seen
        }
        groups = self._whole_groups(pool.seen, tags, end=end)
        waiting = [row for rows in groups.values() for row in rows]
        full = int(self.window * wanted)
        if not waiting:
            return []
        waited_s = now - min(pool.seen[row] for row in waiting)
        late = self.deadline_s is not None and waited_s >= self.deadline_s
        if len(waiting) < full and not late and not end:
            return []
        # the oldest of them only, however many wait: nobody is served meanwhile
        window = dict(list(groups.items())[: -(-full // self.group_size)])
        oldest = version - self.max_versions
        # a row that says no version is never due
        due = {
            group
            for group, rows in window.items()
            if min(float(tags[row].get(self.version_key, math.inf)) for row in rows) <= oldest
        }
        config = self._config
        chosen = choose_groups(
            {group: [lengths[row] for row in rows] for group, rows in window.items()},
            config.cost,
            min(max(wanted // self.group_size, 1), len(window)),
            config.dp_size,
            skips=pool.skips,
            max_skips=self.max_skips,
            due=due,
            equal_rollouts=config.equal_rollouts and len(waiting) >= wanted,
            step=pool.steps,
        )
        # groups beyond the window were not chosen from, so nothing passed them over
        pool.skips = {group: pool.skips.get(group, 0) + 1 for group in window.keys() - set(chosen)}
        rows = [row for group in chosen for row in groups[group]]
        shares = self._dealt(rows, np.array([lengths[row] for row in rows]), pool.steps)
        for row in rows:
            del pool.seen[row]
        pool.planned.update(rows)
        pool.steps += 1
        return shares

    def _whole_groups(self, rows: Iterable[int], tags: Mapping[int, Any], *, end: bool) -> dict[Any, list[int]]:
        """Rows of each group whose siblings are all there, in the order of arrival; each by itself where there are no
        groups."""
        groups: dict[Any, list[int]] = {}
        for row in rows:
            groups.setdefault(row if self.group_key is None else tags[row].get(self.group_key), []).append(row)
        groups.pop(None, None)  # its tag is not there yet
        # at the end no sibling comes any more
        return {group: own for group, own in groups.items() if end or len(own) >= self.group_size}

    def _dealt(self, rows: list[int], tokens: np.ndarray[Any, Any], step: int) -> list[Share]:
        """Rows and marks of each rank. Every rank gets the same number of micro-batches, unless
        ``micro_batches.equal_number`` is False; copies of the shortest rows fill them up."""
        config, cut = self._config, self._config.micro_batches
        plan = planning.form_micro_batches(
            tokens,
            config.cost(tokens),
            config.dp_size,
            max_tokens=cut.max_tokens,
            sync=config.sync,
            equal_rollouts=config.equal_rollouts,
            padded=config.cost.padded,
            equal_number=cut.equal_number,
            overhead_cost=cut.overhead_cost or 0.0,
            multiple_of=cut.multiple_of,
            oversize="alone",  # the row is accepted: here it can no longer be refused
            rotation=step,
        )
        most = max(map(len, plan)) if cut.equal_number else 1
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

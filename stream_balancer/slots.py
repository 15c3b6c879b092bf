"""Slots for rollouts that are still to be generated: ``async with balancer.reserve() as slot``, or a producer's.

A slot is a place for rollouts that do not exist yet. How many may begin is counted in
:mod:`stream_balancer.core.throttle`, by the balancer; here is what is held of a slot until its block is left, in its
process or in another.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from stream_balancer.errors import ClosedResourceError, RolloutError
from stream_balancer.types import Rollout

__all__ = ["Admits", "Reservation", "Slot", "check_group"]


class Admits(Protocol):
    """Admits rollouts before they are generated: a balancer, or a producer that asks one."""

    async def admit(self, count: int) -> Slot:
        """Wait until ``count`` more may begin. If cancelled, nothing was reserved."""
        ...

    async def put_in(self, slot: Slot, rollouts: Sequence[Rollout], complete: bool | None) -> None:
        """Put in places that were kept; ``complete`` is None for one rollout by itself. If it raises, nothing was
        accepted."""
        ...

    def settle(self, slot: Slot, count: int) -> None:
        """So many rollouts of a slot were put, or never will be. From any thread in which the slot is used."""
        ...


class Slot:
    """Places for ``count`` rollouts. Use it in the block that reserved it."""

    def __init__(self, home: Admits, number: int, version: int, count: int) -> None:
        self.number = number
        """Its home's number of it."""
        self.version = version
        """Policy version when the slot was admitted: what a rollout without a version of its own gets."""
        self.left = count
        """Rollouts that may still be put."""
        self._home = home
        self._open = True
        self._under_way = 0  # in puts that have not returned
        self._lock = threading.Lock()

    async def put(self, rollout: Rollout) -> None:
        """As the balancer's ``put``, in the place that was kept. If it raises or is cancelled, the place is still kept.
        Raises ValueError for more rollouts than were reserved, RolloutError for one older than the slot; in another
        process BrokenResourceError if the slot was lost with its connection."""
        await self._put([rollout], None)

    async def put_group(self, rollouts: Sequence[Rollout], *, complete: bool = False) -> None:
        """As the balancer's ``put_group``, in the places that were kept."""
        await self._put(rollouts, complete)

    def release(self) -> None:
        """Give back the places of rollouts that will not be put; leaving the block does it. Never blocks, may be called
        twice."""
        with self._lock:
            if not self._open:
                return
            left, self._open, self.left = self.left, False, 0
        self._home.settle(self, left)

    async def _put(self, rollouts: Sequence[Rollout], complete: bool | None) -> None:
        dated = self.take(rollouts)
        accepted = False
        try:
            await self._home.put_in(self, dated, complete)
            accepted = True
        finally:
            self.done(len(dated), accepted=accepted)

    # of its home

    @property
    def missing(self) -> int:
        """Rollouts that may still be put, or are on their way."""
        with self._lock:
            return self.left + self._under_way

    @property
    def is_over(self) -> bool:
        """Its block was left, and no put is on its way."""
        return not self._open and not self._under_way

    def take(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """What is put in these places. A put under way keeps them, also if the block is left meanwhile."""
        dated = [_dated(rollout, self.version) for rollout in rollouts]
        with self._lock:
            if not self._open:
                raise ClosedResourceError("put() on a slot whose 'with' block was left: its place is given back")
            if len(dated) > self.left:
                raise ValueError(
                    f"{len(dated)} rollouts for a slot with {self.left} places left. Reserve as many as are put: "
                    "reserve(n)"
                )
            self.left -= len(dated)
            self._under_way += len(dated)
        return dated

    def done(self, count: int, *, accepted: bool) -> None:
        """A put has returned; if it was not accepted, the slot gets its places back."""
        with self._lock:
            self._under_way -= count
            kept = self._open and not accepted
            if kept:
                self.left += count
        if not kept:
            self._home.settle(self, count)


class Reservation:
    """What ``reserve()`` returns; enter it to wait for the slot."""

    def __init__(self, home: Admits, count: int) -> None:
        self._home, self._count = home, count
        self._slot: Slot | None = None

    async def __aenter__(self) -> Slot:
        """Wait until so many rollouts may begin, first come first served. If cancelled, nothing was reserved."""
        if self._slot is not None:
            raise ValueError("a reservation is entered once: call reserve() for every slot")
        self._slot = await self._home.admit(self._count)
        return self._slot

    async def __aexit__(self, *_: object) -> None:
        if self._slot is not None:
            self._slot.release()


def check_group(self, rollouts: Sequence[Rollout], size: GroupSize | None) -> None:
        """Raise RolloutError if the group of a put does not take so many more, ValueError if it cannot have this size.
        O(1)."""
        groups = self._buffer.groups
        if size is not None and not rollouts:
            self.check_keeps_groups(size.group_id)
            try:
                plain_name(size.group_id)
            except RolloutError as error:
                raise ValueError(f"group_id {error}") from None
        if size is not None and size.size is not None:
            self._check_group_size(size.group_id, size.size)
        if groups.size is None:
            return
        if rollouts and rollouts[0].group_id is not None:
            groups.check_put(rollouts[0].group_id, num_executions(rollouts), (r.execution_id for r in rollouts))
        if size is not None:
            groups.check_size(size)

    def check_keeps_groups(self, group_id: str) -> None:
        """Raise ValueError where groups play no part."""
        if self._buffer.groups.size is None:
            raise ValueError(
                f"group {group_id!r}: this balancer keeps no groups (group_size is {self.config.group_size}, groups "
                f"{self.config.groups!r}), so no rollout waits for a sibling. Set group_size to keep them"
            )

    def _check_group_size(self, group_id: str, size: int) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= self.config.batch_size:
            raise ValueError(
                f"expect_group({group_id!r}, {size!r}): a group has from 1 to batch_size ({self.config.batch_size}) "
                "executions, of a rollout each at least, or it could not leave in one batch"
            )

    def check(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Costs of the rollouts of one put. Raises TypeError, RolloutError or DuplicateRolloutError if one of them can
        never be taken in, whatever its group. O(columns)."""
        if not rollouts:
            return []
        for rollout in rollouts:
            self._check_alone(rollout)
        if len(rollouts) > 1:
            self._check_together(rollouts)
        # until a rollout is held, those of one put must at least fit each other
        schema = self.schema or schema_of(rollouts[0])
        for rollout in rollouts:
            _check_schema(rollout, schema)
        return costs_of(rollouts, self._pricing.model)

    def _check_alone(self, rollout: Rollout) -> None:
        if not isinstance(rollout, Rollout):
            raise TypeError(f"put() takes a Rollout, not {type(rollout).__name__}")
        if rollout.is_padding:
            raise RolloutError(f"rollout {rollout.rollout_id!r} is a padding copy; only the balancer makes those")
        self._ids.check_new(rollout.rollout_id)
        _check_fits(rollout, self.config)
        if rollout.metadata:
            _check_stratum(rollout, self._buffer.strata)

    def _check_together(self, rollouts: Sequence[Rollout]) -> None:
        if len({r.rollout_id for r in rollouts}) < len(rollouts):
            raise DuplicateRolloutError(
                "two rollouts of one put_group() have the same rollout_id; give each an id of its own"
            )
        if len(rollouts) > self.config.capacity:
            raise RolloutError(
                f"put_group() got {len(rollouts)} rollouts, above capacity ({self.config.capacity}): they could "
                "never be let in together. Raise capacity"
            )

    def has_room(self, rollouts: Sequence[Rollout], size: GroupSize | None = None) -> bool:
        """Room for all; ``size`` is declared with them. O(len(rollouts)).

        A put waits only while a batch could leave and make room: with fewer than ``min_batch_size`` ready (the rest
        wait for siblings) there is room even in a full buffer, since waiting might be for ever.
        """
        buffer, config = self._buffer, self.config
        if not rollouts or buffer.num_ready < config.min_batch_size:
            return True
        wanted = len(rollouts)
        if rollouts[0].group_id is not None:
            # its place has been kept since the first of its group came in
            if self.is_sibling(rollouts[0]):
                return True
            # room for the whole group, or groups that lack siblings could fill the buffer and wait for ever
            if size is None:
                wanted = max(wanted, buffer.groups.size_of(rollouts[0].group_id))
        if wanted > self.num_places() or self._has_all_tokens():
            return False
        limit = config.capacity_bytes  # of memory, so what waits for siblings counts
        return limit is None or buffer.num_bytes + sum(r.nbytes for r in rollouts) <= limit

    def num_places(self) -> int:
        """How many more rollouts may come, but for tokens and bytes: up to ``capacity`` that could leave, and up to
        ``most_waiting`` together with those that wait for siblings and the siblings that they lack. While too few could
        leave to make room, the second does not count: it would be waited for in vain. O(1)."""
        buffer, config = self._buffer, self.config
        places = config.capacity - buffer.num_ready
        if buffer.num_ready < config.min_batch_size:
            return places
        return min(places, config.most_waiting - len(buffer) - buffer.groups.num_awaited)

    def _has_all_tokens(self) -> bool:
        """The same of tokens, which are counted before a put. O(1), and O(n) while groups are incomplete."""
        least, most, buffer = self.config.capacity_tokens, self.config.most_waiting_tokens, self._buffer
        if least is None or buffer.num_tokens < least:
            return False
        return (most is not None and buffer.num_tokens >= most) or buffer.num_ready_tokens >= least

    def is_sibling(self, rollout: Rollout) -> bool:
        """Whether it belongs to a group that waits for it, or was abandoned; such a rollout always has room. O(1)."""
        if not isinstance(rollout, Rollout) or rollout.group_id is None:
            return False
        groups = self._buffer.groups
        return groups.has_waiting(rollout.group_id) or groups.is_abandoned(rollout.group_id)

    def check_waiting(self, config: BalancerConfig) -> None:
        """Raise ConfigError if a rollout that waits could not leave under these knobs. O(n)."""
        most, lengths = config.longest_rollout, self._buffer.lengths
        if most is not None and config.oversize == "refuse" and int(lengths.max(initial=0)) > most:
            longest = self._buffer.rollouts(lengths.argmax(0, keepdims=True))[0]
            raise ConfigError(
                f"{_cap_text(config)} with oversize='refuse' is below rollout {longest.rollout_id!r}, "
                f"which waits and has {longest.num_tokens} tokens: no batch could take it. Use a cap >= "
                f"{longest.num_tokens} until it has left, or set oversize='alone'"
            )
        try:
            costs_of(self._buffer.rollouts(), config.cost)
        except RolloutError as error:
            raise ConfigError(f"this cost does not fit a rollout that waits: {error}") from None

    def completed_by(self, rollouts: Sequence[Rollout], size: GroupSize | None = None) -> list[Rollout] | None:
        """What ``accept=`` is asked about: these rollouts and the waiting siblings whose group they, and the size
        declared with them, complete; None if nothing is completed. O(n) for the last of a group, else O(1)."""
        buffer = self._buffer
        group_id = rollouts[0].group_id if size is None else size.group_id
        if group_id is None or buffer.groups.size is None:
            return list(rollouts) or None
        arrived, wanted = buffer.groups.num_arrived(group_id), buffer.groups.size_of(group_id)
        if not rollouts and (arrived >= wanted or not arrived):
            return None  # it was asked about these, or there are none
        if size is not None:
            wanted = size.size or 0
        if arrived + num_executions(rollouts) < wanted:
            return None
        return [*buffer.rollouts(buffer.siblings(group_id)), *rollouts] or None


def _check_fits(rollout: Rollout, config: BalancerConfig) -> None:
    """Raise RolloutError for one that could never be dispatched, or never be let in."""
    if rollout.group_id is None and config.group_size is not None and config.groups != "free":
        raise RolloutError(
            f"config has group_size={config.group_size}, but rollout {rollout.rollout_id!r} has no group_id: it would "
            "count as a group of its own. Give the siblings of one prompt the same group_id, or leave group_size out"
        )
    most = config.longest_rollout
    if most is not None and rollout.num_tokens > most and config.oversize == "refuse":
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} has {rollout.num_tokens} tokens, above {_cap_text(config)}. "
            "Raise the cap, truncate the rollout, or set oversize='alone' to run it in a micro-batch of its own"
        )
    limit = config.capacity_bytes
    if limit is not None and rollout.nbytes > limit:
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} has {rollout.nbytes} bytes of tensors, above capacity_bytes "
            f"({limit}): it could "
            "never be let in. Raise capacity_bytes"
        )


def _cap_text(config: BalancerConfig) -> str:
    cap = f"max_tokens_per_micro_batch ({config.max_tokens_per_micro_batch})"
    if len(config.cp_sizes) == 1:
        return cap
    return f"{cap} on each of {max(size for size in config.cp_sizes if size <= config.dp_size)} ranks"


def _check_stratum(rollout: Rollout, strata: Strata) -> None:
    stratum: object = rollout.stratum
    if stratum is None or (isinstance(stratum, str) and stratum in strata):
        return
    if not isinstance(stratum, str) or len(strata) >= MOST_STRATA:
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} has metadata['stratum'] {stratum!r}: that must be a str, the name of one "
            f"of at most {MOST_STRATA} environments or data sets. Call what it says of a single prompt something else"
        )


# as verl, TRL, OpenRLHF, chat templates, slime and Hugging Face call theirs
_LOOK_LIKE_MASKS = frozenset(
    {"response_mask", "completion_mask", "action_mask", "assistant_mask", "assistant_masks", "loss_masks", "labels"}
)


def _with_loss_mask(rollout: Rollout, column: str | None) -> Rollout:
    """The rollout, its mask called ``loss_mask``. ``column``: what it was put under; None = there is none. O(1) where
    that is its name already.

    Raises RolloutError where it is not sure which tokens are trained on: a wrong guess is a wrong denominator, which
    nobody sees.
    """
    tokens = rollout.tokens
    if "loss_mask" in tokens:
        if column is not None and (column == "loss_mask" or column not in tokens):
            return rollout  # put as loss_mask, or renamed where it comes from
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} has a column 'loss_mask', but loss_mask_column is {column!r}: which "
            "tokens are trained on? Leave the column out, or the knob"
        )
    if column is not None and column in tokens:
        return rollout.with_loss_mask(column)
    if column not in (None, "loss_mask"):
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} has no column {column!r}, which loss_mask_column names; it has "
            f"{sorted(tokens)}. Give every rollout one, or set loss_mask_column=None if every token is trained on"
        )
    if column is not None and not _LOOK_LIKE_MASKS.isdisjoint(tokens):
        found = sorted(_LOOK_LIKE_MASKS.intersection(tokens))
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} has no 'loss_mask', so every token would be trained on, but it has "
            f"{found[0]!r}. "
            + (
                "Give it a loss_mask: labels != -100"
                if found[0] == "labels"
                else f"If that says which tokens are trained on, set BalancerConfig(loss_mask_column={found[0]!r})"
            )
            + "; if every token is, loss_mask_column=None"
        )
    return rollout


def check_group(rollouts: Sequence[Rollout]) -> None:
    """Raise RolloutError unless they are siblings, TypeError for what is no Rollout."""
    if not rollouts:
        raise RolloutError("put_group() takes at least one rollout")
    for rollout in rollouts:
        if not isinstance(rollout, Rollout):
            raise TypeError(f"put_group() takes Rollouts, not {type(rollout).__name__}")
    ids = {r.group_id for r in rollouts}
    if len(ids) != 1 or None in ids:
        raise RolloutError(f"put_group() takes siblings that share one group_id, not {sorted(map(str, ids))}")


def _dated(rollout: Rollout, admitted: int) -> Rollout:
    """With the version at which its slot was ``admitted``, if it has none. Raises RolloutError for an older one."""
    if not isinstance(rollout, Rollout):
        raise TypeError(f"put() takes a Rollout, not {type(rollout).__name__}")
    if rollout.min_version is None:
        return replace(rollout, version=admitted)
    if rollout.min_version < admitted:
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} began at version {rollout.min_version}, before its slot was admitted "
            f"(version {admitted}): the staleness bound would not hold. Reserve before generating"
        )
    return rollout

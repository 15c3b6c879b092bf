"""Which rollouts may be taken in: valid ones, for which there is room. Pure; every refusal says what, why and what to
do. Nothing is taken in here: that is :mod:`stream_balancer.core.machine`'s."""

from __future__ import annotations

from collections.abc import Sequence

from stream_balancer.config import BalancerConfig
from stream_balancer.core.buffer import Buffer
from stream_balancer.core.executions import num_executions
from stream_balancer.core.groups import GroupSize
from stream_balancer.core.ledger import RolloutIds
from stream_balancer.core.pricing import Pricing, costs_of
from stream_balancer.core.strata import MOST_STRATA, Strata
from stream_balancer.errors import ConfigError, DuplicateRolloutError, RolloutError
from stream_balancer.types import Rollout
from stream_balancer.values import plain_name

__all__ = ["Admission", "schema_of"]

Schema = tuple[dict[str, tuple[object, tuple[int, ...]]], frozenset[str]]
"""Token columns with dtype and trailing shape, and names of scalars: alike for all rollouts of a balancer."""


class Admission:
    """The checks of a put, against what is held already."""

    def __init__(self, config: BalancerConfig, buffer: Buffer, ids: RolloutIds, pricing: Pricing) -> None:
        self.config = config
        self._buffer = buffer
        self._ids = ids
        self._pricing = pricing
        self.schema: Schema | None = None
        """The first rollout's; None before it."""

    def with_loss_masks(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts as they may be taken in: their masks called ``loss_mask``. Raises RolloutError."""
        column = self.config.loss_mask_column
        return [_with_loss_mask(r, column) if isinstance(r, Rollout) else r for r in rollouts]

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


def schema_of(rollout: Rollout) -> Schema:
    """Its token columns and scalars, as all rollouts of a balancer must have them."""
    columns: dict[str, tuple[object, tuple[int, ...]]] = {
        name: (column.dtype, tuple(column.shape[1:])) for name, column in rollout.tokens.items()
    }
    return columns, frozenset(rollout.scalars)


def _check_schema(rollout: Rollout, schema: Schema) -> None:
    """Raise RolloutError for one whose columns or scalars are not those. O(columns)."""
    if _has_schema(rollout, *schema):
        return
    columns, scalars = schema_of(rollout)
    if columns != schema[0]:
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} has token columns {_describe(columns)}, but the first rollout had "
            f"{_describe(schema[0])}: they could not share a batch. Give every rollout the same columns, dtypes "
            "and trailing shapes"
        )
    if scalars != schema[1]:
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} has scalars {sorted(scalars)}, but the first rollout had "
            f"{sorted(schema[1])}: they "
            "could not share a batch. Give every rollout the same scalars, or use metadata for what only some have"
        )


def _has_schema(rollout: Rollout, columns: dict[str, tuple[object, tuple[int, ...]]], scalars: frozenset[str]) -> bool:
    """Without building what a message needs: every put comes here."""
    if len(rollout.tokens) != len(columns) or rollout.scalars.keys() != scalars:
        return False
    for name, column in rollout.tokens.items():
        like = columns.get(name)
        if like is None or column.dtype is not like[0]:
            return False
        if (column.ndim > 1 or like[1]) and column.shape[1:] != like[1]:
            return False
    return True


def _describe(columns: dict[str, tuple[object, tuple[int, ...]]]) -> str:
    def one(dtype: object, shape: tuple[int, ...]) -> str:
        return f"{str(dtype).removeprefix('torch.')}[{', '.join(['L', *map(str, shape)])}]"

    return "{" + ", ".join(f"{name}: {one(*column)}" for name, column in sorted(columns.items())) + "}"

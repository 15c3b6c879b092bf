"""Which rollouts may be taken in: valid ones, for which there is room. Pure; every refusal says what, why and what to
do. Nothing is taken in here: that is :mod:`stream_balancer.core.machine`'s."""

from __future__ import annotations

from collections.abc import Sequence

from stream_balancer.config import BalancerConfig, most_waiting
from stream_balancer.core.buffer import Buffer
from stream_balancer.core.executions import num_executions
from stream_balancer.core.groups import GroupSize
from stream_balancer.core.in_flight import RolloutIds
from stream_balancer.core.pricing import Pricing
from stream_balancer.errors import ConfigError, DuplicateRolloutError, RolloutError
from stream_balancer.rollouts import Rollout
from stream_balancer.values import plain_name

Schema = tuple[dict[str, tuple[object, tuple[int, ...]]], frozenset[str]]
"""Token columns with dtype and trailing shape, and names of scalars: alike for all rollouts of a balancer."""


class Admission:
    """The checks of a put, against what is held already."""

    def __init__(self, config: BalancerConfig, buffer: Buffer, ids: RolloutIds, pricing: Pricing) -> None:
        self._buffer = buffer
        self._ids = ids
        self.pricing = pricing
        self.schema: Schema | None = None
        """The first rollout's; None before it."""
        self.use(config)

    def use(self, config: BalancerConfig) -> None:
        """Knobs that are in force from now on. Checks that cannot apply under them are left out here, and not at each
        put."""
        self.config = config
        self._most_tokens = config.micro_batches.max_tokens if config.micro_batches.oversize == "refuse" else None
        self._needs_group = config.groups.size is not None
        self._most_waiting = most_waiting(config)
        self.looks_at_masks = self.schema is None or config.loss_mask_column not in (None, "loss_mask")
        """False where the columns of those that are held say enough of the mask's name."""

    def know(self, rollout: Rollout) -> None:
        """The first rollout is taken in: others must be like it."""
        self.schema = schema_of(rollout)
        self.use(self.config)

    def with_loss_masks(self, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
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
            number, most = size.size, self.config.batch_size
            if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most:
                raise ValueError(
                    f"expect_group({size.group_id!r}, {number!r}): a group has from 1 to batch_size ({most}) "
                    "executions, of a rollout each at least, or it could not leave in one batch"
                )
        if groups.size is None:
            return
        if rollouts and rollouts[0].group_id is not None:
            groups.check_put(rollouts[0].group_id, num_executions(rollouts), (r.execution_id for r in rollouts))
            self._check_fits(rollouts[0].group_id, len(rollouts))
        if size is not None:
            groups.check_size(size)

    def _check_fits(self, group_id: str, more: int) -> None:
        """Raise RolloutError if the group would be larger than a step. An execution may bring several rollouts."""
        group = self._buffer.groups.get(group_id)
        number, most = more + (0 if group is None else group.waiting), self.config.batch_size
        if number > most:
            raise RolloutError(
                f"group {group_id!r} would have {number} waiting rollouts, more than batch_size ({most}): a group "
                "leaves in one step. Raise batch_size, or put fewer rollouts per execution"
            )

    def check_keeps_groups(self, group_id: str) -> None:
        """Raise ValueError where groups play no part."""
        if self._buffer.groups.size is None:
            raise ValueError(
                f"group {group_id!r}: this balancer keeps no groups ({self.config.groups}), so no rollout waits for a "
                "sibling. Set groups.size to keep them"
            )

    def check(self, rollouts: Sequence[Rollout]) -> list[tuple[Rollout, float]]:
        """The rollouts of one put, each with its cost. Raises TypeError, RolloutError or DuplicateRolloutError if one
        of them can never be taken in, whatever its group. Every put comes here. O(columns)."""
        ids, schema, most_bytes, checked = self._ids, self.schema, self.config.max_bytes, []
        for rollout in rollouts:
            if not isinstance(rollout, Rollout):
                raise TypeError(f"put() takes a Rollout, not {type(rollout).__name__}")
            name, tokens = rollout.rollout_id, rollout.num_tokens
            # first: a retry is a duplicate, whatever else is wrong with it by now
            if name in ids.held or name in ids.past:
                raise DuplicateRolloutError(ids.why_known(name))
            if rollout.is_padding:
                raise RolloutError(f"rollout {name!r} is a padding copy; only the balancer makes those")
            if self._most_tokens is not None and tokens > self._most_tokens:
                raise RolloutError(
                    f"rollout {name!r} has {tokens} tokens, above {_cap_text(self.config)}. Raise the cap, truncate "
                    "the rollout, or set micro_batches.oversize='alone' to run it in a micro-batch of its own"
                )
            if self._needs_group and rollout.group_id is None:
                raise RolloutError(
                    f"config has groups.size={self.config.groups.size}, but rollout {name!r} has no group_id: it would "
                    "count as a group of its own. Give the siblings of one prompt the same group_id, or leave "
                    "groups.size out"
                )
            if most_bytes is not None and rollout.nbytes > most_bytes:
                raise RolloutError(
                    f"rollout {name!r} has {rollout.nbytes} bytes of tensors, above max_bytes ({most_bytes}): it "
                    "could never be let in. Raise max_bytes"
                )
            # until one is held, those of one put must at least fit each other
            if schema is None:
                schema = schema_of(rollout)
            else:
                _check_schema(rollout, schema)
            # lengths repeat, and their cost is kept: no call of ours for it
            cost = self.pricing.cost_of_length(tokens) if rollout.cost is None else rollout.cost
            checked.append((rollout, cost))
        if len(checked) > 1:
            self._check_together(rollouts)
        return checked

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
        # nothing could leave and make room: a put that waited now might wait for ever
        if not rollouts or buffer.num_waiting - buffer.groups.num_incomplete < config.min_batch_size:
            return True
        wanted = len(rollouts)
        if rollouts[0].group_id is not None:
            # its place has been kept since the first of its group came in
            if self.is_sibling(rollouts[0]):
                return True
            # room for the whole group, or groups that lack siblings could fill the buffer and wait for ever
            if size is None:
                wanted = max(wanted, buffer.groups.size_of(rollouts[0].group_id))
        if wanted > self.num_places():
            return False
        # of memory, so what waits for siblings counts
        return config.max_bytes is None or buffer.num_bytes + sum(r.nbytes for r in rollouts) <= config.max_bytes

    def num_places(self) -> int:
        """How many more rollouts may come, but for bytes: up to ``capacity`` that could leave, and up to
        ``most_waiting`` together with those that wait for siblings and the siblings that they lack. While too few could
        leave to make room, the second does not count: it would be waited for in vain. O(1)."""
        buffer, groups = self._buffer, self._buffer.groups
        ready = buffer.num_ready
        places, all_places = self.config.capacity - ready, self._most_waiting - buffer.num_waiting - groups.num_awaited
        return places if ready < self.config.min_batch_size or places < all_places else all_places

    def is_sibling(self, rollout: Rollout) -> bool:
        """True if it belongs to a group that waits for it, or was abandoned; such a rollout always has room. O(1)."""
        if not isinstance(rollout, Rollout) or rollout.group_id is None:
            return False
        groups = self._buffer.groups
        group = groups.get(rollout.group_id)
        return (group is not None and group.waiting > 0) or groups.why_unwanted(rollout.group_id) is not None

    def check_waiting(self, config: BalancerConfig) -> None:
        """Raise ConfigError if a rollout that waits could not leave under these knobs. O(n)."""
        size, group_id = self._buffer.groups.largest()
        if size > config.batch_size:
            raise ConfigError(
                f"batch_size ({config.batch_size}) is below group {group_id!r}, which waits and has {size} rollouts: "
                f"no batch could take it. Use batch_size >= {size} until the group has left"
            )
        most, lengths = config.micro_batches.max_tokens, self._buffer.lengths
        if most is not None and config.micro_batches.oversize == "refuse" and int(lengths.max(initial=0)) > most:
            longest = self._buffer.rollouts(lengths.argmax(0, keepdims=True))[0]
            raise ConfigError(
                f"{_cap_text(config)} with micro_batches.oversize='refuse' is below rollout {longest.rollout_id!r}, "
                f"which waits and has {longest.num_tokens} tokens: no batch could take it. Use a cap >= "
                f"{longest.num_tokens} until it has left, or set micro_batches.oversize='alone'"
            )

    def completed_by(self, rollouts: Sequence[Rollout], size: GroupSize | None = None) -> list[Rollout] | None:
        """Rollouts that ``accept=`` is asked about: these rollouts and the waiting siblings whose group they, and the
        size declared with them, complete; None if nothing is completed. O(n) for the last of a group, else O(1)."""
        buffer = self._buffer
        group_id = rollouts[0].group_id if size is None else size.group_id
        if group_id is None or buffer.groups.size is None:
            return list(rollouts) or None
        if buffer.groups.why_unwanted(group_id):
            # it is evicted, whatever accept= would say; and those that wait have been asked about, or were cut
            return None
        group, wanted = buffer.groups.get(group_id), buffer.groups.size_of(group_id)
        arrived = 0 if group is None else group.arrived
        if not rollouts and (arrived >= wanted or not arrived):
            # it was asked about these, or there are none
            return None
        if size is not None:
            wanted = size.size or 0
        if arrived + num_executions(rollouts) < wanted:
            return None
        return [*buffer.rollouts(buffer.siblings(group_id)), *rollouts] or None


def _cap_text(config: BalancerConfig) -> str:
    return f"micro_batches.max_tokens ({config.micro_batches.max_tokens})"


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
            # put as loss_mask, or renamed where it comes from
            return rollout
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
    """Token columns and scalars of a rollout, as all rollouts of a balancer must have them."""
    columns: dict[str, tuple[object, tuple[int, ...]]] = {
        name: (column.dtype, tuple(column.shape[1:])) for name, column in rollout.tokens.items()
    }
    return columns, frozenset(rollout.scalars)


def _check_schema(rollout: Rollout, schema: Schema) -> None:
    """Raise RolloutError for other columns or scalars than the first rollout's. Every put comes here."""
    tokens, (columns, scalars) = rollout.tokens, schema
    # without building what a message needs
    same = tokens.keys() == columns.keys()
    for name, (dtype, shape) in columns.items() if same else ():
        column = tokens[name]
        if column.dtype is not dtype or ((column.ndim > 1 or shape) and column.shape[1:] != shape):
            same = False
    if not same:
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} has token columns {schema_of(rollout)[0]}, but the first rollout had "
            f"{columns} (dtype, shape of a token): they could not share a batch. Give every rollout the same"
        )
    if rollout.scalars.keys() != scalars:
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} has scalars {sorted(rollout.scalars)}, but the first rollout had "
            f"{sorted(scalars)}: they could not share a batch. Give every rollout the same scalars, or use metadata "
            "for what only some have"
        )

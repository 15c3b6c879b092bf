"""Rollouts that several ranks share: who holds which tokens. Pure.

``g`` members share a rollout of ``L`` tokens. It is cut into ``2g`` chunks of ``c = ceil(L / 2g)`` tokens. Member
``j`` holds chunks ``j`` and ``2g - 1 - j``, in this order: a token attends to those before it, so the first and the
last chunk together are as much work as any other such pair. What lies beyond ``L`` is zeros.

::

    L = 8, g = 2        0 1 | 2 3 | 4 5 | 6 7          c = 2
    member 0            0 1             6 7            next tokens: 1 2, 7 -
    member 1                  2 3   4 5                next tokens: 3 4, 5 6

A token is trained to predict the one after it, which another member may hold. So a part also has, of every column, the
row behind each of its two chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial

import torch
from torch import Tensor

from stream_balancer.errors import RolloutError
from stream_balancer.field_docs import documented
from stream_balancer.rollouts.rollout import Rollout


def chunk_tokens(num_tokens: int, degree: int) -> int:
    """c: tokens of each chunk of a rollout that so many ranks share; each of them holds two.

    Examples:
        >>> chunk_tokens(8, 2), chunk_tokens(9, 2)
        (2, 3)
    """
    return -(-num_tokens // (2 * degree))


def join_column(parts: Sequence[Tensor], num_tokens: int) -> Tensor:
    """The way back: the rows of all members, ``[2c, ...]`` each in the order of their places, as the whole column
    ``[L, ...]``. O(L).

    Examples:
        >>> join_column([torch.tensor([1, 2, 7, 8]), torch.tensor([3, 4, 5, 6])], 8)
        tensor([1, 2, 3, 4, 5, 6, 7, 8])
    """
    chunk = chunk_tokens(num_tokens, len(parts))
    first = [part[:chunk] for part in parts]
    second = [part[chunk:] for part in reversed(parts)]
    return torch.cat(first + second)[:num_tokens]


def chunks_of(num_tokens: int, degree: int, place: int) -> list[tuple[int, int]]:
    """(position in the whole, c) of each of the two chunks of a member.

    Examples:
        >>> chunks_of(8, 2, 0)
        [(0, 2), (6, 2)]
    """
    chunk = chunk_tokens(num_tokens, degree)
    return [(place * chunk, chunk), ((2 * degree - 1 - place) * chunk, chunk)]


def _rows(column: Tensor, degree: int, place: int, *, behind: bool = False) -> list[Tensor]:
    """Views of its two chunks, or of the row ``behind`` each; and zeros where they go beyond the end."""
    pieces = []
    for start, size in chunks_of(len(column), degree, place):
        if behind:
            start, size = start + size, 1
        there = column[start : start + size]
        pieces += [there, column.new_zeros((size - len(there), *column.shape[1:]))]
    return pieces


class _MadeColumns(Mapping[str, Tensor]):
    """Columns with the rows of a member, made when asked for: a part must not hold its rollout's memory a second
    time."""

    def __init__(self, whole: Mapping[str, Tensor], rows: Callable[[Tensor], list[Tensor]]) -> None:
        self._whole, self._rows = whole, rows

    def rows(self, name: str) -> list[Tensor]:
        """Views, one after the other. O(1)."""
        return self._rows(self._whole[name])

    def __getitem__(self, name: str) -> Tensor:
        return torch.cat(self.rows(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


@documented
@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SharedRollout(Rollout):
    """A member's part of a rollout that several ranks share. :func:`part_of` makes it.

    ``tokens`` and ``num_tokens`` are of the part, 2c rows; all else is the rollout's: ids, scalars, ``tensors``,
    metadata. Its ``num_loss_tokens`` are counted with the first of its ranks.
    """

    cp_degree: int
    """g: ranks that share it."""
    cp_rank: int
    """j: place of this one among them."""
    whole_tokens: int
    """L: tokens of the whole."""
    whole_loss_tokens: int
    """``num_loss_tokens`` of the whole."""
    behind: Mapping[str, Tensor] = field(repr=False)
    """Rows of every column, behind each of the two chunks ``[2, ...]``; zeros behind the last token."""
    whole: Rollout | None = field(default=None, repr=False)
    """Rollout that this is a part of, where it is at hand: on the controller. None on a rank."""

    def __post_init__(self) -> None:
        # the whole was checked; its parts need not be
        object.__setattr__(self, "num_tokens", 2 * chunk_tokens(self.whole_tokens, self.cp_degree))
        object.__setattr__(self, "num_loss_tokens", 0 if self.cp_rank else self.whole_loss_tokens)


def check_whole(rollout: Rollout) -> None:
    """Raise RolloutError for a part, of which a put would lose the rest."""
    if isinstance(rollout, SharedRollout):
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} is the part of one that several ranks share. Put the whole rollout"
        )


def part_of(rollout: Rollout, degree: int, place: int) -> SharedRollout:
    """The part that the member at this place of ``degree`` ranks holds. Copies no token before a column is asked for.

    Raises ValueError for a place that is not below ``degree``, for a degree below 2, and for a padding copy.

    Examples:
        >>> rollout = Rollout(tokens={"input_ids": torch.arange(1, 8)}, rollout_id="r")
        >>> parts = [part_of(rollout, 2, place) for place in range(2)]
        >>> [part.tokens["input_ids"].tolist() for part in parts]
        [[1, 2, 7, 0], [3, 4, 5, 6]]
        >>> [part.num_loss_tokens for part in parts]
        [6, 0]
    """
    if not 0 <= place < degree or degree < 2:
        raise ValueError(f"part_of(): place {place} of {degree} ranks; degree must be >= 2, and 0 <= place < degree")
    if rollout.is_padding or isinstance(rollout, SharedRollout):
        raise ValueError(f"part_of(): {rollout!r} cannot be shared: it is a padding copy, or a part already")
    rows = partial(_rows, degree=degree, place=place)
    given = {one.name: getattr(rollout, one.name) for one in fields(Rollout) if one.init}
    # views only: a part of a rollout must not hold its memory a second time
    return SharedRollout(
        **(given | {"tokens": _MadeColumns(rollout.tokens, rows)}),
        cp_degree=degree,
        cp_rank=place,
        whole_tokens=rollout.num_tokens,
        whole_loss_tokens=rollout.num_loss_tokens,
        behind=_MadeColumns(rollout.tokens, partial(rows, behind=True)),
        whole=rollout,
    )


def rows_of(rollout: Rollout, name: str, *, behind: bool = False) -> list[Tensor]:
    """Views that are the rows of its column, one after the other; or of a part's, those ``behind`` its two chunks.
    Nothing is copied to slice a part. O(1)."""
    columns = rollout.behind if behind and isinstance(rollout, SharedRollout) else rollout.tokens
    return columns.rows(name) if isinstance(columns, _MadeColumns) else [columns[name]]


def columns_of(rollout: Rollout) -> Mapping[str, Tensor]:
    """Columns of a rollout, or of a part the whole's: to ask for names, dtypes and trailing shapes. Copies nothing."""
    whole = rollout.whole if isinstance(rollout, SharedRollout) else None
    return rollout.tokens if whole is None else whole.tokens


def tokens_of(rollout: Rollout) -> int:
    """``num_tokens`` of the whole."""
    return rollout.whole_tokens if isinstance(rollout, SharedRollout) else rollout.num_tokens


def loss_tokens_of(rollout: Rollout) -> int:
    """Loss tokens of the whole, which a loss over one rollout is divided by."""
    return rollout.whole_loss_tokens if isinstance(rollout, SharedRollout) else rollout.num_loss_tokens


def block_of(rank: int, degree: int) -> tuple[tuple[int, ...], int]:
    """The ranks of the aligned block of so many that this one is in, and its place there.

    Examples:
        >>> block_of(6, 4)
        ((4, 5, 6, 7), 2)
    """
    first = rank // degree * degree
    return tuple(range(first, first + degree)), rank - first


def whole_rollouts(rollouts: Iterable[Rollout]) -> Iterator[Rollout]:
    """Several ranks' rollouts, each one once: instead of the parts of one, the whole. O(n)."""
    for rollout in rollouts:
        if not isinstance(rollout, SharedRollout):
            yield rollout
        elif rollout.cp_rank == 0:
            yield rollout if rollout.whole is None else rollout.whole

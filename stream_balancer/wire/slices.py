"""A member's part of a payload that lies with its producer, cut out of its bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from stream_balancer.types.shared import chunk_tokens, spans_of

__all__ = ["Slice", "sliced"]


class Slice(NamedTuple):
    """A member's part of a rollout that several ranks share."""

    degree: int
    place: int
    num_tokens: int
    """Of the whole."""

    @property
    def num_rows(self) -> int:
        """Of its two chunks, and of what is behind them."""
        return 2 * chunk_tokens(self.num_tokens, self.degree) + 2

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """See :func:`spans_of`."""
        return spans_of(self.num_tokens, self.degree, self.place)


def sliced(pieces: Sequence[Tensor], num_columns: int, part: Slice) -> list[Tensor]:
    """Of what :func:`payload` gives of the whole, what it gives of a part: the first so many are columns. O(bytes)."""
    found = []
    for piece in pieces[:num_columns]:
        rows = piece.view(part.num_tokens, -1)
        held = rows.new_zeros(part.num_rows, rows.shape[1])
        for at, start, stop in part.spans:
            held[at : at + stop - start] = rows[start:stop]
        found += [held[:-2].flatten(), held[-2:].flatten()]
    return [*found, *pieces[num_columns:]]

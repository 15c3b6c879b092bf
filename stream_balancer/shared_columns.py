"""A rank's part of rollouts that several ranks share, as flat columns: which positions it holds, and what follows them.

Torch functions on plain tensors. Which rows a member gets, and how, is :mod:`stream_balancer.types.shared`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class SharedColumns:
    """A member's part of rollouts that ``degree`` ranks share: of each, chunks ``place`` and ``2 * degree - 1 - place``
    of ``2 * degree``, and zeros beyond its end. ``lengths`` of the flat columns are of these, two chunks each."""

    degree: int
    place: int
    whole_lengths: tuple[int, ...]
    """Tokens per whole rollout, ``n`` of them."""
    behind: Mapping[str, Tensor]
    """Rows of every column, behind each of the two chunks of each rollout, ``[2n, ...]``."""

    def starts(self, lengths: Sequence[int]) -> list[int]:
        """[2n] position in its rollout at which each chunk starts."""
        places = (self.place, 2 * self.degree - 1 - self.place)
        return [length // 2 * place for length in lengths for place in places]

    def positions(self, lengths: Sequence[int], device: torch.device) -> Tensor:
        """[T] int64 position of each row in its rollout, also beyond its end."""
        count = torch.arange(max(lengths) // 2, dtype=torch.int64, device=device)
        return torch.cat([count[: lengths[i // 2] // 2] + start for i, start in enumerate(self.starts(lengths))])

    def has_token(self, lengths: Sequence[int], device: torch.device) -> Tensor:
        """[T] bool: False beyond the end of the rollout."""
        sizes = torch.tensor([self.whole_lengths, lengths], device=device)  # [2, n]
        return self.positions(lengths, device) < torch.repeat_interleave(*sizes, output_size=sum(lengths))

    def next(self, name: str, column: Tensor, lengths: Sequence[int]) -> Tensor:
        """[T, ...] what follows each row of a column in its rollout; 0 behind the last token."""
        following = torch.roll(column, -1, 0)
        chunks = [length // 2 for length in lengths for _ in range(2)]
        following[torch.tensor(list(accumulate(chunks)), device=column.device) - 1] = self.behind[name]
        return following

    def with_loss_mask(self, lengths: Sequence[int], weights: Tensor) -> SharedColumns:
        """With what is behind the chunks in a ``loss_mask`` that no rollout brought; ``weights``: 0 for those that do
        not count."""
        ends = [start + lengths[i // 2] // 2 for i, start in enumerate(self.starts(lengths))]
        there = torch.tensor([end < self.whole_lengths[i // 2] for i, end in enumerate(ends)], device=weights.device)
        return replace(self, behind={**self.behind, "loss_mask": there & torch.repeat_interleave(weights != 0, 2)})

    def not_as(self, layout: str) -> ValueError:
        """Why there is no such layout."""
        return ValueError(
            f"{layout}(): {self.degree} ranks share the rollouts of this micro-batch, and what is here are chunks of "
            "them, which are no rows. Take packed(), whose position_ids say where each token belongs; "
            'packed()["input_ids"][None] is [1, T]'
        )

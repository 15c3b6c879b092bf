"""The micro-batch: rollouts that go through the model together. :mod:`stream_balancer.rollouts.tensors` has its
layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from stream_balancer.field_docs import documented
from stream_balancer.rollouts.rollout import Rollout
from stream_balancer.rollouts.tensors import FlatColumns, Nested, Packed, Padded

if TYPE_CHECKING:
    from tensordict import TensorDict


class ExecutionSize(NamedTuple):
    """How much of an execution a step holds, over all ranks."""

    samples: int
    """Rollouts of the execution."""
    loss_tokens: int
    """Tokens of the rollouts with a non-zero ``loss_mask``."""


@documented
@dataclass(frozen=True, eq=False, slots=True)
class MicroBatch:
    """Micro-batch: rollouts that go through the model together, on one rank. Lay them out with one of the four methods.

    Examples:
        >>> micro_batch = MicroBatch.of([Rollout(tokens={"input_ids": ids}) for ids in ([11, 12], [21, 22, 23], [31])])
        >>> micro_batch
        MicroBatch(num_rollouts=3, num_tokens=6)
        >>> packed = micro_batch.packed()
        >>> packed["input_ids"]  # [T]
        tensor([11, 12, 21, 22, 23, 31])
        >>> micro_batch.packed(shift=True)["targets"]  # [T]
        tensor([12,  0, 22, 23,  0,  0])
        >>> packed.cu_seqlens, packed.position_ids  # [n+1], [T]
        (tensor([0, 2, 5, 6], dtype=torch.int32), tensor([0, 1, 0, 1, 2, 0]))
        >>> micro_batch.padded(pad_values={"input_ids": -1})["input_ids"]  # [n, L_max]
        tensor([[11, 12, -1],
                [21, 22, 23],
                [31, -1, -1]])
        >>> [row.tolist() for row in micro_batch.nested()["input_ids"].unbind()]  # [n, j]
        [[11, 12], [21, 22, 23], [31]]
    """

    rollouts: Sequence[Rollout]
    """The rollouts, in the order of every layout. On a rank these are views of the received buffer, made when asked
    for."""
    lengths: tuple[int, ...]
    """Tokens per rollout, ``n`` of them."""
    flat: Callable[[], FlatColumns]
    """Columns that the layouts start from. On a rank: views of the received buffer, nothing copied. On the controller:
    concatenated on use."""
    execution_sizes: tuple[ExecutionSize, ...] | None = None
    """[n] of the execution of each rollout, in the step; None where each is an execution by itself."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], execution_sizes: tuple[ExecutionSize, ...] | None = None) -> MicroBatch:
        """A micro-batch over rollouts at hand. Their columns are concatenated when a layout is asked for."""
        lengths, flat = tuple([r.num_tokens for r in rollouts]), partial(_concatenate, rollouts, execution_sizes)
        return cls(rollouts, lengths, flat, execution_sizes)

    @property
    def num_tokens(self) -> int:
        """T: tokens without padding."""
        return sum(self.lengths)

    def packed(self, *, shift: bool = False, scalar_dtype: torch.dtype = torch.float32) -> Packed:
        """Flat ``[T, ...]`` columns, ``position_ids [T]``, ``cu_seqlens`` int32 ``[n+1]``, ``max_seqlen``.

        Always has a ``loss_mask`` (ones where the rollouts brought none; zeros for padding copies, and on the first
        token of each rollout, which nothing predicts). On a rank no other column is copied without ``shift``.

        ``shift``: in each row what belongs to the token that is predicted there, the next one of the same rollout:
        ``targets``, its id, and ``loss_mask``, log-probabilities and all other columns but ``input_ids`` and
        ``position_ids``, with zeros on a rollout's last token. So a loss needs no slices, no rollout's first token is
        predicted from its neighbour's last, and the sum of ``loss_mask`` over a step is ``global_num_loss_tokens``.
        Raises ValueError where the rollouts bring a column ``targets`` of their own.

        Scalars become ``[n]`` of ``scalar_dtype``, here and in the other layouts: float32, so that a
        float32 loss stays one; torch.int64 where ints above 2^24 must stay exact.
        """
        flat = self.flat()
        if shift and "targets" in flat.tokens:
            raise ValueError(
                "packed(shift=True) makes a column 'targets', and the rollouts bring one of that name. Rename theirs, "
                "or use packed() and packed.next()"
            )
        columns, fields = flat.laid_out(scalar_dtype)
        made = Packed(columns, **fields, lengths=flat.lengths)
        if shift:
            following = {name: made.next(name) for name in columns if name != "position_ids"}
            following["targets"] = following.pop("input_ids")
            made = replace(made, columns={**columns, **following})
        return made

    def padded(
        self,
        *,
        padding_side: Literal["left", "right"] = "right",
        pad_values: Mapping[str, float | int | bool] | None = None,
        multiple_of: int = 1,
        scalar_dtype: torch.dtype = torch.float32,
    ) -> Padded:
        """``[n, L_max, ...]`` columns and ``attention_mask``, padded on the chosen side. Copies every token once."""
        flat = self.flat()
        if padding_side not in ("left", "right"):
            raise ValueError(f"padding_side must be 'left' or 'right', not {padding_side!r}")
        if multiple_of < 1:
            raise ValueError(f"multiple_of must be >= 1, not {multiple_of}")
        columns, fields = flat.laid_out(scalar_dtype)
        n_tokens = flat.counts()
        if unknown := (pad_values or {}).keys() - columns.keys():
            raise ValueError(f"pad_values names {sorted(unknown)}, but the columns are {sorted(columns)}")
        width = -(-max(flat.lengths) // multiple_of) * multiple_of
        # [L_max], compared below with the [n, 1] lengths
        place = torch.arange(width, device=n_tokens.device)
        # [n, L_max]: row-major, and so are the flat columns: `rows[mask] = column` below is one copy, in order
        mask = place < n_tokens[:, None] if padding_side == "right" else place >= width - n_tokens[:, None]
        rows: dict[str, Tensor] = {}
        for name, column in columns.items():
            rows[name] = column.new_full((len(flat.lengths), width, *column.shape[1:]), (pad_values or {}).get(name, 0))
            rows[name][mask] = column
        positions = rows.get("position_ids")
        if positions is None:
            positions = (mask.to(torch.int64).cumsum(1) - 1).clamp_(min=0) * mask  # [n, L_max], on either padding side
        return Padded(rows, **fields, attention_mask=mask, position_ids=positions, lengths=n_tokens)

    def nested(self, *, scalar_dtype: torch.dtype = torch.float32) -> Nested:
        """Torch jagged nested tensors ``[n, j, ...]`` over the flat columns; no token is copied on a rank."""
        flat = self.flat()
        flat_columns, fields = flat.laid_out(scalar_dtype)
        # [n+1] int64, as torch wants them. One tensor for all columns: torch calls two jagged shapes equal only then
        ends = list(accumulate(flat.lengths, initial=0))
        offsets = torch.tensor(ends, dtype=torch.int64, device=flat_columns["input_ids"].device)
        columns = {
            name: torch.nested.nested_tensor_from_jagged(
                column, offsets, min_seqlen=min(flat.lengths), max_seqlen=max(flat.lengths)
            )
            for name, column in flat_columns.items()
        }
        return Nested(columns, **fields, offsets=offsets)

    def tensordict(self, *, scalar_dtype: torch.dtype = torch.float32) -> TensorDict:
        """A ``TensorDict`` of jagged columns and scalars, batch size ``[n]``. Needs the ``tensordict`` extra."""
        try:
            from tensordict import TensorDict
        except ImportError as error:
            raise ImportError(
                "tensordict() needs the tensordict package: pip install 'stream-balancer[tensordict]'"
            ) from error
        rows = self.nested(scalar_dtype=scalar_dtype)
        return TensorDict(
            {**rows.columns, **rows.scalars, "rollout_weights": rows.rollout_weights}, batch_size=[len(self.lengths)]
        )

    def __repr__(self) -> str:
        return f"MicroBatch(num_rollouts={len(self.lengths)}, num_tokens={self.num_tokens})"


def _concatenate(rollouts: Sequence[Rollout], execution_sizes: tuple[ExecutionSize, ...] | None) -> FlatColumns:
    """Flat columns of rollouts at hand. Copies every token once. O(T)."""
    first = rollouts[0]
    return FlatColumns(
        tokens={name: torch.cat([r.tokens[name] for r in rollouts]) for name in first.tokens},
        lengths=tuple(r.num_tokens for r in rollouts),
        scalars={name: [r.scalars[name] for r in rollouts] for name in first.scalars},
        # copies that fill up must weigh nothing in any loss
        weights=torch.tensor([0.0 if r.is_padding else 1.0 for r in rollouts], dtype=torch.float32),  # [n]
        executions=execution_sizes or [(1, r.num_loss_tokens) for r in rollouts],
    )

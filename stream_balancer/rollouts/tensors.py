"""Layouts of a micro-batch as tensors: packed, padded, nested, TensorDict.

Torch functions on plain tensors; nothing that waits, sends or decides may enter. Everything starts from *flat columns*:
for each per-token column one tensor ``[T, ...]`` in which the ``n`` rollouts of a micro-batch lie one after the other
(``T`` = sum of their lengths), together with the lengths themselves. On a rank those flat columns are views of the
received buffer, so :meth:`MicroBatch.packed` copies no token. The layouts are made there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class FlatColumns:
    """Flat columns: ``n`` rollouts end to end, the start of every layout."""

    tokens: Mapping[str, Tensor]
    """Per-token columns ``[T, ...]``; ``input_ids`` is always there."""
    lengths: tuple[int, ...]
    """Tokens per rollout, ``n`` of them, each >= 1."""
    scalars: Mapping[str, Sequence[float | int]]
    """``n`` per-rollout numbers by name, as they were put."""
    weights: Tensor
    """``[n]`` float32: 1.0, or 0.0 for a padding copy."""
    executions: Sequence[tuple[int, int]]
    """``n`` times (rollouts, loss tokens) that a rollout's execution has in the step."""

    def counts(self) -> Tensor:
        """[n] int64 tokens of each rollout, where the columns are."""
        return torch.tensor(self.lengths, dtype=torch.int64, device=self.tokens["input_ids"].device)

    def laid_out(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The columns of a layout, still flat, and the fields that all layouts have, scalars as ``[n]`` of this dtype.

        There is a ``loss_mask`` in any case: a trainer that reads it never trains on a padding copy, nor on the first
        token of a rollout, which no denominator counts.
        """
        # a new dict: the layout adds its mask, and the rollouts' own columns stay as they were put
        columns, device = dict(self.tokens), self.tokens["input_ids"].device
        if "loss_mask" in columns:
            # a copy: its first tokens are set to zero below, and the rollouts keep theirs
            mask = columns["loss_mask"].clone()
        else:
            # [T] one where the rollout counts, zero on every token of a padding copy
            mask = torch.repeat_interleave(self.weights != 0, self.counts(), output_size=sum(self.lengths))
        mask.index_fill_(0, torch.tensor(list(accumulate(self.lengths[:-1], initial=0)), device=device), 0)
        columns["loss_mask"] = mask
        scalars = {name: torch.tensor(values, dtype=dtype, device=device) for name, values in self.scalars.items()}
        return columns, {"scalars": scalars, "rollout_weights": self.weights, "executions": self.executions}


@dataclass(frozen=True, eq=False)
class _NamedColumns(Mapping[str, Any]):
    """Per-token columns, then per-rollout scalars, by name."""

    columns: dict[str, Tensor]
    """Per-token columns by name; see the subclass for their shape."""
    scalars: dict[str, Tensor]
    """[n] per-rollout scalars by name, float32 unless ``scalar_dtype`` said otherwise."""
    rollout_weights: Tensor
    """[n] float32: 1.0, or 0.0 for a padding copy that must not count in any loss."""
    executions: Sequence[tuple[int, int]] = field(repr=False)
    """``n`` times (rollouts, loss tokens) that a rollout's execution has in the step, over all ranks."""

    @cached_property
    def execution_weights(self) -> Tensor:
        """[n] float32: 1 / rollouts that its execution has in the step; 0.0 for a padding copy. Over all ranks they sum
        to ``global_num_executions``."""
        samples = torch.tensor([samples for samples, _ in self.executions], device=self.rollout_weights.device)
        return self.rollout_weights / samples

    @cached_property
    def execution_loss_tokens(self) -> Tensor:
        """[n] int64: loss tokens that its execution has in the step, over all ranks, to divide by: at least 1."""
        # an execution may have nothing but masked tokens, and is a divisor all the same
        tokens = [max(tokens, 1) for _, tokens in self.executions]
        return torch.tensor(tokens, dtype=torch.int64, device=self.rollout_weights.device)

    def __getitem__(self, name: str) -> Tensor:
        if name in self.columns:
            return self.columns[name]
        if name in self.scalars:
            return self.scalars[name]
        raise KeyError(
            f"no column or scalar {name!r}; columns: {sorted(self.columns)}, scalars: {sorted(self.scalars)}"
        )

    def per_token(self, values: str | Tensor) -> Tensor:
        """Numbers of rollouts on every one of their tokens, in the shape of ``input_ids``; 0 on padding and on
        padding copies.

        ``values``: the name of a scalar, or ``[n]`` numbers made of such. Dtype and device are theirs, and gradients
        flow back to them. Raises KeyError for an unknown name, ValueError for one that is per token already or for
        another shape. O(T).

        Examples:
            >>> from stream_balancer.rollouts import MicroBatch, Rollout
            >>> real = [
            ...     Rollout(tokens={"input_ids": ids}, scalars={"advantage": advantage})
            ...     for ids, advantage in (([11, 12], 0.5), ([21, 22, 23], -1.0))
            ... ]
            >>> rollouts = MicroBatch.of([*real, real[0].padding_copy("padding")]).packed()
            >>> rollouts.per_token("advantage")  # [T]
            tensor([ 0.5000,  0.5000, -1.0000, -1.0000, -1.0000,  0.0000])
            >>> rollouts.per_token(rollouts["advantage"] > 0)
            tensor([ True,  True, False, False, False, False])
        """
        if isinstance(values, str):
            if values in self.columns:
                raise ValueError(f"per_token(): column {values!r} is per token already; read it as [{values!r}]")
            values = self[values]
        if values.shape != self.rollout_weights.shape:
            raise ValueError(
                f"per_token() takes one number for each of the {len(self.rollout_weights)} rollouts, "
                f"{list(self.rollout_weights.shape)}, not {list(values.shape)}"
            )
        # not a product: what a padding copy has from its original may be NaN or infinite
        return self._spread(torch.where(self.rollout_weights != 0, values, values.new_zeros(())))

    @abstractmethod
    def _spread(self, values: Tensor) -> Tensor:
        """[n] numbers over the tokens of each rollout."""

    def __iter__(self) -> Iterator[str]:
        yield from self.columns
        yield from self.scalars

    def __len__(self) -> int:
        return len(self.columns) + len(self.scalars)


@dataclass(frozen=True, eq=False)
class Packed(_NamedColumns):
    """Rollouts laid end to end, as variable-length attention kernels take them. Columns are ``[T, ...]``."""

    lengths: tuple[int, ...]
    """Tokens per rollout, ``n`` of them."""

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """[n+1] int32: rollout ``i`` is tokens ``cu_seqlens[i]:cu_seqlens[i+1]``."""
        # a list, made into a tensor once: n small operations on an accelerator would each be a kernel launch
        return torch.tensor(list(accumulate(self.lengths, initial=0)), dtype=torch.int32, device=self._device)

    @property
    def max_seqlen(self) -> int:
        """Length of the longest rollout, in tokens."""
        return max(self.lengths)

    @cached_property
    def position_ids(self) -> Tensor:
        """[T] int64: 0, 1, 2, ... restarting at every rollout (or the caller's own ``position_ids`` column).

        Made when first asked for: as many bytes as the tokens themselves, which not every trainer needs. O(T).
        """
        own = self.columns.get("position_ids")
        if own is not None:
            return own
        # one count for all: slices of it are views, so there is a single copy
        count = torch.arange(self.max_seqlen, device=self._device)
        return torch.cat([count[:length] for length in self.lengths])

    @property
    def _device(self) -> torch.device:
        return self.columns["input_ids"].device

    @cached_property
    def _last_rows(self) -> Tensor:
        """[n] int64: the row of each rollout's last token."""
        return torch.tensor(list(accumulate(self.lengths)), device=self._device) - 1

    def next(self, name: str) -> Tensor:
        """[T, ...] a column's value at the token that follows in the same rollout; 0 at a rollout's last token. Raises
        KeyError for an unknown column. O(T).

        Examples:
            >>> from stream_balancer.rollouts import MicroBatch, Rollout
            >>> rollouts = [Rollout(tokens={"input_ids": ids}) for ids in ([11, 12], [21, 22, 23], [31])]
            >>> MicroBatch.of(rollouts).packed().next("input_ids")
            tensor([12,  0, 22, 23,  0,  0])
        """
        if name not in self.columns:
            raise KeyError(f"no column {name!r}; columns: {sorted(self.columns)}")
        following = torch.roll(self.columns[name], -1, 0)
        # what was rolled there is the first token of another rollout
        following[self._last_rows] = 0
        return following

    def _spread(self, values: Tensor) -> Tensor:
        return torch.repeat_interleave(values, self.cu_seqlens.diff(), output_size=sum(self.lengths))


@dataclass(frozen=True, eq=False)
class Padded(_NamedColumns):
    """Rows, one per rollout. Columns are ``[n, L_max, ...]``, filled with ``pad_value`` beyond each rollout's
    length."""

    attention_mask: Tensor
    """[n, L_max] bool: True where there is a token."""
    position_ids: Tensor
    """[n, L_max] int64: position within the rollout; 0 on padding."""
    lengths: Tensor
    """[n] int64 tokens per rollout."""

    def _spread(self, values: Tensor) -> Tensor:
        return torch.where(self.attention_mask, values[:, None], values.new_zeros(()))


@dataclass(frozen=True, eq=False)
class Nested(_NamedColumns):
    """Torch jagged nested tensors, one ragged row per rollout. Columns are ``[n, j, ...]`` with ragged ``j``."""

    offsets: Tensor
    """[n+1] int64 offsets shared by every column."""

    def _spread(self, values: Tensor) -> Tensor:
        ids = self.columns["input_ids"]
        # with output_size torch need not ask the device how long the result is
        flat = torch.repeat_interleave(values, self.offsets.diff(), output_size=ids.values().shape[0])
        return torch.nested.nested_tensor_from_jagged(flat, self.offsets)

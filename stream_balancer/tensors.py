"""Layouts of a micro-batch as tensors: packed, padded, nested, TensorDict.

Torch functions on plain tensors; nothing that waits, sends or decides may enter. Everything starts from *flat columns*:
for each per-token column one tensor ``[T, ...]`` in which the ``n`` rollouts of a micro-batch lie one after the other
(``T`` = sum of their lengths), together with the lengths themselves. On a rank those flat columns are views of the
received buffer, so :func:`packed` copies no token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from stream_balancer.shared_columns import SharedColumns

if TYPE_CHECKING:
    from tensordict import TensorDict

PaddingSide = Literal["left", "right"]


@dataclass(frozen=True, eq=False, slots=True)
class FlatColumns:
    """Flat columns: ``n`` rollouts end to end, the start of every layout.

    Examples:
        >>> ids = torch.tensor([11, 12, 21, 22, 23, 31])  # [T]: three rollouts of 2, 3 and 1 tokens
        >>> flat = FlatColumns({"input_ids": ids}, lengths=(2, 3, 1), scalars={}, weights=torch.ones(3))
        >>> packed(flat).cu_seqlens  # [n+1]
        tensor([0, 2, 5, 6], dtype=torch.int32)
    """

    tokens: Mapping[str, Tensor]
    """Per-token columns ``[T, ...]``; ``input_ids`` is always there."""
    lengths: tuple[int, ...]
    """Tokens per rollout, ``n`` of them, each >= 1."""
    scalars: Mapping[str, Sequence[float | int]]
    """``n`` per-rollout numbers by name, as they were put."""
    weights: Tensor
    """``[n]`` float32: 1.0, or 0.0 for a padding copy."""
    executions: Sequence[tuple[int, int]] | None = None
    """``n`` times (rollouts, loss tokens) that a rollout's execution has in the step; None: each is one by itself."""
    shared: SharedColumns | None = None
    """Where several ranks share each of the rollouts: what this one's part of their tokens is."""
    prefixes: Sequence[tuple[str | None, int]] | None = None
    """``n`` times (group, leading tokens shared with it); None: none shares any."""


@dataclass(frozen=True, eq=False)
class _Columns(Mapping[str, Any]):
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
            >>> ids = torch.tensor([11, 12, 21, 22, 23, 31])  # [T]: three rollouts of 2, 3 and 1 tokens
            >>> weights = torch.tensor([1.0, 1.0, 0.0])  # [n]: the last one is a padding copy
            >>> rollouts = packed(FlatColumns({"input_ids": ids}, (2, 3, 1), {"advantage": [0.5, -1.0, 2.0]}, weights))
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
class Packed(_Columns):
    """Rollouts laid end to end, as variable-length attention kernels take them. Columns are ``[T, ...]``."""

    lengths: tuple[int, ...]
    """Tokens per rollout, ``n`` of them."""
    cu_seqlens: Tensor
    """[n+1] int32: rollout ``i`` is tokens ``cu_seqlens[i]:cu_seqlens[i+1]``."""
    max_seqlen: int
    """Length of the longest rollout, in tokens."""
    shared: SharedColumns | None = field(default=None, repr=False)
    """Where several ranks share each of the rollouts; then all above is of this rank's part of them."""

    @cached_property
    def position_ids(self) -> Tensor:
        """[T] int64: 0, 1, 2, ... restarting at every rollout (or the caller's own ``position_ids`` column). Of a part,
        positions in the whole rollout, which go on beyond its end.

        Made when first asked for: as many bytes as the tokens themselves, which not every trainer needs. O(T).
        """
        own = self.columns.get("position_ids")
        if own is not None:
            return own
        if self.shared is not None:
            return self.shared.positions(self.lengths, self.cu_seqlens.device)
        count = torch.arange(self.max_seqlen, dtype=torch.int64, device=self.cu_seqlens.device)
        return torch.cat([count[:length] for length in self.lengths])

    @property
    def whole_lengths(self) -> tuple[int, ...]:
        """Tokens per whole rollout, ``n`` of them; ``lengths`` where nobody shares them."""
        return self.lengths if self.shared is None else self.shared.whole_lengths

    @cached_property
    def whole_cu_seqlens(self) -> Tensor:
        """[n+1] int32: ``cu_seqlens`` of the whole rollouts; the same where nobody shares them."""
        return self._boundaries(self.whole_lengths)

    @cached_property
    def whole_cu_seqlens_padded(self) -> Tensor:
        """[n+1] int32: with the zeros behind each rollout, too: two chunks on each rank that shares it."""
        return self._boundaries([length * (self.shared.degree if self.shared else 1) for length in self.lengths])

    def _boundaries(self, lengths: Sequence[int]) -> Tensor:
        return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=self.cu_seqlens.device)

    def next(self, name: str) -> Tensor:
        """[T, ...] a column's value at the token that follows in the same rollout, also in another rank's part of it; 0
        at a rollout's last token. Raises KeyError for an unknown column. O(T).

        Examples:
            >>> ids = torch.tensor([11, 12, 21, 22, 23, 31])  # [T]: three rollouts of 2, 3 and 1 tokens
            >>> packed(FlatColumns({"input_ids": ids}, (2, 3, 1), {}, torch.ones(3))).next("input_ids")
            tensor([12,  0, 22, 23,  0,  0])
        """
        if name not in self.columns:
            raise KeyError(f"no column {name!r}; columns: {sorted(self.columns)}")
        column = self.columns[name]
        if self.shared is not None:
            return self.shared.next(name, column, self.lengths)
        following = torch.roll(column, -1, 0)
        following[(self.cu_seqlens[1:] - 1).to(torch.int64)] = 0
        return following

    def _spread(self, values: Tensor) -> Tensor:
        spread = torch.repeat_interleave(values, self.cu_seqlens.diff(), output_size=sum(self.lengths))
        if self.shared is None:
            return spread
        return torch.where(self.shared.has_token(self.lengths, spread.device), spread, spread.new_zeros(()))


@dataclass(frozen=True, eq=False)
class Padded(_Columns):
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
class Nested(_Columns):
    """Torch jagged nested tensors, one ragged row per rollout. Columns are ``[n, j, ...]`` with ragged ``j``."""

    offsets: Tensor
    """[n+1] int64 offsets shared by every column."""

    def _spread(self, values: Tensor) -> Tensor:
        ids = self.columns["input_ids"]
        flat = torch.repeat_interleave(values, self.offsets.diff(), output_size=ids.values().shape[0])
        return torch.nested.nested_tensor_from_jagged(flat, self.offsets)


def _lengths(flat: FlatColumns) -> Tensor:
    return torch.tensor(flat.lengths, dtype=torch.int64, device=flat.tokens["input_ids"].device)


def _columns_with_loss_mask(flat: FlatColumns) -> dict[str, Tensor]:
    """The columns, with a ``loss_mask`` in any case: a trainer that reads it never trains on a padding copy, nor on
    the first token of a rollout, which no denominator counts."""
    columns = dict(flat.tokens)
    device = columns["input_ids"].device
    if "loss_mask" in columns:
        mask = columns["loss_mask"].clone()
    else:
        # [T] one where the rollout counts, zero on every token of a padding copy
        mask = torch.repeat_interleave(flat.weights != 0, _lengths(flat), output_size=sum(flat.lengths))
        if flat.shared is not None:
            mask &= flat.shared.has_token(flat.lengths, device)
    if flat.shared is None or flat.shared.place == 0:
        mask.index_fill_(0, torch.tensor(list(accumulate(flat.lengths[:-1], initial=0)), device=device), 0)
    return columns | {"loss_mask": mask}


def _begin(flat: FlatColumns, layout: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Flat columns of a layout, and the fields that all layouts have. ``[n]`` scalars are float32 by default: a float64
    scalar would turn a float32 loss into float64."""
    if flat.shared is not None and layout != "packed":
        raise flat.shared.not_as(layout)
    columns = _columns_with_loss_mask(flat)
    executions, device = flat.executions, columns["input_ids"].device
    if executions is None:
        masks = torch.split(columns["loss_mask"], list(flat.lengths))
        executions = [(1, int(torch.count_nonzero(mask[1:]))) for mask in masks]
    scalars = {name: torch.tensor(values, dtype=dtype, device=device) for name, values in flat.scalars.items()}
    return columns, {"scalars": scalars, "rollout_weights": flat.weights, "executions": executions}


def packed(flat: FlatColumns, *, shift: bool = False, scalar_dtype: torch.dtype = torch.float32) -> Packed:
    """The flat columns as they are, with the indices a variable-length kernel needs. No token is copied, without
    ``shift``; see :meth:`MicroBatch.packed`. O(n).

    Examples:
        >>> ids = torch.tensor([11, 12, 21, 22, 23, 31])  # [T]
        >>> weights = torch.tensor([1.0, 1.0, 0.0])  # [n]: the last one is a padding copy
        >>> rollouts = packed(FlatColumns({"input_ids": ids}, (2, 3, 1), {"advantage": [0.5, -1.0, 2.0]}, weights))
        >>> rollouts["input_ids"], rollouts.max_seqlen  # [T]
        (tensor([11, 12, 21, 22, 23, 31]), 3)
        >>> rollouts.cu_seqlens  # [n+1]: rollout 1 is tokens 2 to 5
        tensor([0, 2, 5, 6], dtype=torch.int32)
        >>> rollouts.position_ids  # [T]
        tensor([0, 1, 0, 1, 2, 0])
        >>> rollouts["loss_mask"]  # [T]
        tensor([False,  True, False,  True,  True, False])
        >>> rollouts["advantage"]  # [n]
        tensor([ 0.5000, -1.0000,  2.0000])
    """
    if shift and "targets" in flat.tokens:
        raise ValueError(
            "packed(shift=True) makes a column 'targets', and the rollouts bring one of that name. Rename theirs, "
            "or use packed() and packed.next()"
        )
    # A list, made into a tensor once below: n small tensor operations on an accelerator would each be a kernel launch.
    ends = list(accumulate(flat.lengths, initial=0))  # [n+1]
    (columns, fields), shared = _begin(flat, "packed", scalar_dtype), flat.shared
    if shared is not None and "loss_mask" not in flat.tokens:
        shared = shared.with_loss_mask(flat.lengths, flat.weights)
    made = Packed(
        columns,
        **fields,
        lengths=flat.lengths,
        cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=flat.tokens["input_ids"].device),
        max_seqlen=max(flat.lengths),
        shared=shared,
    )
    if shift:
        following = {name: made.next(name) for name in columns if name != "position_ids"}
        following["targets"] = following.pop("input_ids")
        made = replace(made, columns={**columns, **following})
    return made


def padded(
    flat: FlatColumns,
    *,
    padding_side: PaddingSide = "right",
    pad_values: Mapping[str, float | int | bool] | None = None,
    multiple_of: int = 1,
    scalar_dtype: torch.dtype = torch.float32,
) -> Padded:
    """Rows, one per rollout, ``[n, L_max, ...]``; ``L_max`` is rounded up to ``multiple_of``. Copies every token once.

    ``pad_values`` maps a column to what stands beyond a rollout's end; 0 (False) where it says nothing.
    Raises ValueError for an unknown ``padding_side``, an unknown column in ``pad_values``, or ``multiple_of < 1``.

    Examples:
        >>> ids = torch.tensor([11, 12, 21, 22, 23, 31])  # [T]
        >>> flat = FlatColumns({"input_ids": ids}, (2, 3, 1), {}, torch.ones(3))
        >>> rows = padded(flat, padding_side="left", multiple_of=4)
        >>> rows["input_ids"]  # [n, L_max]
        tensor([[ 0,  0, 11, 12],
                [ 0, 21, 22, 23],
                [ 0,  0,  0, 31]])
        >>> rows.attention_mask.int()  # [n, L_max]
        tensor([[0, 0, 1, 1],
                [0, 1, 1, 1],
                [0, 0, 0, 1]], dtype=torch.int32)
        >>> rows.position_ids  # [n, L_max]
        tensor([[0, 0, 0, 1],
                [0, 0, 1, 2],
                [0, 0, 0, 0]])
    """
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side must be 'left' or 'right', not {padding_side!r}")
    if multiple_of < 1:
        raise ValueError(f"multiple_of must be >= 1, not {multiple_of}")
    columns, fields = _begin(flat, "padded", scalar_dtype)
    n_tokens = _lengths(flat)
    if unknown := (pad_values or {}).keys() - columns.keys():
        raise ValueError(f"pad_values names {sorted(unknown)}, but the columns are {sorted(columns)}")
    width = -(-max(flat.lengths) // multiple_of) * multiple_of
    # [L_max], compared below with the [n, 1] lengths
    place = torch.arange(width, device=n_tokens.device)
    # [n, L_max]: row-major, and so are the flat columns; `rows[mask] = column` below is therefore one copy, in order
    mask = place < n_tokens[:, None] if padding_side == "right" else place >= width - n_tokens[:, None]
    rows: dict[str, Tensor] = {}
    for name, column in columns.items():
        rows[name] = column.new_full((len(flat.lengths), width, *column.shape[1:]), (pad_values or {}).get(name, 0))
        rows[name][mask] = column
    positions = rows.get("position_ids")
    if positions is None:
        positions = (mask.to(torch.int64).cumsum(1) - 1).clamp_(min=0) * mask  # [n, L_max], on either padding side
    return Padded(rows, **fields, attention_mask=mask, position_ids=positions, lengths=n_tokens)


def nested(flat: FlatColumns, *, scalar_dtype: torch.dtype = torch.float32) -> Nested:
    """Jagged nested tensors over the flat columns; no token is copied. O(n).

    Examples:
        >>> ids = torch.tensor([11, 12, 21, 22, 23, 31])  # [T]
        >>> rollouts = nested(FlatColumns({"input_ids": ids}, (2, 3, 1), {}, torch.ones(3)))
        >>> rollouts["input_ids"].unbind()  # [n, j]: j differs from rollout to rollout
        (tensor([11, 12]), tensor([21, 22, 23]), tensor([31]))
        >>> rollouts.offsets  # [n+1]
        tensor([0, 2, 5, 6])
    """
    flat_columns, fields = _begin(flat, "nested", scalar_dtype)
    n_tokens = _lengths(flat)
    # [n+1]; int64, as torch wants them for jagged tensors
    offsets = torch.zeros(len(flat.lengths) + 1, dtype=torch.int64, device=n_tokens.device)
    offsets[1:] = torch.cumsum(n_tokens, 0)  # one tensor for all columns: torch calls two jagged shapes equal only then
    columns = {
        name: torch.nested.nested_tensor_from_jagged(
            column, offsets, min_seqlen=min(flat.lengths), max_seqlen=max(flat.lengths)
        )
        for name, column in flat_columns.items()
    }
    return Nested(columns, **fields, offsets=offsets)


def tensordict(flat: FlatColumns, *, scalar_dtype: torch.dtype = torch.float32) -> TensorDict:
    """A ``TensorDict`` with batch size ``[n]``: jagged columns, scalars, and ``rollout_weights``.

    Raises ImportError, saying which extra to install, where tensordict is missing.
    """
    try:
        from tensordict import TensorDict
    except ImportError as error:
        raise ImportError(
            "tensordict() needs the tensordict package: pip install 'stream-balancer[tensordict]'"
        ) from error
    rows = nested(flat, scalar_dtype=scalar_dtype)
    return TensorDict(
        {**rows.columns, **rows.scalars, "rollout_weights": rows.rollout_weights}, batch_size=[len(flat.lengths)]
    )

"""Where verl's columns lie in a rollout: the geometry of its padded and its jagged batches. Torch functions.

A row of verl's is a prompt and a response. Padded, a row of width P + R has its tokens around the boundary P: the
prompt ends there, the response begins there. ``offset`` says where the first token stands, relative to that boundary
(minus the prompt's length, as a rule), so one number places a row's tokens in batches of any P and R.

    offset = -3, 5 tokens        . . p p p | r r . .
    sequence  [P + R]            0 0 1 2 3   4 5 0 0     -> [5] = 1 2 3 4 5
    prompt    [P]                0 0 1 2 3               -> [5] = 1 2 3 0 0
    response  [R]                            4 5 0 0     -> [5] = 0 0 0 4 5
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

__all__ = ["Column", "Kind", "NoRuleError", "Span", "column_of_row", "padding_of", "row_of_column", "span"]

Kind = Literal["sequence", "prompt", "response", "row"]
"""Which part of a row a column is for; "row" is not per token."""

Rule = Literal["constant", "repeat", "count"]
"""What stands after the last token: one number everywhere, the last token's own, or counting on from it (verl's
``position_ids`` do all three)."""

Number = float | int | bool


class Column(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of verl's tensors, as a rollout remembers it."""

    kind: Kind
    stored: str | None = None
    """The rollout's token column that holds it; None: it is that part of ``input_ids``."""
    token_dim: int = 1
    """Where the tokens are in ``[B, ...]``: 2 for multimodal ``position_ids [B, 3, P + R]``."""
    before: Number | None = None
    """What stands before the first token; None if nothing did."""
    after: Number | None = None
    """What stands after the last token under the rule "constant"; None if nothing did."""
    rule: Rule = "constant"
    jagged: bool = False
    """A "row" that was jagged: its first dimension differs from row to row."""


class Span(NamedTuple):
    """Place of a column's tokens in a row."""

    start: int
    """In the column's row."""
    first: int
    """In the rollout."""
    size: int


def span(kind: Kind, prompt_width: int, offset: int, length: int) -> Span:
    """The tokens of a row that a column of this kind holds."""
    in_prompt = min(max(-offset, 0), length)
    if kind == "sequence":
        return Span(prompt_width + offset, 0, length)
    if kind == "prompt":
        return Span(min(prompt_width + offset, prompt_width), 0, in_prompt)
    return Span(max(offset, 0), in_prompt, length - in_prompt)


def column_of_row(row: Tensor, where: Span, length: int) -> Tensor:
    """A row of a verl column -> a rollout's column ``[L, ...]``, zero where the row says nothing. Always a copy."""
    tokens = row[where.start : where.start + where.size]
    if where.size == length:
        return tokens.clone()
    column = row.new_zeros((length, *row.shape[1:]))
    column[where.first : where.first + where.size] = tokens
    return column


def row_of_column(row: Tensor, tokens: Tensor, where: Span, column: Column) -> None:
    """A rollout's column into a row of a verl column, with the padding that the column has."""
    end = where.start + where.size
    row[: where.start] = column.before or 0
    row[where.start : end] = tokens[where.first : where.first + where.size]
    if column.rule == "constant":
        row[end:] = column.after or 0
    else:
        row[end:] = _continued(tokens[where.first + where.size - 1], row.shape[0] - end, column.rule)


def _continued(last: Tensor, count: int, rule: Rule) -> Tensor:
    steps = torch.arange(1, count + 1, dtype=last.dtype, device=last.device).view(-1, *[1] * last.ndim)
    return last + (steps if rule == "count" else torch.zeros_like(steps))


class NoRuleError(ValueError):
    """What stands under a column's padding follows no rule."""


def padding_of(rows: Tensor, spans: list[Span]) -> dict[str, Any]:
    """``before``, ``after`` and ``rule`` of a column ``[B, width, ...]``. Raises NoRuleError where there are none."""
    place = torch.arange(rows.shape[1], device=rows.device)
    starts = torch.tensor([one.start for one in spans], device=rows.device)[:, None]
    ends = torch.tensor([one.start + one.size for one in spans], device=rows.device)[:, None]
    before, after = rows[place < starts], rows[place >= ends]
    found: dict[str, Any] = {"before": _constant(before)}
    try:
        return {**found, "after": _constant(after)}
    except NoRuleError:
        for rule in ("repeat", "count"):
            if not rows.is_floating_point() and all(one.size for one in spans) and _follows(rows, spans, rule):
                return {**found, "rule": rule}
        raise


def _constant(padding: Tensor) -> Number | None:
    if padding.numel() == 0:
        return None
    value = padding.reshape(-1)[0]
    if not bool(((padding == value) | ((padding != padding) & (value != value))).all()):
        raise NoRuleError
    number: Number = value.item()
    return number


def _follows(rows: Tensor, spans: list[Span], rule: Any) -> bool:
    return all(
        torch.equal(row[end:], _continued(row[end - 1], row.shape[0] - end, rule))
        for row, end in zip(rows, [one.start + one.size for one in spans], strict=True)
    )

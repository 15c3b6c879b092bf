"""A verl batch's rows as rollouts, whatever form the batch has; and what rollouts say of the batch to make.

Everything verl keeps of a row travels in its rollout, so that rollouts of many batches may meet in one rank batch:
per-token tensors as token columns, other tensors in ``tensors``, the rest in ``metadata["verl"]`` (of the batch:
columns, widths, ``meta_info``; one dict for all its rollouts) and ``metadata["verl_row"]`` (of the row).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from stream_balancer.errors import RolloutError
from stream_balancer.integrations import _rows
from stream_balancer.integrations.verl.columns import Column
from stream_balancer.integrations.verl.plain import decode, encode, objects
from stream_balancer.types import MicroBatch, RankBatch, Rollout, Version

__all__ = ["Form", "Row", "Share", "make_rollouts", "read_share", "stored_name"]

Objects = np.ndarray[Any, Any]
MASKS = ("response_mask", "loss_mask")


class Form(msgspec.Struct, frozen=True, omit_defaults=True):
    """Form of the batch that a rollout was in."""

    columns: dict[str, Column]
    non_tensor: dict[str, tuple[str, int]]
    """dtype and number of dimensions of each array."""
    meta_info: dict[str, Any]
    """Encoded."""
    prompt_width: int = 0
    response_width: int = 0
    mask_dtype: str = "int64"


@dataclass(slots=True)
class Row:
    """One row on its way to becoming a rollout."""

    offset: int
    tokens: dict[str, Tensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def stored_name(name: str, column: Tensor, names: Iterable[str]) -> str:
    """The token column that holds verl's tensor: ``response_mask`` is what rollouts call ``loss_mask``, and counts as
    such, unless verl's batch has one of that name too."""
    return "loss_mask" if name == "response_mask" and column.ndim == 2 and "loss_mask" not in names else name


def make_rollouts(rows: Sequence[Row], form: Form, non_tensor: Mapping[str, Objects]) -> list[Rollout]:
    """One rollout per row. ``uid`` names the group; ``min_global_steps`` and ``max_global_steps``, if any, the version.

    Raises RolloutError for what cannot travel.
    """
    of_batch = msgspec.to_builtins(form)
    rollouts = []
    for index, row in enumerate(rows):
        own = {name: array[index] for name, array in non_tensor.items()}
        plain = {name: _encode_own(name, value, form, row.tensors) for name, value in own.items()}
        rollouts.append(
            Rollout(
                tokens=row.tokens,
                tensors=row.tensors,
                metadata={"verl": of_batch, "verl_row": {"offset": row.offset, "non_tensor": plain}},
                group_id=str(own["uid"]) if "uid" in own else None,
                version=_version(own),
            )
        )
    return rollouts


def encode_meta_info(meta_info: Mapping[str, Any]) -> dict[str, Any]:
    def refuse(_: Tensor) -> str:
        raise RolloutError(
            "meta_info holds a tensor, which would travel with every rollout. Leave it out "
            "(data.select(meta_info_keys=[...])) and give it to the batch that is made of these rollouts"
        )

    return {str(key): encode(value, refuse, f"meta_info[{key!r}]") for key, value in meta_info.items()}


def _encode_own(name: str, value: Any, form: Form, tensors: dict[str, Tensor]) -> Any:
    def keep(tensor: Tensor) -> str:
        key = f"{name}/{len(tensors)}"
        tensors[key] = tensor.clone()
        return key

    if isinstance(value, np.generic) and form.non_tensor[name][0] != "|O":
        value = value.item()  # the array's dtype says the rest
    return encode(value, keep, f"non_tensor_batch[{name!r}]")


def _version(own: Mapping[str, Any]) -> Version | None:
    oldest, newest = own.get("min_global_steps"), own.get("max_global_steps")
    return None if oldest is None or newest is None else (int(oldest), int(newest))


# ---------------------------------------------------------------------------------------------------------------------
# And back
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Share:
    """Rollouts that become a batch."""

    rollouts: Sequence[Rollout]
    offsets: list[int]
    form: Form
    """Of all of them together: the widest, and each column's padding from the first batch that had any."""
    non_tensor: dict[str, Objects]
    meta_info: dict[str, Any]
    """What all of them agree on."""

    def column(self, name: str) -> list[Tensor]:
        """verl's tensor of this name, each rollout's part of it."""
        column = self.form.columns[name]
        if column.kind == "row":
            return [rollout.tensors[name] for rollout in self.rollouts]
        rows = [rollout.tokens[column.stored or "input_ids"] for rollout in self.rollouts]
        if name not in MASKS:
            return rows
        pairs = zip(self.rollouts, rows, strict=True)
        return [row.new_zeros(row.shape) if rollout.is_padding else row for rollout, row in pairs]


def read_share(share: RankBatch | MicroBatch | Iterable[Rollout]) -> Share:
    """Everything that rollouts made by :func:`make_rollouts` know of verl's batch.

    Raises ValueError for no rollouts at all, for some that were not made there, and for batches that do not have the
    same columns.
    """
    rollouts = _rows.with_prompt(share.rollouts if isinstance(share, (RankBatch, MicroBatch)) else share)
    if not rollouts:
        raise ValueError("there is no rollout to make a batch of")
    forms: list[tuple[Any, Form]] = []  # nearly always one; on a rank every rollout has a copy of its own
    for rollout in rollouts:
        if "verl" not in rollout.metadata or "verl_row" not in rollout.metadata:
            raise ValueError(
                f"rollout {rollout.rollout_id!r} was not made of a verl batch: its metadata has no 'verl'. Make it "
                "with rollouts_from_dataproto or rollouts_from_tensordict"
            )
        plain = rollout.metadata["verl"]
        if not any(plain is known or plain == known for known, _ in forms):
            forms.append((plain, msgspec.convert(plain, Form)))
    form = _together([form for _, form in forms])
    return Share(
        rollouts=rollouts,
        offsets=[-_rows.within(rollout, -rollout.metadata["verl_row"]["offset"]) for rollout in rollouts],
        form=form,
        non_tensor={name: _array(name, rollouts, form) for name in form.non_tensor},
        meta_info=decode(form.meta_info, {}),
    )


def _together(forms: Sequence[Form]) -> Form:
    first = forms[0]
    for other in forms[1:]:
        if _schema(other) != _schema(first):
            raise ValueError(
                f"the rollouts come from batches with different fields: {_schema(first)} and {_schema(other)}. Make "
                "every batch with the same fields, or select() the ones that all have"
            )
    return Form(
        columns={name: _with_padding([form.columns[name] for form in forms]) for name in first.columns},
        non_tensor={name: max(form.non_tensor[name] for form in forms) for name in first.non_tensor},
        meta_info={
            key: value
            for key, value in first.meta_info.items()
            if all(key in form.meta_info and form.meta_info[key] == value for form in forms)
        },
        prompt_width=max(form.prompt_width for form in forms),
        response_width=max(form.response_width for form in forms),
        mask_dtype=first.mask_dtype,
    )


def _schema(form: Form) -> dict[str, list[str]]:
    columns = sorted(f"{name} ({column.kind})" for name, column in form.columns.items())
    return {"tensors": columns, "non-tensors": sorted(form.non_tensor)}


def _with_padding(columns: Sequence[Column]) -> Column:
    """The first's, with the padding of the first that had any on that side."""
    before = next((one.before for one in columns if one.before is not None), None)
    after = next((one for one in columns if one.after is not None or one.rule != "constant"), columns[0])
    return msgspec.structs.replace(columns[0], before=before, after=after.after, rule=after.rule)


def _array(name: str, rollouts: Sequence[Rollout], form: Form) -> Objects:
    dtype, num_dims = form.non_tensor[name]
    items = [decode(one.metadata["verl_row"]["non_tensor"][name], one.tensors) for one in rollouts]
    if num_dims > 1:
        return np.stack(items)
    return objects(items, dtype)

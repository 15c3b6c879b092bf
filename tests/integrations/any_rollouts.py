"""Rollouts of every kind, for the adapters' round trips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

import stream_balancer as sb
from stream_balancer.rollouts import SUPPORTED_DTYPES

DTYPES = [dtype for dtype in SUPPORTED_DTYPES if dtype.itemsize > 1 or not dtype.is_floating_point]
"""Those that torch compares on a CPU, which it does not do with float8."""
ID_DTYPES = [torch.int32, torch.int64, torch.int16, torch.uint8]

json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=2) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xy"), inner, max_size=2),
    max_leaves=3,
)
versions = st.none() | st.integers(0, 5) | st.tuples(st.integers(0, 3), st.integers(3, 6))


def column(draw: Any, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Random bits of ``dtype`` that are finite."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    return torch.randint(0, 2 if dtype is torch.bool else 100, tuple(shape), generator=generator).to(dtype)


@st.composite
def rollouts(draw: Any, *, max_rollouts: int = 5, max_tokens: int = 7, tensors: bool = True) -> list[sb.Rollout]:
    """1 to ``max_rollouts`` rollouts with the same columns, of any dtypes, every field filled or not."""
    lengths = draw(st.lists(st.integers(1, max_tokens), min_size=1, max_size=max_rollouts))
    columns = {"input_ids": (draw(st.sampled_from(ID_DTYPES)), ())}
    for name in draw(st.sets(st.sampled_from(["logprobs", "loss_mask", "values"]))):
        trailing = () if name != "values" else draw(st.sampled_from([(), (2,), (2, 3)]))
        columns[name] = (draw(st.sampled_from(DTYPES)), trailing)
    scalars = draw(st.sets(st.sampled_from(["advantage", "reward"])))
    shapes = draw(st.dictionaries(st.sampled_from(["image", "grid"]), st.sampled_from([(), (1,), (2, 3)])))
    dtypes = {name: draw(st.sampled_from(DTYPES)) for name in shapes}
    groups = [draw(st.none() | st.sampled_from(["g0", "g1"])) for _ in lengths]
    return [
        sb.Rollout(
            tokens={name: column(draw, (length, *trailing), dtype) for name, (dtype, trailing) in columns.items()},
            scalars={name: draw(st.floats(-9, 9)) for name in sorted(scalars)},
            tensors={name: column(draw, shape, dtypes[name]) for name, shape in shapes.items()} if tensors else {},
            metadata=draw(st.dictionaries(st.sampled_from(["source", "turns"]), json_like)),
            rollout_id=f"r{index}",
            group_id=groups[index],
            version=draw(versions),
            cost=draw(st.none() | st.floats(0, 9)),
        )
        for index, length in enumerate(lengths)
    ]

"""Plain data for what verl keeps beside its tensors (strings, dicts, numpy scalars, arrays of anything), and back.

A rollout's metadata is JSON-like, and what verl calls non-tensor is any Python object. What has no JSON-like form is
written as ``{"$": kind, ...}``; tensors and numeric arrays go into the rollout's ``tensors``, under a name that stands
in their place. Anything else is refused. Exact: ``decode(encode(x))`` has x's types, dtypes and shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stream_balancer.errors import RolloutError
from stream_balancer.types import SUPPORTED_DTYPES

__all__ = ["decode", "encode"]

Keep = Callable[[Tensor], str]
"""Stores a tensor and says under which name."""

_ARRAYS = {torch.empty(0, dtype=dtype).numpy().dtype for dtype in SUPPORTED_DTYPES if dtype is not torch.bfloat16}
"""numpy dtypes that travel as tensors."""


def encode(value: Any, keep: Keep, what: str) -> Any:
    """Plain data for `value`. Raises RolloutError, naming `what`, for a kind of object that cannot travel."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, Tensor):
        return {"$": "tensor", "name": keep(value)}
    if isinstance(value, np.ndarray):
        return _encode_array(value, keep, what)
    if isinstance(value, np.generic) and value.dtype.kind in "biufSU":
        return {"$": "scalar", "dtype": value.dtype.str, "value": value.item()}
    if isinstance(value, list):
        return [encode(one, keep, what) for one in value]
    if isinstance(value, tuple):
        return {"$": "tuple", "items": [encode(one, keep, what) for one in value]}
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value) and "$" not in value:
            return {key: encode(one, keep, f"{what}[{key!r}]") for key, one in value.items()}
        pairs = [[encode(key, keep, what), encode(one, keep, what)] for key, one in value.items()]
        return {"$": "dict", "pairs": pairs}
    raise RolloutError(
        f"{what} is a {type(value).__name__}, which cannot travel: only numbers, str, bytes, None, tensors, numpy "
        "arrays, and lists, tuples and dicts of these do. Leave it out, or convert it before"
    )


def _encode_array(array: np.ndarray[Any, Any], keep: Keep, what: str) -> Any:
    if array.dtype in _ARRAYS:
        return {"$": "array", "name": keep(torch.from_numpy(np.array(array)))}
    if array.dtype.kind in "biufSUO":
        items = [
            encode(one, keep, what) for one in (array.ravel() if array.dtype.kind == "O" else array.ravel().tolist())
        ]
        return {"$": "items", "dtype": array.dtype.str, "shape": list(array.shape), "items": items}
    raise RolloutError(
        f"{what} is an array of {array.dtype}, which cannot travel. Convert it to numbers or strings before"
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`encode`. `tensors` are those it stored, by name."""
    if isinstance(value, (list, tuple)):
        return [decode(one, tensors) for one in value]
    if not isinstance(value, Mapping):
        return value
    match value.get("$"):
        case None:
            return {key: decode(one, tensors) for key, one in value.items()}
        case "tensor":
            return tensors[value["name"]]
        case "array":
            return tensors[value["name"]].cpu().numpy()
        case "scalar":
            return np.dtype(value["dtype"]).type(value["value"])
        case "tuple":
            return tuple(decode(one, tensors) for one in value["items"])
        case "dict":
            return {decode(key, tensors): decode(one, tensors) for key, one in value["pairs"]}
        case "items":
            return objects([decode(one, tensors) for one in value["items"]], value["dtype"]).reshape(value["shape"])
        case kind:
            raise ValueError(f"metadata of kind {kind!r} was not written by this version")


def objects(items: list[Any], dtype: str = "O") -> np.ndarray[Any, Any]:
    """[n] array of exactly these items, never an array of arrays made flat."""
    array = np.empty(len(items), dtype=dtype)
    for index, item in enumerate(items):
        array[index] = item
    return array

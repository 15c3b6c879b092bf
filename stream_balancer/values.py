"""Values of a rollout: exactly what the wire can carry, so that what was accepted can always be sent and saved.

No other module checks them. :class:`~stream_balancer.rollouts.Rollout` passes every field through here when it is made:
values with an obvious meaning (numpy scalars, subclasses of str, int, float and bytes) become plain ones, all others
raise :class:`~stream_balancer.errors.RolloutError`. ``wire`` bounds by the same numbers what it reads. Pure.

A message begins with what is wrong, without the field: the caller knows which one it was, and formats only then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from stream_balancer.errors import RolloutError

T = TypeVar("T")
Version: TypeAlias = int | tuple[int, int]
"""Policy version a rollout was sampled with; ``(oldest, newest)`` if the weights changed while it was generated."""

SUPPORTED_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""Dtypes that may travel. Order is part of the wire format: append only."""
MAX_NAME_BYTES = 512  # an id is a name, not a payload; it also bounds what a header can announce
MAX_COLUMNS = 1024  # bounds the work a hostile description can ask for; real batches have a dozen
MAX_DIMENSIONS = 32
MAX_ELEMENTS = 2**48  # of one tensor; keeps every size computation far inside int64
MAX_TEXT_BYTES = 2**30  # of one str or bytes in metadata; msgpack ends at 2**32
MAX_DEPTH = 64  # of metadata; msgspec recurses on the C stack
MAX_VERSION = 2**62  # int64 with room to add and subtract
MAX_COST = 1e100  # sums, products and squares of costs stay finite

PADDING_PREFIX = "padding-"
"""How the ids of padding copies begin; no rollout's own may."""

_DTYPES = frozenset(SUPPORTED_DTYPES)
_FLOATS = frozenset(dtype for dtype in _DTYPES if dtype.is_floating_point)
_INTEGERS = _DTYPES - _FLOATS - {torch.bool}
_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_AS_THEY_ARE = frozenset({float, bool, type(None)})  # most of metadata, with no question more


def plain_name(value: object) -> str:
    """The name of a rollout, a group, a column or a scalar."""
    if not isinstance(value, str):
        raise RolloutError(f"must be a non-empty str, not {_short(value)}")
    # every put comes here: most names are plain, and need no look at their characters
    text = value if type(value) is str and value.isascii() else _plain_text(value)
    size = len(text) if text.isascii() else len(text.encode())
    if not 0 < size <= MAX_NAME_BYTES:
        raise RolloutError(
            f"must be a non-empty str of at most {MAX_NAME_BYTES} bytes, not {_short(value)} ({size} bytes). Put long "
            "descriptions into metadata"
        )
    return text


# every rollout has the same names of columns and scalars
_plain_key = lru_cache(maxsize=MAX_COLUMNS)(plain_name)


def by_name(
    mapping: object, convert: Callable[[object], T], plain_key: Callable[[object], str] = _plain_key
) -> dict[str, T]:
    """A plain dict of plain names and converted values. Errors name the entry."""
    if type(mapping) is not dict and not isinstance(mapping, Mapping):
        raise RolloutError(f"must be a mapping, not {_short(mapping)}")
    found: dict[str, T] = {}
    for key, value in mapping.items():
        # which entry it was is said only of one that is wrong: a put should not pay for the words
        try:
            found[plain_key(key)] = convert(value)
        except RolloutError as error:
            raise RolloutError(join(f"[{_short(key)}]", error)) from None
    return found


def plain_tensor(value: object) -> Tensor:
    """A dense tensor whose memory can be read, without a copy where possible."""
    tensor = _readable(value)
    _check_size(tensor.shape)
    return tensor


def _readable(value: object) -> Tensor:
    # each question costs as much as a function call, for every column of every put: so few are asked
    if type(value) is not Tensor:
        value = _base_tensor(value)
    kind = value.dtype
    if kind in _FLOATS:
        # its graph would be kept alive for as long as the rollout waits
        if value.requires_grad:
            value = value.detach()
        # bytes are what travels: a view that torch negates when it reads (the imaginary part of a conjugate, say) would
        # arrive with the other sign
        if value.is_neg():
            value = value.resolve_neg()
    elif kind not in _DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in SUPPORTED_DTYPES)
        raise RolloutError(f"has dtype {kind}, which cannot travel. Use one of {names}")
    try:
        has_memory = value.data_ptr() or not (value.is_meta or value.numel())
    except RuntimeError:
        has_memory = False
    if not has_memory:
        raise RolloutError(_why_unreadable(value))
    return value


def _check_size(shape: torch.Size) -> None:
    if len(shape) > MAX_DIMENSIONS:
        raise RolloutError(f"has {len(shape)} dimensions; at most {MAX_DIMENSIONS} can travel")
    if math.prod(n or 1 for n in shape) > MAX_ELEMENTS:
        raise RolloutError(f"has shape {list(shape)}; at most 2**48 elements can travel")


def _why_unreadable(value: Tensor) -> str:
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else value.layout
        return f"is a {kind} tensor; only dense (strided) tensors can travel. Call .to_dense()"
    return (
        "has no memory behind it (a meta or fake tensor, one made under a torch transform, or its storage was freed). "
        "Give a tensor with values"
    )


def _base_tensor(value: object) -> Tensor:
    """A subclass of torch.Tensor, or what becomes one, as exactly a torch.Tensor."""
    if isinstance(value, Tensor):
        # a subclass with a dispatch of its own may have no memory here; others are plain tensors by another name
        if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise RolloutError(
                f"is a {type(value).__name__}, which is no plain tensor with memory of its own. Convert it first "
                "(a DTensor: .full_tensor())"
            )
        return value.detach().as_subclass(Tensor)
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RolloutError(f"cannot become a tensor: {error}") from None


def plain_columns(given: object) -> tuple[dict[str, Tensor], int]:
    """Token columns, and how many tokens each of them has. ``input_ids`` is one of them."""
    tokens = by_name(given, _readable)
    ids = tokens.get("input_ids")
    if ids is None:
        raise RolloutError("must be a mapping with a column 'input_ids' (per-token ids, [L])")
    shape = ids.shape
    # before its dtype: an empty list becomes floats
    if 0 in shape:
        raise RolloutError(": no tokens. Drop empty rollouts before put")
    # the most common mistake: a batch of one row, as tokenizers return it
    if len(shape) != 1 or ids.dtype not in _INTEGERS:
        row = " Use ids[0] of a batch of one, and a rollout for each row of a larger one" if len(shape) == 2 else ""
        raise RolloutError(f": input_ids must be integers [L], not {ids.dtype} {list(shape)}.{row}")
    length = shape[0]
    if length > MAX_ELEMENTS:
        _check_size(shape)
    for name, column in tokens.items():
        # most columns are [L] as the ids are: one comparison in C
        if (its := column.shape) != shape:
            if its[:1] != shape:
                raise RolloutError(
                    f": column {name!r} has shape {list(its)}, but input_ids has {length} tokens. "
                    f"Per-token columns are [L, ...]; put anything else into tensors= or scalars="
                )
            _check_size(its)
    if len(tokens) > MAX_COLUMNS:
        raise RolloutError(f": {len(tokens)} token columns; at most {MAX_COLUMNS} can travel. Stack some into [L, n]")
    attended = tokens.get("attention_mask")
    if attended is not None and attended.ndim == 1 and not attended.all():
        raise RolloutError(
            ": attention_mask has zeros: padding is no part of a rollout, and would be trained on. Put the tokens "
            "without it: tokens={name: column[attention_mask.bool()] for name, column in tokens.items()}"
        )
    return tokens, length


def num_nonzero(mask: Tensor, first: int = 0) -> int:
    """Non-zero numbers of a ``loss_mask`` ``[n]``, from one of them on."""
    if mask.ndim != 1:
        raise RolloutError(f": loss_mask must be [L], not {list(mask.shape)}")
    try:
        return int(np.count_nonzero(mask.numpy()[first:]))  # half of the time that torch takes
    except (TypeError, RuntimeError):  # on an accelerator, or of a kind that numpy does not know
        if mask.dtype in _FLOAT8:  # torch cannot count them
            raise RolloutError(f": loss_mask has dtype {mask.dtype}; make it bool") from None
        return int(torch.count_nonzero(mask[first:]))


def plain_number(value: object) -> float | int:
    """A number: an int of 64 bits, a float or a bool. Takes arrays and tensors of one element."""
    if type(value) is float and value == value:
        return value
    plain = _number(value)
    if plain != plain:
        raise RolloutError("is NaN, and so would be the loss of its step. Drop the rollout, or leave the scalar out")
    return plain


def plain_cost(value: object) -> float:
    """A finite number >= 0 whose sums are finite, too."""
    # FLOPs of a long rollout may be an int beyond 64 bits
    plain = value if isinstance(value, int) else _number(value)
    if not 0 <= plain <= MAX_COST:  # not NaN either
        raise RolloutError(f"must be a finite number >= 0 and at most {MAX_COST:g}, not {_short(value)}")
    return float(plain)


def _number(value: object) -> float | int:
    if isinstance(value, (Tensor, np.ndarray)):
        if math.prod(value.shape) != 1:
            raise RolloutError(f"must be one number, not shape {list(value.shape)}; use tensors= for arrays")
        try:
            value = value.item()
        except (RuntimeError, NotImplementedError) as error:  # on the meta device, say
            raise RolloutError(f"must be one number, but it cannot be read: {error}") from None
    plain = _plain_scalar(value) if isinstance(value, (int, float, np.generic)) else None
    if not isinstance(plain, (int, float)):
        raise RolloutError(f"must be a number, not {type(value).__name__}")
    return plain


def plain_metadata(value: object) -> dict[str, Any]:
    """A copy made of exact str, int, float, bool, None, bytes, list and dict only: what msgpack gives back the same.
    Tuples become lists. O(size)."""
    return by_name(value, partial(_plain_value, depth=1), _metadata_key)


def _metadata_key(key: object) -> str:
    if not isinstance(key, str):
        raise RolloutError(f"is a {type(key).__name__}; keys must be str")
    return _plain_text(key)


def _plain_value(value: object, depth: int) -> object:
    if type(value) in _AS_THEY_ARE:
        return value
    if not isinstance(value, (Mapping, list, tuple)):
        return _plain_scalar(value)
    # also the end of what contains itself
    if depth == MAX_DEPTH:
        raise RolloutError(f"is nested more than {MAX_DEPTH} deep, or contains itself")
    deeper = partial(_plain_value, depth=depth + 1)
    if isinstance(value, Mapping):
        return by_name(value, deeper, _metadata_key)
    found = []
    for index, item in enumerate(value):
        try:
            found.append(deeper(item))
        except RolloutError as error:
            raise RolloutError(join(f"[{index}]", error)) from None
    return found


def _plain_scalar(value: object) -> str | int | float | bool | bytes:
    """Numpy scalars and subclasses of Python's become the plain value; what is neither is refused."""
    if isinstance(value, np.generic) and value.dtype.kind in "biufUS":  # not a datetime64, whose item() may be an int
        value = value.item()
    # before int, of which bool is a subclass
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        # an IntEnum, say, becomes the number that msgpack would give back
        value = int.__int__(value)
        if not -(2**63) <= value < 2**63:
            raise RolloutError(f"{_short(value)} does not fit into 64 bits")
        return value
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return _plain_text(value)
    if isinstance(value, bytes):
        if len(value) > MAX_TEXT_BYTES:
            raise RolloutError(f"is {len(value)} bytes long; at most {MAX_TEXT_BYTES} can travel. Use tensors=")
        return bytes(memoryview(value))
    raise RolloutError(
        f"is a {type(value).__name__}; metadata is JSON-like (str, int, float, bool, None, bytes, list, dict). "
        "Tensors go into tensors="
    )


def _plain_text(value: str) -> str:
    if len(value) > MAX_TEXT_BYTES // 4:  # a character takes at most 4 bytes
        raise RolloutError(f"is {len(value)} characters long; at most {MAX_TEXT_BYTES // 4} can travel. Use tensors=")
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError:
        raise RolloutError(f"{_short(value)} cannot be written as UTF-8") from None
    return value if type(value) is str else str.__str__(value)


def plain_version(value: object) -> Version:
    """An int, or (oldest, newest)."""
    if type(value) is int and -MAX_VERSION <= value < MAX_VERSION:
        return value
    if not isinstance(value, tuple):
        return plain_policy_version(value)
    if len(value) == 2 and (pair := (plain_policy_version(value[0]), plain_policy_version(value[1])))[0] <= pair[1]:
        return pair
    raise RolloutError(f"must be an int or (oldest, newest), not {_short(value)}")


def plain_policy_version(value: object) -> int:
    """A version: an int with room to add and subtract in 64 bits."""
    plain = _plain_int(value)
    if not -MAX_VERSION <= plain < MAX_VERSION:
        raise RolloutError(f"must be an int from -2**62 to 2**62, not {_short(value)}")
    return plain


def _plain_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise RolloutError(f"must be an int, not {_short(value)}")
    return int(value)


def version_of(versions: Tensor) -> Version | None:
    """Version of a rollout by its column ``[L]`` of policy versions per token: one version, or (oldest, newest).
    Negative ones are of tokens that no policy sampled; None if all are. O(L)."""
    if versions.ndim != 1 or versions.dtype not in _INTEGERS:
        raise RolloutError(f"must be integers [L], not {versions.dtype} {list(versions.shape)}")
    # every rollout comes here, and numpy answers sooner than torch
    array = (versions if versions.is_cpu else versions.cpu()).numpy()
    oldest, newest = array.item(array.argmin()), array.item(array.argmax())
    if newest < 0:
        return None
    # -1 marks tokens of a prompt or a tool, in most trainers
    if oldest < 0:
        oldest = int(np.where(array < 0, newest, array).min())
    return plain_version(oldest if oldest == newest else (oldest, newest))


def _short(value: object) -> str:
    """For a message."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - an int of 10,000 digits has no repr, and a class may do anything
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else text[:97] + "..."


def join(what: str, error: RolloutError) -> str:
    """The name of a field and what is wrong with it: a path into it, or words."""
    text = str(error)
    return f"{what}{text}" if not what or text.startswith(("[", ":")) else f"{what} {text}"

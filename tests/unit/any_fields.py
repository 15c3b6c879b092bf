"""Fields a user might give a Rollout, good and bad, and what became of a rollout on every way it can go."""

from __future__ import annotations

import enum
import math
import struct
from typing import Any

import torch
from codec_help import carried, put
from cores import saved
from hypothesis import strategies as st
from invariants import verify
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.host.records import HeldRollout, Records, write_row
from stream_balancer.rollouts import Rollout


class Text(str):
    """A str, and yet not exactly one."""

    __slots__ = ()

    def __str__(self) -> str:
        return "something else"


Number, Whole, Raw = type("Number", (float,), {}), type("Whole", (int,), {}), type("Raw", (bytes,), {})
"""A float, an int, bytes, and yet not exactly."""


class Colour(str, enum.Enum):  # noqa: UP042 - what people have
    """What configurations are made of."""

    RED = "red"


class Level(enum.IntEnum):
    """The same in numbers."""

    LOW = 1


def fake_tensor() -> Tensor:
    """Shape and dtype, and nothing else."""
    with FakeTensorMode():
        return torch.zeros(3)


def freed_tensor() -> Tensor:
    """As sharded training leaves its parameters."""
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def deep(levels: int) -> dict[str, Any]:
    """So many dicts in each other."""
    found: dict[str, Any] = {}
    for _ in range(levels - 1):
        found = {"a": found}
    return found


def looped() -> dict[str, Any]:
    """A dict that contains itself."""
    found: dict[str, Any] = {}
    found["self"] = [found]
    return found


dtypes = st.sampled_from(
    [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
     torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint16]
)  # fmt: skip
names = st.text(min_size=1, max_size=8)
numbers = st.one_of(st.floats(), st.integers(), st.booleans())
leaves = st.one_of(st.none(), numbers, st.text(max_size=8), st.binary(max_size=8))
trees = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(names, inner), max_leaves=8)


@st.composite
def tensors(draw: st.DrawFn, *lead: int) -> Tensor:
    """A tensor of every bit pattern, or a part of one: ``[*lead, ...]``."""
    shape, dtype = (*lead, *draw(st.lists(st.integers(0, 2), max_size=2))), draw(dtypes)
    count = math.prod(shape) * dtype.itemsize
    raw = torch.arange(2 * count + 64, dtype=torch.int64).mul_(37).to(torch.uint8)[: 2 * count]
    if dtype is torch.bool:
        raw &= 1
    whole = raw.clone().view(dtype).view(*shape, 2) if count else torch.empty((*shape, 2), dtype=dtype)
    return whole[..., 0] if draw(st.booleans()) else whole[..., 0].contiguous()


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a Rollout: most of them are accepted."""
    length = draw(st.integers(1, 5))
    columns = draw(st.dictionaries(names, tensors(length), max_size=2))
    versions = st.integers(-3, 2**62)
    optional = {
        "scalars": st.dictionaries(names, numbers, max_size=2),
        "tensors": st.dictionaries(names, tensors(), max_size=2),
        "metadata": st.dictionaries(names, trees, max_size=3),
        "rollout_id": names,
        "version": versions | st.tuples(versions, versions),
        "cost": st.floats(min_value=0),
    }
    found = {name: draw(optional[name]) for name in draw(st.sets(st.sampled_from(sorted(optional)), max_size=3))}
    return {"tokens": {"input_ids": torch.arange(length) * 2**33, **columns}, "group_id": "g", **found}


# --- the ways a rollout can go ---------------------------------------------------------------------------------------


def bits(value: Any) -> Any:
    """Something that is equal only if the values are, types and NaNs included."""
    if isinstance(value, dict):
        return dict, [(key, bits(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [bits(item) for item in value]
    if isinstance(value, Tensor):
        raw = value.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()
        return value.dtype, tuple(value.shape), raw
    return type(value), struct.pack("d", value) if isinstance(value, float) else value


def all_of(rollout: Rollout) -> Any:
    """Every public field."""
    return {
        "tokens": bits(dict(rollout.tokens)),
        "tensors": bits(dict(rollout.tensors)),
        "scalars": bits(dict(rollout.scalars)),
        "metadata": bits(dict(rollout.metadata)),
        "rest": bits(
            [
                rollout.rollout_id, rollout.group_id, rollout.version, rollout.cost, rollout.is_padding,
                rollout.num_tokens, rollout.num_loss_tokens,
            ]
        ),
    }  # fmt: skip


def delivered(rollout: Rollout) -> Rollout:
    """Put, planned, sent to a rank and read there."""
    core = BalancerCore(sb.BalancerConfig(dp_size=1, batch_size=1))
    core.add(rollout, 0.0)
    core.end()
    batch = core.poll(0.0)
    assert batch is not None
    verify(core)
    return carried(*batch.ranks[0].micro_batches).rollouts[0]


def put_elsewhere(rollout: Rollout) -> Rollout:
    """Put over a producer's connection."""
    (found,) = put(rollout)
    return found


def checkpointed(rollout: Rollout) -> Rollout:
    """Saved by torch and loaded."""
    core = BalancerCore(sb.BalancerConfig(dp_size=1, batch_size=2))
    core.add(rollout, 0.0)
    snapshot = saved(core)
    assert not snapshot.set_aside
    restored = BalancerCore(sb.BalancerConfig(dp_size=1, batch_size=2))
    restored.restore(snapshot, 0.0)
    (found,) = restored.snapshot(0.0).waiting
    return found


def journalled(rollout: Rollout) -> Rollout:
    """Written as a row of a journal, and read from it."""
    records = Records()
    records.take("row 7", bytes(write_row("row 7", [HeldRollout(rollout, 0.0, 0)])))
    assert not records.damage
    return records.held[rollout.rollout_id].rollout


WAYS = (delivered, put_elsewhere, checkpointed, journalled)

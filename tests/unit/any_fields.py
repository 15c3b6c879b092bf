"""Fields a user might give a Rollout, good and bad, and what became of a rollout on every way it can go."""

from __future__ import annotations

import enum
import struct
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
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


names = st.one_of(
    st.sampled_from(["a", "reward", "loss_mask", "x" * 512]),
    st.text(min_size=1, max_size=20),
    st.sampled_from([np.str_("n"), Text("t"), Colour.RED, "", "x" * 513, "\ud800", "a\0b", b"b", 7, None, ("t",)]),
)
ints = st.one_of(
    st.integers(), st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**62, -(2**62), 2**64, 10**400])
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    ints,
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.sampled_from(
        [
            np.float64(0.5), np.float32(0.5), np.float16(0.5), np.longdouble(0.5), np.int8(3), np.uint64(2**63),
            np.bool_(True), np.str_("n"), np.bytes_(b"n"), np.datetime64(3, "ns"), np.timedelta64(3, "ns"),
            np.complex64(1), Text("t"), Number(1.5), Number("nan"), Whole(3), Whole(2**70), Raw(b"r"), Colour.RED,
            Level.LOW, "\ud800", bytearray(b"x"), memoryview(b"x"), {1, 2}, 1j, object(), np.zeros(2),
            torch.zeros(2), range(3),
        ]
    ),
)  # fmt: skip
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(names, inner, max_size=3),
        st.dictionaries(names, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)
metadata = st.one_of(
    st.just({}),
    st.dictionaries(st.text(max_size=4), trees, max_size=3),
    st.dictionaries(names, trees, max_size=3).map(MappingProxyType),
    st.sampled_from([None, [], "abc", [("a", 1)], 7]),
    st.integers(1, 130).map(deep),
    st.builds(looped),
)
dtypes = st.sampled_from(
    [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
     torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint16]
)  # fmt: skip


def plain(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Something of every bit pattern in it."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.arange(count + 64, dtype=torch.int64).mul_(37).to(torch.uint8)[:count]
    if dtype is torch.bool:
        raw &= 1
    return raw.clone().view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


@st.composite
def tensors(draw: st.DrawFn, length: int | None = None) -> Any:
    """A column of this length, or any tensor: of every kind there is."""
    trailing = tuple(draw(st.lists(st.integers(0, 2), max_size=2)))
    shape = trailing if length is None else (length, *trailing)
    dtype = draw(dtypes)
    kind = draw(st.integers(0, 14))
    if kind < 4:
        return plain(shape, dtype)
    lead = shape or (1,)
    return {
        4: lambda: torch.zeros(1).expand(lead) if all(lead) else torch.zeros(lead),
        5: lambda: torch.ones(lead, requires_grad=True) * 2,
        6: lambda: torch.nn.Parameter(torch.ones(lead)),
        7: lambda: torch.imag(torch.ones(lead, dtype=torch.complex64).conj()),
        8: lambda: torch.zeros(lead, device="meta"),
        9: lambda: torch.zeros(lead).to_sparse(),
        10: lambda: torch.zeros((*lead, *(1,) * 40)[:40]),
        11: lambda: plain((*lead, 2), torch.int64)[..., ::2],
        12: lambda: draw(st.sampled_from([None, "abc", [1, "a"], [[1], [1, 2]], 10**30, {"a": 1}, [1.5] * lead[0]])),
        13: lambda: np.arange(lead[0])[::-1] if draw(st.booleans()) else np.ones(lead, dtype=np.float32),
        14: lambda: draw(st.sampled_from([fake_tensor, freed_tensor]))(),
    }[kind]()


numbers = st.one_of(st.floats(), ints, st.booleans(), leaves, tensors())
costs = st.one_of(
    st.none(),
    st.floats(min_value=0),
    st.sampled_from([0, 1, True, np.float32(2), np.int64(3), 1e100, 1e101, 1e308, -1, 10**400, "x", 5e-324]),
)
some_versions = st.one_of(st.integers(-3, 3), ints, st.sampled_from([True, np.int64(3), Level.LOW, 1.0, "1", None]))
versions = st.one_of(
    some_versions,
    st.tuples(some_versions, some_versions),
    st.sampled_from([(), (1,), (1, 2, 3), [1, 2], (2, 1), (1, None)]),
)


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    """What a Rollout is made of. Most fields are in order most of the time, so that many of them come through."""
    length = draw(st.integers(1, 5))
    tokens: dict[Any, Any] = {"input_ids": torch.arange(length) * 2**33}
    for name in draw(st.lists(names, max_size=2)):
        tokens[name] = draw(tensors(length))
    found: dict[str, Any] = {"tokens": tokens}
    options = {
        "scalars": st.one_of(st.dictionaries(names, numbers, max_size=2), st.sampled_from([None, [], "x"])),
        "tensors": st.one_of(st.dictionaries(names, tensors(), max_size=2), st.sampled_from([None, "x"])),
        "metadata": metadata,
        "rollout_id": st.one_of(st.text(min_size=1), names, st.just("padding-0-1-0")),
        "group_id": st.one_of(st.none(), names),
        "version": versions,
        "cost": costs,
        "is_padding": st.sampled_from([False, np.bool_(False), 0, None]),
    }
    for name in draw(st.sets(st.sampled_from(sorted(options)), max_size=3)):
        found[name] = draw(options[name])
    return found


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

"""Messages and hostile bytes: all comes back as it was; else a clear error, never a crash or a huge allocation."""

from __future__ import annotations

import pickle
import random
import zlib
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import pytest
from codec_help import A, B, received, remote, rollout

from stream_balancer.errors import (
    AlreadyInUseError,
    BrokenResourceError,
    RefusalReason,
    RefusedError,
    RolloutError,
    WireError,
    refused_error,
    to_raise,
)
from stream_balancer.net import messages as m
from stream_balancer.net.errors import ConnectionEnd
from stream_balancer.rollouts import SUPPORTED_DTYPES, MicroBatch, Rollout
from stream_balancer.wire import codec
from stream_balancer.wire.codec import Decoded, Encoded
from stream_balancer.wire.header import lay_out, read_header
from stream_balancer.wire.payload import Memory, reader

KINDS: list[type[m.Message]] = list(get_args(m.AnyMessage))
SPECIAL: dict[str, Any] = {
    "load": 1.5,
    "sizes": m.Denominators(1, 2, 3, 4),
    "mini_batches": (m.MiniBatchSize(1, 0.5, 2, 3, 4, 5),),
    "reason": "value",
    "movers": ("shared_memory",),
    "body": b"note",
}


def example_of(kind: type[m.Message]) -> m.Message:
    """One with every field set to something that is not its default."""
    by_type: dict[object, Any] = {
        m.Text: "why", m.Name: "name", m.Small: b"small", m.Texts: ("r1", "r2"), m.Counts: (1, 2, 3),
        m.Count: 7, msgspec.Raw: msgspec.Raw(b"\x91\x01"), bool: True, int: 7, int | None: 7,
    }  # fmt: skip
    values: dict[str, Any] = {}
    for name, type_ in get_type_hints(kind, include_extras=True).items():
        known = "why" if kind is m.Close else SPECIAL.get(name)
        values[name] = by_type[type_] if known is None else known
    return kind(**values)


def read(body: bytes) -> m.Envelope:
    return m.read_envelope(body, zlib.crc32(body))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_message_comes_back_as_it_was(kind: type[m.Message]) -> None:
    message = example_of(kind)
    raw = m.frame(message, 128, (0, 64), 2, (9, 8))
    size, crc = m.read_header(raw[: m.HEADER_BYTES])
    assert size == len(raw) - m.HEADER_BYTES
    assert m.read_envelope(raw[m.HEADER_BYTES :], crc) == m.Envelope(message, 128, (0, 64), 2, (9, 8))


def test_tags_are_distinct() -> None:
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert len(set(tags)) == len(tags)
    assert set(KINDS) == set(m.Message.__subclasses__())


@pytest.mark.parametrize(
    "message",
    [
        [99],  # no such tag
        [21],  # a field is missing
        [21, 1, 2],  # one too many
        [21, -1],  # below zero
        [21, 2**62],
        [21, 1.5],
        [6, "x" * 65_537],
        [5, "no such reason", ""],
        [10, 0, 0, list(range(m.MAX_ENTRIES + 1)), 0, True, 0.0, [1, 2, 3, 4]],
        [10, 0, 0, [-1], 0, True, 0.0, [1, 2, 3, 4]],
        [10, 0, 0, [0], 0, True, 0.0, [1, 2, 3]],
        [10, 0, 0, [0], 0, True, 0.0, [1, 2, 3, 4], [[1, 0.5]]],
        [12, 0, 0, ["x" * 65_537]],
        [12, 0, 0, [b"bytes"]],
        [17, 0, 0, 1],
    ],
    ids=lambda message: str(message)[:40],
)
def test_what_this_version_would_not_send_is_refused(message: list[object]) -> None:
    with pytest.raises(WireError, match="cannot be read"):
        read(msgspec.msgpack.encode([message]))


ABOUT = m.About(
    rank=1, dp_size=2, incarnation=3, depth=4, seat=5, seats=6, max_batch_bytes=7, weights=(8, 9), acked=6,
    holds={8: (10, 3), 9: (11, 0)}, is_start=False,
)  # fmt: skip
ADMITTED = m.Admitted(incarnation=1, term=2**60, has_barrier=True)


@pytest.mark.parametrize("about", [ABOUT, ADMITTED], ids=lambda about: type(about).__name__)
def test_what_is_said_at_a_join_comes_back_as_it_was(about: msgspec.Struct) -> None:
    assert reader(type(about), "it")(msgspec.msgpack.encode(about)) == about


@pytest.mark.parametrize(
    "change",
    [
        {"holds": {0: (1, 6)}},
        {"holds": {0: (-1, 3)}},
        {"holds": {0: (1,)}},
        {"holds": {"x": (1, 3)}},
        {"weights": (-1, 0)},
        {"weights": (2**62, 0)},
        {"weights": (1,)},
        {"acked": -2},
        {"depth": 0},
        {"seats": 4097},
        {"rank": -1},
        {"more": 1},
    ],
    ids=str,
)
def test_what_no_rank_says_of_itself_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="cannot be read"):
        reader(m.About, "it")(msgspec.msgpack.encode(msgspec.structs.asdict(ABOUT) | change))


def test_a_refusal_is_raised_where_it_is_read() -> None:
    for reason in get_args(RefusalReason):
        raised = ConnectionEnd("refused", "why", reason).to_raise()
        assert isinstance(raised, RefusedError)
        assert str(raised) == "why"
        again = pickle.loads(pickle.dumps(raised))  # noqa: S301 - as Ray brings it to another process
        assert (again.reason, type(again)) == (reason, type(raised))
        assert vars(to_raise(again)) == {"reason": reason}
    assert isinstance(refused_error("busy", ""), AlreadyInUseError)
    assert isinstance(refused_error("closed", ""), BrokenResourceError)
    for mine in ("authentication", "protocol", "value"):
        assert isinstance(refused_error(mine, ""), ValueError)


def some(**fields: Any) -> list[Rollout]:
    return [
        rollout(n, scalars={"advantage": 0.5, "count": n}, metadata={"deep": [1, {"a": b"\x00"}]},
                version=(1, 2) if n else 7, group_id="g" if n else None, **fields)
        for n in range(4)
    ]  # fmt: skip


def work() -> Encoded:
    own = some()
    away = [remote(one, A, n) for n, one in enumerate(own[2:])]
    return codec.encode([MicroBatch.of([*own[:2], away[0]]), MicroBatch.of([away[1]])])


def a_put() -> Encoded:
    return codec.encode_rollouts(some())


def a_kept_put() -> Encoded:
    return codec.encode_rollouts(some()[:2], handles=[codec.Handle(A, 3), codec.Handle(B, 4)])


def train_on(header: bytes, memory: Memory | None) -> None:
    """Whatever was accepted must be usable, and must lie inside its memory (torch would raise RuntimeError)."""
    got = codec.decode(header, memory)
    for one in got.holes():
        for place in one.places:
            place[:] = bytes(len(place))
    use(got)
    got.mask([got.ids[0]])
    use(got)


def use(got: Decoded) -> None:
    for micro_batch in got.micro_batches:
        packed = micro_batch.packed()
        assert int(packed.cu_seqlens[-1]) == micro_batch.num_tokens
        for name, column in packed.columns.items():
            assert column.shape[0] == micro_batch.num_tokens
            assert packed.next(name).shape == column.shape
        assert packed.position_ids.shape[0] == micro_batch.num_tokens
        for one in micro_batch.rollouts:
            assert 0 <= one.num_loss_tokens <= one.num_tokens
            for tensor in (*one.tokens.values(), *one.tensors.values()):
                tensor.clone()


def take_put(header: bytes, memory: Memory | None) -> None:
    for one in codec.decode_rollouts(header, memory, lambda _: codec.Leases()):
        for tensor in (*one.tokens.values(), *one.tensors.values()):
            tensor.clone()


Target = tuple[Callable[[], Encoded], Callable[[bytes, "Memory | None"], None]]
TARGETS: list[Target] = [
    (work, train_on), (a_put, take_put), (a_kept_put, take_put),
]  # fmt: skip

_ODD: list[Any] = [
    0, 1, -1, 2, 3, 7, 63, 64, 2**20, 2**31, 2**32 - 1, 2**48, 2**62, 2**63 - 1, -(2**63), None, "", "x", b"", [], {},
    True, 0.5, float("nan"), float("inf"), [0], [[]], {"a": 1}, "input_ids", [2**62, 0], [2**40, 2**40], [2**48],
]  # fmt: skip


def _mutate(tree: Any, chance: random.Random) -> Any:
    """Replace, drop or double one node somewhere in decoded msgpack."""
    if isinstance(tree, list) and tree and chance.random() < 0.85:
        place = chance.randrange(len(tree))
        tree = list(tree)
        action = chance.random()
        if action < 0.8:
            tree[place] = _mutate(tree[place], chance)
        elif action < 0.9:
            del tree[place]
        else:
            tree.append(tree[place])
        return tree
    return chance.choice(_ODD)


def _other_tree(header: bytes, chance: random.Random) -> bytes:
    tree = msgspec.msgpack.decode(header)
    for _ in range(chance.choice([1, 1, 2])):
        tree = _mutate(tree, chance)
    return msgspec.msgpack.encode(tree)


def _flipped(header: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(header)
    for _ in range(chance.randint(1, 4)):
        damaged[chance.randrange(len(header))] = chance.randrange(256)
    return bytes(damaged)


def _cut(header: bytes, chance: random.Random) -> bytes:
    return header[: chance.randrange(len(header) + 1)]


def _attack(cases: int, seed: int) -> tuple[int, int]:
    chance = random.Random(seed)
    targets = [(encoded := make(), received(encoded), take) for make, take in TARGETS]
    for encoded, memory, take in targets:
        take(bytes(encoded.header), memory)
    refused = accepted = 0
    for _ in range(cases):
        encoded, memory, take = chance.choice(targets)
        header = chance.choice([_other_tree, _other_tree, _flipped, _cut])(bytes(encoded.header), chance)
        if chance.random() < 0.1:
            memory = np.zeros(64 * chance.randrange(40), dtype=np.uint8) if chance.random() < 0.9 else None
        elif memory is not None:
            memory = memory.copy()
        try:
            take(header, memory)
        except (WireError, RolloutError):
            refused += 1
        else:
            accepted += 1
    return refused, accepted


@pytest.mark.parametrize("cases", [2_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_hostile_headers_are_refused_or_harmless(cases: int) -> None:
    refused, accepted = _attack(cases, seed=0)
    # the rest changed a value that any sender may choose
    assert refused > accepted


@pytest.mark.parametrize("depth", [100, 100_000])
def test_deep_nesting_is_no_way_in(depth: int) -> None:
    for read in (train_on, take_put):
        with pytest.raises(WireError, match="cannot be read"):
            read(b"\x91" * depth, np.zeros(64, dtype=np.uint8))
    fields = msgspec.msgpack.decode(a_put().header)
    header = msgspec.msgpack.encode([*fields[:9], msgspec.Raw(b"\x91" * depth + b"\xc0"), *fields[10:]])
    with pytest.raises(WireError, match="cannot be read"):
        take_put(header, received(a_put()))


def _changed(encoded: Encoded, **changes: Any) -> bytes:
    from stream_balancer.wire.header import Header

    header = msgspec.msgpack.decode(encoded.header, type=Header)
    for name, value in changes.items():
        setattr(header, name, value)
    return msgspec.msgpack.encode(header)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"blocks": [3]}, "hold all 4"),
        ({"blocks": [2, 2, 1]}, "hold all 4"),
        ({"blocks": []}, "cannot be read"),
        ({"lengths": [3, 5, 7]}, "different lengths"),
        ({"lengths": [3, 5, 7, 0]}, "cannot be read"),
        ({"lengths": [3, 5, 7, 11]}, "bytes"),
        ({"lengths": [3, 5, 7, 2**48]}, "more than"),
        ({"loss_tokens": [4, 0, 0, 0]}, "impossible number of loss tokens"),
        ({"padding": [0]}, "padding copies"),
        ({"padding": [4], "loss_tokens": [0] * 4}, "padding copies"),
        ({"padding": [1, 0], "loss_tokens": [0] * 4}, "padding copies"),
        ({"scalars": [{"hidden": 1}] * 4}, "both a column and a scalar"),
        ({"execution_sizes": [(0, 1)] * 4}, "cannot be read"),
        ({"execution_sizes": [(1, 1)] * 3}, "different lengths"),
        ({"holes": [(0, 0, 3)]}, "not named"),
        ({"holes": [(4, 0, 3)], "owners": [A]}, "does not come along"),
        ({"holes": [(1, 0, 3), (0, 0, 3)], "owners": [A]}, "does not come along"),
        ({"columns": []}, "cannot be read"),
        ({"columns": [("hidden", 0, ())]}, "'input_ids'"),
        ({"columns": [("input_ids", 0, ())]}, "integers"),
        ({"columns": [("input_ids", 5, (2,))]}, "one number per token"),
        ({"columns": [("input_ids", 5, ()), ("input_ids", 5, ())]}, "occurs twice"),
        ({"columns": [("input_ids", 99, ())]}, "cannot be read"),
        ({"columns": [("input_ids", 5, ()), ("loss_mask", len(SUPPORTED_DTYPES) - 1, ())]}, "loss_mask has dtype"),
        ({"columns": [("input_ids", 5, ()), ("x", 5, (0, 2**40, 2**40))]}, "impossible shape"),
        ({"columns": [("input_ids", 5, ()), ("x", 5, (1,) * 99)]}, "cannot be read"),
        ({"tensors": [[("a", 0, ()), ("a", 0, ())], [], [], []]}, "two tensors"),
        ({"ids": ["a"]}, "different lengths"),
        ({"ids": [1, 2, 3, 4]}, "cannot be read"),
        ({"version": [1]}, "different lengths"),
        ({"metadata": [[]] * 4}, "cannot be read"),
    ],
)  # fmt: skip
def test_impossible_headers_are_refused(changes: dict[str, Any], says: str) -> None:
    encoded = codec.encode([MicroBatch.of(some())])
    with pytest.raises(WireError, match=says):
        codec.decode(_changed(encoded, **changes), received(encoded))


def test_no_byte_more_than_is_allowed_is_laid_out() -> None:
    header = read_header(a_put().header)
    total = lay_out(header, 2**40).total_bytes
    assert lay_out(header, total).total_bytes == total
    with pytest.raises(WireError, match=f"more than {total - 1} bytes would be needed"):
        lay_out(header, total - 1)

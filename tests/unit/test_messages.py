"""Messages: every one comes back as it was, and nothing else is understood."""

from __future__ import annotations

import pickle
import zlib
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from stream_balancer.errors import (
    AlreadyInUseError,
    BrokenResourceError,
    RefusalReason,
    RefusedError,
    WireError,
    refused_error,
    to_raise,
)
from stream_balancer.net import messages as m
from stream_balancer.net.errors import ConnectionEnd

KINDS: list[type[m.Message]] = list(get_args(m.AnyMessage))
SIZES = m.Sizes(1, 2, 3, 4)
SPECIAL: dict[str, Any] = {
    "items": (m.WorkItem(5, 6, remote=True), m.WorkItem(7)),
    "head": m.StepHead(8, 1.5, True, (m.MiniBatchHead(1, 0.5, 2, 3, 4, 5),), 3, True),
    "sizes": SIZES,
    "mini_batches": (SIZES, SIZES),
    "resized": (m.ResizedExecution("g", "e", 2, 30), m.ResizedExecution(None, "e", 2, 30)),
    "reason": "value",
}


def example_of(kind: type[m.Message]) -> m.Message:
    """One with every field set to something that is not its default."""
    by_type: dict[object, Any] = {
        m.Text: "why", m.Name: "name", m.Small: b"small", m.Texts: ("r1", "r2"), m.Counts: (1, 2, 3),
        m.Count: 7, msgspec.Raw: msgspec.Raw(b"\x91\x01"), bool: True, int: 7, int | None: 7,
    }  # fmt: skip
    values: dict[str, Any] = {}
    for name, type_ in get_type_hints(kind, include_extras=True).items():
        known = SPECIAL.get(name)
        if kind in (m.Go, m.Recall, m.Report) and name == "items":
            known = (1, 2, 3)
        elif kind is m.Close or name == "movers" or name == "body":
            known = {"reason": "why", "movers": ("shared_memory",), "body": b"note"}[name]
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
        [11, 0, 0, list(range(m.MAX_ENTRIES + 1)), 1],
        [10, 0, 0, 0, [[-1]]],
        [15, 0, [1], [b"bytes"]],
    ],
)
def test_what_this_version_would_not_send_is_refused(message: list[object]) -> None:
    with pytest.raises(WireError, match="cannot be read"):
        read(msgspec.msgpack.encode([message]))


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

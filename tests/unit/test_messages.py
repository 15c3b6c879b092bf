"""Messages: every type comes back as it was, and nothing else is understood."""

from __future__ import annotations

import contextlib
import pickle
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_balancer.errors import (
    AlreadyInUseError,
    BrokenResourceError,
    RefusalReason,
    RefusedError,
    WireError,
    refused_error,
    to_raise,
)
from stream_balancer.wire import messages as m

CHANNEL_MESSAGES = [kind for kind in (*get_args(m.Control), *get_args(m.Conversation)) if kind is not m.Refused]
HEADER = m.RolloutHeader(10, 2**32 - 1, 20_000, 20_000, payload=3)


def example_of(kind: type[m.Message]) -> m.Message:
    """One message with every field set to something that is not its default."""
    special = {"rollouts": (HEADER, HEADER), "missing": (m.MissingRollout(1, "r1", "worker 3", "it is gone"),)}
    values = []
    for field in msgspec.structs.fields(kind):
        if kind is m.PutRefused and field.name == "reason":
            values.append("full")
        elif field.name in special and kind not in (m.Payloads, m.Denominators, m.PutBundle):
            values.append(special[field.name])
        elif field.name == "resized":
            values.append((m.ResizedExecution("g", "e", 2, 30),))
        elif field.name == "mini_batches":
            values.append((m.MiniBatchDenominators(1, 20, 10, 1),))
        elif kind is m.StepColumns and field.name == "columns":
            values.append((m.LateColumn("ref_logprobs", 9), m.LateColumn("values", 10)))
        elif field.name == "fate":
            values.append("closed")
        elif field.name == "gone":
            values.append(("r1", "r2"))
        elif kind is m.WantPayloads and field.name == "parts":
            values.append(((2, 1), (1, 0)))
        elif field.name in ("reason", "text", "group_id", "problem"):
            values.append("why")
        elif field.name in ("numbers", "keys", "missing", "ranks"):
            values.append((1, 2, 3))
        elif kind is m.PutBundle and field.name == "puts":
            values.append((m.BundledPut(7, 2, group=True, wait=False),))
        elif field.name == "rollout" or kind is m.PutBundle:
            values.append(HEADER)
        elif field.name in ("nonce", "values"):
            values.append(field.name.encode())
        elif field.name in ("ok", "wait", "complete"):
            values.append(not field.default)
        elif field.name in ("seconds", "compute_s", "waited_s"):
            values.append(0.25)
        else:
            values.append(7)
    return kind(*values)


@pytest.mark.parametrize("kind", CHANNEL_MESSAGES, ids=lambda kind: kind.__name__)
def test_a_message_comes_back_as_it_was(kind: type[m.Message]) -> None:
    message = example_of(kind)
    assert m.decode_message(m.encode_message(message, (64, 0))) == ((64, 0), message)


def test_tags_are_distinct() -> None:
    pair = [m.PairAddress, m.PairReady]
    every = [*CHANNEL_MESSAGES, *get_args(m.Join), *get_args(m.Welcome), m.Hello, m.Challenge, m.Refused, *pair]
    tags = [kind.__struct_config__.tag for kind in every]
    assert len(set(tags)) == len(tags)


@given(st.binary(max_size=200))
def test_no_bytes_do_harm(raw: bytes) -> None:
    try:
        sizes, message = m.decode_message(raw)
    except WireError:
        return
    assert isinstance(message, m.Message)
    assert all(size >= 0 for size in sizes)


@pytest.mark.parametrize(
    "body",
    [
        ((), [99]),  # no such tag
        ((), [22]),  # a field is missing
        ((), [22, 1, 2]),  # one too many
        ((), [22, -1]),  # below zero
        ((), [22, 1.5]),
        ((), [10, 4, b"n"]),  # a handshake message: its place is before the channel
        ((-1,), [22, 1]),
        (tuple(range(m.MAX_ENTRIES + 1)), [22, 1]),
        ((), [1, "x" * (m.MAX_TEXT + 1)]),
        ((), [44, tuple(range(m.MAX_ENTRIES + 1))]),
        ((), [45, 1, "no such reason", ""]),
        ((), [41, 0, ()]),  # a group of none
        ((), [52, (), [1, 1, 64, 64, None]]),
    ],
)
def test_what_this_version_would_not_send_is_refused(body: object) -> None:
    with pytest.raises(WireError, match="cannot be read"):
        m.decode_message(msgspec.msgpack.encode(body))


@given(st.data())
def test_a_damaged_message_is_a_wire_error_or_a_message(data: st.DataObject) -> None:
    raw = bytearray(m.encode_message(example_of(data.draw(st.sampled_from(CHANNEL_MESSAGES))), (64,)))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(WireError):
        assert isinstance(m.decode_message(bytes(raw))[1], m.Message)


def test_a_refusal_is_raised_where_it_is_read() -> None:
    for reason in get_args(RefusalReason):
        with pytest.raises(RefusedError, match="why") as caught:
            m.decode_message(m.encode_message(m.Refused(reason, "why")))
        again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - as Ray brings it to another process
        assert (again.reason, type(again)) == (reason, type(caught.value))
        assert vars(to_raise(again)) == {"reason": reason}
    assert isinstance(refused_error("busy", ""), AlreadyInUseError)
    assert isinstance(refused_error("closed", ""), BrokenResourceError)
    for mine in ("authentication", "protocol", "value"):
        assert isinstance(refused_error(mine, ""), ValueError)

"""Hostile puts: a clear WireError or a harmless rollout, never another error. The long form is ``pytest -m soak``."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch
from sessions import FakeChannel, outgoing, producer_session, send
from test_wire_hostile import _KINDS

from stream_balancer.errors import RolloutError, WireError
from stream_balancer.testing import make_rollout
from stream_balancer.transport.offers import Offer
from stream_balancer.transport.request_messages import EncodedRequest
from stream_balancer.transport.requests import Mode, Request
from stream_balancer.types import Rollout
from stream_balancer.wire.messages import Batch, Put, PutGroup, RolloutHeader


def _rollout(n: int, group: str | None = None) -> Rollout:
    return Rollout(
        tokens=make_rollout(4 + n, seed=n).tokens,
        scalars={"reward": 0.5},
        tensors={"pixels": torch.ones(2, 3)},
        metadata={"deep": [1, {"a": b"\x00"}]},
        rollout_id=f"r{n}",
        group_id=group,
        version=(1, 2),
    )


PUTS = [
    outgoing(EncodedRequest(Request(Mode.PUT, [_rollout(0)]), lambda: None), 0),
    outgoing(EncodedRequest(Request(Mode.GROUP, [_rollout(n, "g") for n in (1, 2, 3)]), lambda: None), 1),
    outgoing(EncodedRequest(Request(Mode.NOWAIT, [_rollout(4)]), lambda: None), 2),
]


def _use(offer: Offer) -> None:
    if offer.refusal is not None:
        raise RolloutError(offer.refusal)
    for rollout in offer.rollouts:
        assert 0 <= rollout.num_loss_tokens <= rollout.num_tokens
        for tensor in (*rollout.tokens.values(), *rollout.tensors.values()):
            tensor.clone()


def _spoil(
    message: Put | PutGroup, buffers: list[torch.Tensor], chance: random.Random
) -> tuple[Put | PutGroup, list[torch.Tensor]]:
    """One header, and the buffer it belongs to, changed as a batch's frame and buffer are."""
    headers = list((message.rollout,) if isinstance(message, Put) else message.rollouts)
    place = chance.randrange(len(headers))
    header, body = headers[place], buffers[place].numpy().tobytes()
    frame = Batch(
        step=0,
        rank=0,
        dp_size=1,
        meta_bytes=header.meta_bytes,
        wire_bytes=header.wire_bytes,
        total_bytes=header.total_bytes,
        meta_crc=header.meta_crc,
    )
    frame, body = chance.choice(_KINDS)(frame, body, chance)
    total = frame.wire_bytes if chance.random() < 0.9 else frame.total_bytes
    headers[place] = RolloutHeader(frame.meta_bytes, frame.meta_crc, frame.wire_bytes, total)
    buffers = [
        *buffers[:place],
        torch.frombuffer(bytearray(body + b"\0"), dtype=torch.uint8)[:-1],
        *buffers[place + 1 :],
    ]
    if isinstance(message, Put):
        return msgspec.structs.replace(message, rollout=headers[0]), buffers
    return PutGroup(message.number, tuple(headers)), buffers


def _attack(cases: int, seed: int) -> tuple[int, int]:
    chance = random.Random(seed)
    refused = 0
    for _ in range(cases):
        hostile = list(PUTS)
        place = chance.randrange(len(hostile))
        if chance.random() < 0.85:
            hostile[place] = _spoil(*hostile[place], chance)
        elif chance.random() < 0.5:
            del hostile[place]
        else:
            chance.shuffle(hostile)
        session = producer_session(FakeChannel())
        try:
            for message, buffers in hostile:
                send(session, message, buffers)
            while isinstance(offer := session.take(), Offer):
                _use(offer)
        except (WireError, RolloutError):
            refused += 1
    return refused, cases


def test_hostile_puts_are_refused_or_harmless() -> None:
    refused, cases = _attack(3_000, seed=0)
    assert refused > 0.6 * cases


@pytest.mark.soak
def test_fifty_thousand_hostile_puts() -> None:
    for seed in range(5):
        _attack(10_000, seed=seed + 1)


def _spoiled(rollout: Rollout, field: str, value: object) -> Rollout:
    """What a producer with fewer checks would put."""
    object.__setattr__(rollout, field, value)
    return rollout


SPOILED = [
    ("version", 2**63 - 1, "version must be an int from"),
    ("cost", 1e300, "cost must be a finite number"),
    ("cost", float("nan"), "cost must be a finite number"),
    ("rollout_id", "x" * 513, "at most 512"),
    ("rollout_id", "padding-0-0-0", "must not begin with"),
    ("group_id", "", "group_id must be a non-empty str"),
    ("metadata", {"a": {7: 1}}, "keys must be str"),
    ("prefix", 2**40, "prefix must be from 0"),
    ("prefix", -1, "prefix must be from 0"),
    ("metadata", {"a": 2**63}, "64 bits"),
    ("scalars", {"": 1.0}, "scalars: a name in it"),
    ("tokens", {"input_ids": torch.arange(3), "": torch.arange(3)}, "tokens: a name in it"),
]


@pytest.mark.parametrize(("field", "value", "why"), SPOILED)
def test_what_no_rollout_may_be_is_refused_and_the_others_are_put(field: str, value: object, why: str) -> None:
    session = producer_session(FakeChannel())
    for number, rollouts in enumerate(
        (
            [_rollout(0)],
            [_spoiled(_rollout(1), field, value)],
            [_rollout(2, "g"), _spoiled(_rollout(3, "g"), field, value), _rollout(4, "g")],
            [_rollout(5)],
        )
    ):
        mode = Mode.PUT if len(rollouts) == 1 else Mode.GROUP
        send(session, *outgoing(EncodedRequest(Request(mode, rollouts), lambda: None), number))
    offers = [session.take() for _ in range(4)]
    assert [offer.number for offer in offers if offer] == [0, 1, 2, 3]
    assert [offer.refusal is None for offer in offers if isinstance(offer, Offer)] == [True, False, False, True]
    for offer in offers[1:3]:
        assert isinstance(offer, Offer)
        assert why in str(offer.refusal)

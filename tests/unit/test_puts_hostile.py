"""Hostile puts: a clear WireError or a harmless rollout, never another error. The long form is ``pytest -m soak``."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from test_wire_hostile import _KINDS

from stream_balancer.errors import RolloutError, WireError
from stream_balancer.testing import make_rollout
from stream_balancer.transport.puts import (
    Limits,
    Mode,
    PutLedger,
    WireTicket,
    error_of,
    masks_of,
    numbers_in,
    read_puts,
    write_puts,
)
from stream_balancer.types import Rollout
from stream_balancer.wire.share import FRAME_BYTES, Frame, read_frame


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


def _bundle() -> list[tuple[Frame, bytes]]:
    """A put, a group of three and a put_nowait, as frames and bodies."""
    book = PutLedger()
    book.open(Limits())
    for rollouts, mode in (([_rollout(0)], Mode.PUT), ([_rollout(n, "g") for n in (1, 2, 3)], Mode.GROUP)):
        book.offer(WireTicket(rollouts, mode, lambda: None))
    book.offer(WireTicket([_rollout(4)], Mode.NOWAIT, lambda: None))
    slab = torch.cat(write_puts(book.take()))
    parts, at = [], 0
    while at < slab.numel():
        frame = read_frame(slab[at : at + FRAME_BYTES].view(torch.int64))
        at += FRAME_BYTES
        parts.append((frame, slab[at : at + frame.wire_bytes].numpy().tobytes()))
        at += frame.wire_bytes
    return parts


def _joined(parts: list[tuple[Frame, bytes]]) -> torch.Tensor:
    raw = b"".join(frame.pack().numpy().tobytes() + body for frame, body in parts)
    return torch.from_numpy(np.frombuffer(bytearray(raw), dtype=np.uint8))


def _use(slab: torch.Tensor) -> None:
    for offer, size in read_puts(slab, 0):
        assert 0 < size <= slab.numel()
        if offer.refusal is not None:
            raise RolloutError(offer.refusal)
        for rollout in offer.rollouts:
            assert 0 <= rollout.num_loss_tokens <= rollout.num_tokens
            for tensor in (*rollout.tokens.values(), *rollout.tensors.values()):
                tensor.clone()


def _attack(cases: int, seed: int) -> tuple[int, int]:
    chance = random.Random(seed)
    parts = _bundle()
    _use(_joined(parts))
    refused = 0
    for _ in range(cases):
        hostile = list(parts)
        place = chance.randrange(len(hostile))
        action = chance.random()
        if action < 0.75:
            frame, body = chance.choice(_KINDS)(*hostile[place], chance)
            hostile[place] = frame._replace(total_bytes=frame.wire_bytes), body
        elif action < 0.85:
            del hostile[place]
        elif action < 0.9:
            chance.shuffle(hostile)
        slab = _joined(hostile)
        if action > 0.9:  # cut anywhere, or more than was said
            slab = slab[: chance.randrange(slab.numel())] if action > 0.93 else torch.cat([slab, slab[:64]])
        try:
            _use(slab.clone())
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


def test_a_book_refuses_verdicts_it_did_not_ask_for() -> None:
    book = PutLedger()
    with pytest.raises(WireError, match="not on its way"):
        book.settle(0, None)
    with pytest.raises(WireError, match="unknown reason"):
        error_of(99, "text")


def test_numbers_travel_as_masks() -> None:
    chance = random.Random(0)
    for _ in range(200):
        numbers = sorted(chance.sample(range(500), chance.randrange(1, 80)))
        assert [n for mask, first in masks_of(numbers) for n in numbers_in(mask, first)] == numbers
        assert all(0 < mask < 2**63 for mask, _ in masks_of(numbers))


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
    ("metadata", {"a": 2**63}, "64 bits"),
    ("scalars", {"": 1.0}, "scalars: a name in it"),
    ("tokens", {"input_ids": torch.arange(3), "": torch.arange(3)}, "tokens: a name in it"),
]


@pytest.mark.parametrize(("field", "value", "why"), SPOILED)
def test_what_no_rollout_may_be_is_refused_and_the_others_are_put(field: str, value: object, why: str) -> None:
    book = PutLedger[WireTicket]()
    book.open(Limits())
    for rollouts in (
        [_rollout(0)],
        [_spoiled(_rollout(1), field, value)],
        [_rollout(2, "g"), _spoiled(_rollout(3, "g"), field, value), _rollout(4, "g")],
        [_rollout(5)],
    ):
        mode = Mode.PUT if len(rollouts) == 1 else Mode.GROUP
        book.offer(WireTicket(rollouts, mode, lambda: None))
    offers = [offer for offer, _ in read_puts(torch.cat(write_puts(book.take())), 0)]
    assert [offer.number for offer in offers] == [0, 1, 2, 3]
    assert [offer.refusal is None for offer in offers] == [True, False, False, True]
    assert why in str(offers[1].refusal)
    assert why in str(offers[2].refusal)

"""An asynchronous balancer where no event loop runs: the error says what to use instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import stream_balancer as sb
from stream_balancer.testing import make_rollout

READ_THE_CLOCK: dict[str, Callable[[sb.StreamBalancer], object]] = {
    "put_nowait": lambda balancer: balancer.put_nowait(make_rollout(3)),
    "record_step_seconds": lambda balancer: balancer.record_step_seconds(0, 0, 1.0),
    "straggler": lambda balancer: balancer.straggler(),
    "snapshot": lambda balancer: balancer.snapshot(),
    "state_dict": lambda balancer: balancer.state_dict(),
    "load_state_dict": lambda balancer: balancer.load_state_dict({}),
    "statistics": lambda balancer: balancer.statistics(),
    "why_no_batch": lambda balancer: balancer.why_no_batch(),
}


@pytest.mark.parametrize("method", READ_THE_CLOCK)
def test_a_method_that_reads_the_clock_names_sb_blocking(method: str) -> None:
    balancer = sb.StreamBalancer(sb.BalancerConfig(dp_size=2, batch_size=4))
    with pytest.raises(RuntimeError, match=r"outside of any event loop's tasks.*sb\.blocking\(config\)") as caught:
        READ_THE_CLOCK[method](balancer)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__  # anyio's error says nothing that this one does not


def test_every_other_plain_method_needs_none() -> None:
    balancer = sb.StreamBalancer(sb.BalancerConfig(dp_size=2, batch_size=4, groups=sb.Groups(size=2)))
    balancer.reconfigure(window=6)
    balancer.set_version(3)
    balancer.abandon_group("g")
    balancer.acknowledge_through(7)
    assert balancer.in_flight() == ()
    assert balancer.rank_states() == []
    balancer.reserve(2)
    balancer.batches()
    balancer.end()
    assert balancer.ended

"""What a rank's frames become while they wait to be sent."""

from __future__ import annotations

from collections import deque

from stream_balancer.transport.gloo.links import PortBase
from stream_balancer.wire.share import Frame, Kind


def sent_as(*frames: Frame) -> list[Frame]:
    port = object.__new__(PortBase)  # the outbox alone: no pair, no threads
    port._outbox = deque()
    for frame in frames:
        port._queue_up(frame)
    return list(port._outbox)


def test_a_report_and_the_taking_of_the_next_batch_travel_as_one_frame() -> None:
    done = Frame(Kind.REPORT, step=4, taken=5, nanoseconds=7, wire_bytes=3, total_bytes=2)
    assert sent_as(done, Frame(Kind.REPORT, taken=6)) == [done._replace(taken=6)]


def test_every_step_has_a_report_of_its_own() -> None:
    reports = [Frame(Kind.REPORT, step=step, taken=9, nanoseconds=1) for step in range(3)]
    assert sent_as(*reports) == reports


def test_a_sign_of_life_is_in_everything_else() -> None:
    alive, done = Frame(Kind.ALIVE), Frame(Kind.REPORT, step=1, taken=2)
    assert sent_as(alive, done) == [done]
    assert sent_as(done, alive) == [done]
    assert sent_as(alive, Frame(Kind.REPORT, taken=2)) == [Frame(Kind.REPORT, taken=2)]

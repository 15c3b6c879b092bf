"""Spans around a batch's life, with the real SDK: times, parents, attributes, and what happens to batches that are
given again or never acknowledged."""

from __future__ import annotations

import logging

import anyio
import pytest

import stream_balancer as sb
from stream_balancer.testing import make_rollout

otel = pytest.importorskip("stream_balancer.metrics.otel", reason="the otel extra is not installed")
pytest.importorskip("opentelemetry.sdk", reason="the OpenTelemetry SDK is not installed")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402


class Traces:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == f"stream_balancer.{name}"]


async def put_window(balancer: sb.StreamBalancer) -> None:
    for length in range(1, 9):
        await balancer.put(make_rollout(length))


CONFIG = sb.BalancerConfig(dp_size=2, batch_size=4, window=8)


async def test_a_trace_per_batch_from_its_oldest_put_to_its_acknowledgement() -> None:
    traces = Traces()
    async with sb.StreamBalancer(CONFIG) as balancer:
        with otel.tracing(balancer, traces.provider), traces.provider.get_tracer("train").start_as_current_span("step"):
            batches = balancer.batches(auto_ack=False)
            await put_window(balancer)
            await anyio.sleep(5.0)
            batch = await anext(batches)
            assert batch.oldest_wait_s >= 5.0
            assert not traces.named("batch")
            balancer.acknowledge(batch.step)
            (whole,), (waiting,), (in_flight,) = (traces.named(n) for n in ("batch", "waiting", "in_flight"))
    assert whole.parent is None
    for part in (waiting, in_flight):
        assert part.parent is not None
        assert whole.context is not None
        assert part.parent.span_id == whole.context.span_id
    assert whole.start_time == waiting.start_time
    assert waiting.end_time == in_flight.start_time
    assert in_flight.end_time == whole.end_time
    assert waiting.end_time is not None
    assert waiting.start_time is not None
    assert waiting.end_time - waiting.start_time == round(batch.oldest_wait_s * 1e9)
    assert whole.attributes is not None
    assert whole.attributes["stream_balancer.reason"] == "window"
    assert whole.attributes["stream_balancer.num_rollouts"] == 4
    assert whole.attributes["stream_balancer.acknowledged"] is True


async def test_given_again_is_an_event_and_the_end_closes_what_is_in_flight() -> None:
    traces = Traces()
    async with sb.StreamBalancer(CONFIG) as balancer:
        with otel.tracing(balancer, traces.provider):
            batches = balancer.batches(auto_ack=False)
            await put_window(balancer)
            first = await anext(batches)
            balancer.nack(first.step)
            assert (await anext(batches)).step == first.step
        (whole,) = traces.named("batch")
        assert [event.name for event in whole.events] == ["given again"]
        assert whole.attributes is not None
        assert whole.attributes["stream_balancer.acknowledged"] is False
        balancer.acknowledge_through(first.step)  # no tracer any more: nothing to tell
        assert len(traces.exporter.get_finished_spans()) == 3


async def test_an_observer_that_raises_is_logged_and_the_batch_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(sb.Observer):
        def dispatched(self, batch: sb.Batch) -> None:
            raise RuntimeError("no")

        acknowledged = dispatched

    async with sb.StreamBalancer(CONFIG) as balancer:
        balancer.observers.append(Broken())
        await put_window(balancer)
        with caplog.at_level(logging.ERROR):
            batch = await anext(balancer.batches())
            balancer.acknowledge(batch.step)
        assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
        assert balancer.statistics().acknowledged == batch.num_rollouts

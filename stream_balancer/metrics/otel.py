"""OpenTelemetry spans around a batch's life.

::

    with tracing(balancer):                # the global tracer provider; or tracing(balancer, provider)
        async for batch in balancer.batches():
            ...

One trace per batch, from the put of its oldest rollout to its acknowledgement::

    stream_balancer.batch        put ------------------------------------> acknowledged
      stream_balancer.waiting    put ----------> dispatched
      stream_balancer.in_flight                  dispatched -------------> acknowledged

One span per rollout would be a million spans a day that say less. Needs the ``otel`` extra (the API only: which SDK
and exporter, and what is sampled, is your program's).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace

import stream_balancer as sb

__all__ = ["BatchTracer", "tracing"]

_ATTRIBUTES = (
    "step", "reason", "num_rollouts", "num_tokens", "imbalance", "unavoidable_imbalance", "oldest_wait_s",
)  # fmt: skip
"""Attributes of a batch, on its span."""


@contextmanager
def tracing(balancer: sb.StreamBalancer, tracer_provider: trace.TracerProvider | None = None) -> Iterator[None]:
    """Trace every batch of ``balancer`` while the block runs. Spans of batches still in flight end with it."""
    tracer = BatchTracer(tracer_provider)
    balancer.observers.append(tracer)
    try:
        yield
    finally:
        balancer.observers.remove(tracer)
        tracer.close()


class BatchTracer(sb.Observer):
    """An observer of a balancer that keeps two open spans for each batch in flight."""

    def __init__(self, tracer_provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("stream_balancer", tracer_provider=tracer_provider)
        self._open: dict[int, tuple[trace.Span, trace.Span]] = {}  # step -> (batch, in flight)

    def dispatched(self, batch: sb.Batch) -> None:
        """Begins the trace, in the past: when the oldest rollout was put."""
        # given again, by nack() or to other ranks: one trace all the same
        if batch.step in self._open:
            self._open[batch.step][0].add_event("given again")
            return
        # the wall clock, as traces of other services
        now_ns = time.time_ns()
        put_ns = now_ns - round(batch.oldest_wait_s * 1e9)
        whole = self._tracer.start_span(
            "stream_balancer.batch",
            context=trace.set_span_in_context(trace.INVALID_SPAN),  # a trace of its own, whoever asks for the batch
            start_time=put_ns,
            attributes={f"stream_balancer.{name}": getattr(batch, name) for name in _ATTRIBUTES}
            | {"stream_balancer.num_ranks": len(batch.ranks)},
        )
        within = trace.set_span_in_context(whole)
        self._tracer.start_span("stream_balancer.waiting", within, start_time=put_ns).end(now_ns)
        self._open[batch.step] = whole, self._tracer.start_span("stream_balancer.in_flight", within, start_time=now_ns)

    def acknowledged(self, batch: sb.Batch) -> None:
        """Ends the trace."""
        if batch.step in self._open:  # not one that was dispatched before tracing began
            self._end(batch.step, acknowledged=True)

    def close(self) -> None:
        """End what is open: batches that were not acknowledged."""
        for step in list(self._open):
            self._end(step, acknowledged=False)

    def _end(self, step: int, *, acknowledged: bool) -> None:
        whole, in_flight = self._open.pop(step)
        whole.set_attribute("stream_balancer.acknowledged", acknowledged)
        now_ns = time.time_ns()
        in_flight.end(now_ns)
        whole.end(now_ns)

"""Which rollouts the demo generates: lengths from a trace file or the built-in generator, scaled to what a CPU can
train."""

from __future__ import annotations

from dataclasses import dataclass

from stream_balancer.demo.messages import RolloutSpec
from stream_balancer.demo.options import DemoOptions
from stream_balancer.tools.generation import issue_order
from stream_balancer.tools.length_models import generate_trace
from stream_balancer.tools.trace import Trace, load_trace

__all__ = ["Workload", "load_workload"]


@dataclass(frozen=True, slots=True)
class Workload:
    """The rollouts of a demo, the same for both runs."""

    specs: tuple[RolloutSpec, ...]
    """In the order in which workers pick them up: prompts shuffled, siblings together."""
    source: str
    """Where the lengths came from."""
    scale: float
    """What they were multiplied by."""

    @property
    def longest(self) -> int:
        """Tokens of the longest rollout."""
        return max(spec.num_tokens for spec in self.specs)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rollouts."""
        return sum(spec.num_tokens for spec in self.specs)


def load_workload(options: DemoOptions) -> Workload:
    """The rollouts to train on. Raises TraceError for a trace that cannot be read or a generator that is not known."""
    trace = _draw(options)
    scale = options.max_length / int(trace.lengths.max()) if options.scale is None else options.scale
    scaled = trace.scaled(scale)
    specs = tuple(
        _spec(place, int(scaled.group_ids[row]), int(scaled.prompt_tokens[row]), int(scaled.lengths[row]))
        for place, row in enumerate(issue_order(scaled, options.seed).tolist())
    )
    return Workload(specs, trace.name, scale)


def _draw(options: DemoOptions) -> Trace:
    """As many rollouts as asked for: whole prompts in shuffled order, drawn again where the file has too few."""
    if options.trace is None:
        return generate_trace(options.rollouts, options.generator, seed=options.seed)
    trace = load_trace(options.trace)
    if options.rollouts > len(trace):
        return trace.resampled(options.rollouts, options.seed)
    rows = issue_order(trace, options.seed)[: options.rollouts]
    return Trace(
        prompt_tokens=trace.prompt_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        group_ids=trace.group_ids[rows],
        name=trace.name,
    )


def _spec(place: int, group: int, prompt_tokens: int, num_tokens: int) -> RolloutSpec:
    """At least one token each of prompt (never trained on) and output (always trained on)."""
    prompt = max(min(prompt_tokens, num_tokens - 1), 1)
    return RolloutSpec(f"rollout-{place:05d}", f"prompt-{group:05d}", prompt, max(num_tokens - prompt, 1))

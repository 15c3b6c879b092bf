"""Traces of lengths that a test writes down."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stream_balancer.tools.trace import Trace


def trace_of(
    output: Sequence[int],
    arrival: Sequence[float] | None = None,
    groups: Sequence[int] | None = None,
    *,
    prompt: int = 0,
) -> Trace:
    """Rollouts of so many tokens; none has siblings unless ``groups`` says so."""
    return Trace(
        prompt_tokens=np.full(len(output), prompt),
        output_tokens=np.array(output),
        group_ids=np.arange(len(output)) if groups is None else np.array(groups),
        arrival_s=None if arrival is None else np.array(arrival),
    )

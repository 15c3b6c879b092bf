"""Real length traces through the core, shortest first: whatever came in goes out, and nobody waits beyond the bounds.

256 generation slots finish the short rollouts of every moment first, which is what makes buffers in the field forget
the long ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.tools.trace import Trace, load_trace

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from peers import finish_times

SLOTS = 256
FEW = 2000  # rollouts of a trace; the long form takes them all
NAMES = ["rg", "lrm", "misguided", "tau", "azure", "mooncake", "nemo"]
TOKENS = torch.zeros(1, dtype=torch.uint8)


def rollout(name: str, length: int) -> sb.Rollout:
    """So many tokens, in one byte of memory."""
    return sb.Rollout(tokens={"input_ids": TOKENS.expand(length)}, rollout_id=name)


def path_of(folder: Path, name: str) -> Path:
    found = sorted(folder.glob(f"{name}*.csv.gz"))
    assert found, f"no trace {name}* in {folder}"
    return found[0]


def drill(trace: Trace, *, deadline_s: float | None) -> None:
    times = finish_times(trace, slots=SLOTS)
    config = sb.BalancerConfig(dp_size=8, batch_size=64, deadline_s=deadline_s)
    core = BalancerCore(config)
    arrived_at: dict[str, float] = {}
    passed: dict[str, int] = {}
    dispatched: list[int] = []

    def poll(now: float) -> None:
        while core.next_wakeup() <= now and (batch := core.poll(now)) is not None:
            for r in batch.rollouts:
                if r.is_padding:
                    continue
                dispatched.append(r.num_tokens)
                del passed[r.rollout_id]
                waited_s = now - arrived_at.pop(r.rollout_id)
                # beyond the deadline only while fewer waited than there are ranks; then the first that completes them
                assert deadline_s is None or waited_s <= deadline_s + 1e-6 or batch.num_rollouts <= config.dp_size
            for name in passed:
                passed[name] += 1
                assert passed[name] <= config.max_skips
            core.acknowledge(batch.step)

    for row in np.argsort(times, kind="stable"):
        now = float(times[row])
        while core.next_wakeup() < now:
            poll(max(core.next_wakeup(), 0.0))
        name = f"r{row}"
        arrived_at[name], passed[name] = now, 0
        core.add(rollout(name, int(trace.lengths[row])), now)
        poll(now)
    core.end()
    poll(float(times.max()))
    assert core.finished
    assert sorted(dispatched) == sorted(trace.lengths.tolist())
    summary = core.statistics(0.0).length_bias
    assert summary.num_dispatched == len(trace)


def few(trace: Trace, count: int) -> Trace:
    return Trace(
        prompt_tokens=trace.prompt_tokens[:count],
        output_tokens=trace.output_tokens[:count],
        group_ids=trace.group_ids[:count],
        name=trace.name,
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("deadline_s", [None, 60.0])
def test_what_comes_in_goes_out(traces_dir: Path, name: str, deadline_s: float | None) -> None:
    drill(few(load_trace(path_of(traces_dir, name)), FEW), deadline_s=deadline_s)

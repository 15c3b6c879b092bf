"""Idle time of the planner alone: a window that is always full, one step after another.

python bench/plan_quality.py [--json] [--kinds sum,equal,lock] [--sizes 32/8] [--window 2] [--skips 8] [--seeds 3]
[--first 1] [--steps 40] [--only rg,lrm] [--without rg,lrm] [--traces DIR] [--package stream_balancer.planning]

A size is batch / ranks. Kinds are joined by "+": "sum", "equal" rollout counts, "lock" (ranks meet at every
micro-batch, cap = the longest rollout), "cap1.2" and "cap4" (of the longest, of the mean), "free" (numbers of
micro-batches), "cost" (overhead of 10 % of a mean rollout), "groups" of 8, "mini2", "mini4", "padded". Figures are of
mid-run steps: 16 steps warm up. A row is the mean over traces and seeds, with the idle percent of each trace, the delay
in steps, and the CPU milliseconds of a plan. Rollouts are drawn one by one ("groups": by groups) and wait in the order
in which they finish. With "cost", the overhead counts as idle time, because no layout does without.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
from _common import Rows, arguments
from peers import Ints, alone, finish_times, flops, trace_folder, traces

import stream_balancer as sb

WARM, GROUP = 16, 8


def stream(trace: sb.Trace, count: int, slots: int, seed: int) -> Ints:
    """[count] lengths in the order in which the rollouts finish."""
    drawn = alone(trace).resampled(count, seed)
    return drawn.lengths[np.argsort(finish_times(drawn, slots, seed=seed), kind="stable")].astype(np.int64)


def group_stream(trace: sb.Trace, count: int, seed: int) -> Ints:
    """[count] lengths, the 8 of a group together. A group finishes with its longest rollout."""
    rng = np.random.default_rng(seed)
    _, sizes = np.unique(trace.group_ids, return_counts=True)
    members = np.split(np.argsort(trace.group_ids, kind="stable"), np.cumsum(sizes)[:-1])
    rows = np.array([rng.choice(members[one], GROUP) for one in rng.integers(len(members), size=count // GROUP + 1)])
    output = trace.output_tokens[rows].max(axis=1) / float(trace.output_tokens.mean())
    order = np.argsort(np.arange(rows.shape[0]) + 4 * output, kind="stable")
    lengths: Ints = trace.lengths[rows][order].ravel().astype(np.int64)
    return lengths


def knobs_of(kind: str, lengths: Ints, **knobs: Any) -> dict[str, Any]:
    """Knobs of a `PlanKnobs`."""
    longest, mean = int(lengths.max()), float(lengths.mean())
    work = float(flops(lengths.astype(np.float64)).mean())
    parts: dict[str, dict[str, Any]] = {
        "sum": {},
        "equal": {"equal_rollouts": True},
        "lock": {"sync": "micro_batch"},
        "cap": {"max_tokens": longest},
        "cap1.2": {"max_tokens": int(1.2 * longest)},
        "cap4": {"max_tokens": int(4 * mean)},
        "free": {"equal_number": False},
        "cost": {"overhead_cost": 0.1 * work},
        "groups": {"whole_groups": True, "group_size": GROUP},
        "mini2": {"mini_batches": 2},
        "mini4": {"mini_batches": 4},
        "padded": {"padded": True},
    }
    for part in kind.split("+"):
        knobs |= parts[part]
    if "padded" in kind:
        knobs.setdefault("max_tokens", max(int(8 * mean), longest))
    if "lock" in kind:
        knobs.setdefault("max_tokens", longest)
    return knobs


def run(package: str, lengths: Ints, knobs: dict[str, Any], window: int, steps: int, grouped: bool) -> list[float]:
    """[idle %, mean delay, p99 delay, most skips, CPU ms] of the steps after the warm-up."""
    planning = import_module(package)
    costs, limits = flops(lengths.astype(np.float64)), planning.PlanKnobs(**knobs)
    held, skips, taken = np.arange(window), np.zeros(window, dtype=np.int64), window
    work = finish = spent = 0.0
    delays: list[Ints] = []
    for step in range(WARM + steps):
        labels = held // GROUP if grouped else np.full(held.size, -1)
        none = np.zeros(held.size, dtype=np.bool_)
        waiting = planning.Waiting(costs[held], lengths[held], skips, none, labels, ~none)
        start = time.process_time()
        plan = planning.plan_batch(waiting, limits, num_rollouts=limits.batch_size, step=step)
        took = time.process_time() - start
        stays = np.ones(held.size, dtype=np.bool_)
        stays[[row for of_rank in plan.ranks for one in of_rank for row in one]] = False
        if step >= WARM:
            work, finish = work + float(waiting.costs[~stays].sum()) / limits.dp_size, finish + plan.finish
            delays.append(skips[~stays])
            spent += took
        came = held.size - int(stays.sum())
        held, taken = np.concatenate((held[stays], np.arange(taken, taken + came))), taken + came
        skips = np.concatenate((skips[stays] + 1, np.zeros(came, dtype=np.int64)))
    delay = np.concatenate(delays)
    idle = 100 * (1 - work / finish)
    return [idle, float(delay.mean()), float(np.percentile(delay, 99)), float(delay.max()), 1e3 * spent / steps]


def chosen(options: Any) -> Iterator[sb.Trace]:
    """Traces whose names begin with one of ``--only``, and with none of ``--without``."""
    for trace in traces(trace_folder(options.traces)):
        only, without = (tuple(one for one in text.split(",") if one) for text in (options.only, options.without))
        if (not only or trace.name.startswith(only)) and not (without and trace.name.startswith(without)):
            yield trace


def main() -> None:
    options = arguments(
        __doc__,
        kinds="sum",
        sizes="32/8",
        window=2.0,
        skips=8,
        seeds=3,
        first=1,
        steps=40,
        only="",
        without="",
        traces=None,
        package="stream_balancer.planning",
    )
    rows, streams = Rows(options.json, options.results), dict[Any, Ints]()
    for size in options.sizes.split(","):
        batch, ranks = map(int, size.split("/"))
        count = batch * (options.steps + WARM + 4)
        for kind in options.kinds.split(","):
            grouped, slots = "groups" in kind, max(128, 4 * batch if "lock" in kind else 128)
            found: dict[str, Any] = {}
            for trace in chosen(options):
                if grouped and np.unique(trace.group_ids).size > len(trace) // 2:
                    continue  # single rollouts
                seeds = []
                for seed in range(options.first, options.first + options.seeds):
                    key = trace.name, count, grouped, slots, seed
                    if key not in streams:
                        streams[key] = (
                            group_stream(trace, count, seed) if grouped else stream(trace, count, slots, seed)
                        )
                    knobs = knobs_of(kind, streams[key], dp_size=ranks, batch_size=batch, max_skips=options.skips)
                    window = round(options.window * batch / GROUP) * GROUP if grouped else round(options.window * batch)
                    seeds.append(run(options.package, streams[key], knobs, window, options.steps, grouped))
                found[trace.name[:6]] = np.mean(seeds, axis=0)
            idle, mean, p99, most, ms = np.mean(list(found.values()), axis=0)
            each: dict[str, Any] = {name: round(float(figures[0]), 2) for name, figures in found.items()}
            more: dict[str, Any] = {
                "delay": round(mean, 2),
                "p99": round(p99, 1),
                "most": int(most),
                "ms": round(ms, 2),
            }
            rows.add(f"{kind} {size} W{options.window:g} D{options.skips}: idle", idle, "%", **more, **each)


if __name__ == "__main__":
    main()

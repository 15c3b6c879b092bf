"""The demo: two runs, one after the other, and the comparison."""

from __future__ import annotations

import secrets
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace

import anyio
import msgspec
from rich.console import Console

from stream_balancer.demo.lengths import Workload, load_workload
from stream_balancer.demo.meeting import host_store
from stream_balancer.demo.messages import Message, Put, StepDone, Task
from stream_balancer.demo.options import DemoOptions
from stream_balancer.demo.processes import ChildError, run_children
from stream_balancer.demo.report import RunRecord, RunReport, summarize
from stream_balancer.demo.view import RunProgress, comparison

__all__ = ["run_demo"]

_POLICIES = ("round_robin", "window")
_INTERRUPTED = 130  # what a shell expects after Ctrl-C


@dataclass(frozen=True, slots=True)
class _Setting:
    """Common to both runs."""

    options: DemoOptions
    workload: Workload


def run_demo(options: DemoOptions) -> int:
    """Run the demo; returns the exit code of the process. Blocks until done; leaves no process behind.

    0: every rollout was trained on exactly once, in both runs. 1: it was not, or a process died. 2: the lengths could
    not be read. 130: interrupted. Tables go to stdout, or one JSON object if ``options.json``; progress and errors to
    stderr.
    """
    console = Console(stderr=True)
    try:
        workload = load_workload(options)
        _check_cap(options, workload)
        _introduce(console, options, workload)
        setting = _Setting(options, workload)
        usual, balanced = anyio.run(_run_both, setting, console, backend=options.backend)
    except ValueError as error:
        _complain(console, f"demo: {error}")
        return 2
    except ChildError as error:
        _complain(console, f"demo: {error}")
        return 1
    except KeyboardInterrupt:
        _complain(console, "demo: interrupted; all its processes have been ended")
        return _INTERRUPTED
    _print_report(setting, usual, balanced)
    return 0 if usual.exactly_once and balanced.exactly_once else 1


def _complain(console: Console, text: str) -> None:
    console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def _check_cap(options: DemoOptions, workload: Workload) -> None:
    cap = options.max_tokens_per_micro_batch
    if cap is not None and cap < workload.longest:
        raise ValueError(
            f"max_tokens_per_micro_batch ({cap}) must be >= the longest rollout ({workload.longest} tokens). Raise it, "
            "or shorten rollouts with scale"
        )


def _introduce(console: Console, options: DemoOptions, workload: Workload) -> None:
    console.print(
        f"{len(workload.specs)} rollouts, {workload.num_tokens:,} tokens, longest {workload.longest}: lengths of "
        f"{workload.source} × {workload.scale:.4g}\n"
        f"{options.workers} workers → controller → {options.ranks} ranks over gloo, {options.batch_size} a step",
        highlight=False,
    )


async def _run_both(setting: _Setting, console: Console) -> tuple[RunReport, RunReport]:
    """Both runs, unless SIGINT or SIGTERM ends them: then KeyboardInterrupt, once every child has been ended."""
    outcome: list[RunReport] | ChildError | None = None
    async with anyio.create_task_group() as group:
        if threading.current_thread() is threading.main_thread():
            group.start_soon(_cancel_on_signal, group.cancel_scope)
        try:
            with RunProgress(console) as progress:
                outcome = [await _run(setting, policy, progress) for policy in _POLICIES]
        except ChildError as error:
            outcome = error
        group.cancel_scope.cancel()
    if outcome is None:
        raise KeyboardInterrupt
    if isinstance(outcome, ChildError):
        raise outcome
    return outcome[0], outcome[1]


async def _cancel_on_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()


async def _run(setting: _Setting, policy: str, progress: RunProgress) -> RunReport:
    """One run, in processes of its own."""
    options, workload = setting.options, setting.workload
    record, clock = RunRecord(), _Wall()
    progress.begin(policy, len(workload.specs))

    def on_message(message: Message) -> None:
        record.add(message)
        clock.note(message)
        progress.show(message)

    store, port = host_store()
    await run_children(_tasks(setting, policy, port), on_message)
    del store  # not before the last child is done with it
    ids = [spec.rollout_id for spec in workload.specs]
    return summarize(record, policy=policy, ranks=options.ranks, expected=ids, wall_s=clock.seconds)


def _tasks(setting: _Setting, policy: str, port: int) -> list[Task]:
    """The controller's task, then each rank's."""
    rank_task = Task(
        rank=0,
        policy=policy,
        options=replace(setting.options, trace=None),
        store_port=port,
        token=secrets.token_hex(16),
        longest=setting.workload.longest,
    )
    ranks = [msgspec.structs.replace(rank_task, rank=rank) for rank in range(setting.options.ranks)]
    return [msgspec.structs.replace(rank_task, rank=None, specs=setting.workload.specs), *ranks]


class _Wall:
    """Seconds from the first put to the last step, as seen from here."""

    def __init__(self) -> None:
        self._first = self._last = 0.0

    @property
    def seconds(self) -> float:
        return self._last - self._first

    def note(self, message: Message) -> None:
        if isinstance(message, Put) and not self._first:
            self._first = time.monotonic()
        elif isinstance(message, StepDone):
            self._last = time.monotonic()


def _print_report(setting: _Setting, usual: RunReport, balanced: RunReport) -> None:
    if setting.options.json:
        sys.stdout.write(msgspec.json.encode(_as_json(setting, usual, balanced)).decode() + "\n")
        return
    console = Console()
    console.print(comparison(usual, balanced))
    console.print(_notes(setting), highlight=False)


def _as_json(setting: _Setting, usual: RunReport, balanced: RunReport) -> dict[str, object]:
    options = {k: str(v) if k == "trace" and v else v for k, v in asdict(setting.options).items()}
    return {
        "lengths": {
            "source": setting.workload.source,
            "scale": setting.workload.scale,
            "rollouts": len(setting.workload.specs),
            "tokens": setting.workload.num_tokens,
            "longest": setting.workload.longest,
        },
        "options": options,
        "round_robin": usual.to_json(),
        "balanced": balanced.to_json(),
        "idle_ratio": balanced.idle_fraction / usual.idle_fraction if usual.idle_fraction else None,
        "exactly_once": usual.exactly_once and balanced.exactly_once,
    }


def _notes(setting: _Setting) -> str:
    options, workload = setting.options, setting.workload
    return (
        f"Lengths: {workload.source}, multiplied by {workload.scale:.4g}; longest rollout {workload.longest} tokens, "
        f"{workload.num_tokens / len(workload.specs):.0f} on average. Generation is pretended, at "
        f"{options.tokens_per_second:g} tokens/s per worker.\n"
        "Compute is CPU time of forward and backward on the training thread of each rank, in every step (after "
        "a warm-up).\nIdle = 1 - sum over steps of the ranks' mean / sum over steps of the slowest rank.\n"
        f"Wall times say little: {options.ranks} ranks share this machine's cores, so where one waits another computes."
    )

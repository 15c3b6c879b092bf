"""The demo: two runs, one after the other, and the comparison.

::

    worker 1 --.                                     .--> rank 0, a process (torch.multiprocessing), gloo
    worker 2 ---> balancer.put --> serve() ---------+---> rank 1 ...
    ...        |   (a full buffer makes workers wait)     their gradients: an all-reduce of their own
    worker 64 -'
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import msgspec
from anyio.abc import TaskStatus
from rich.console import Console
from torch.multiprocessing.spawn import ProcessContext, ProcessException, spawn

import stream_balancer as sb
from stream_balancer.tools.shown import Bars
from stream_balancer_demo.model import training_cost
from stream_balancer_demo.options import DemoOptions
from stream_balancer_demo.rank import RankRun, run_rank
from stream_balancer_demo.report import NAMES, Figures, comparison, summarize
from stream_balancer_demo.rollouts import Workload, load_workload

__all__ = ["run_demo"]

_INTERRUPTED = 130  # what a shell expects after Ctrl-C
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",  # they share a machine
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # c10d warns where a loopback address has no host name; errors are enough
    # glibc: keep freed memory, so that CPU seconds measure the model and not page faults
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # ranks share cores


def run_demo(options: DemoOptions) -> int:
    """Run the demo; returns the exit code of the process. Blocks until done; call it in the main thread. Leaves no
    process.

    0: every rollout was trained on exactly once, in both runs. 1: it was not, or a rank died. 130: interrupted. The
    table goes to stdout, or one JSON object if ``options.json``; progress and errors to stderr. Raises ValueError for
    options that cannot be, before anything starts.
    """
    workload = load_workload(options)
    configs = [_config(options, policy) for policy in NAMES]
    console = Console(stderr=True, highlight=False)
    console.print(
        _LENGTHS.format(**workload.lengths)
        + f"{options.workers} workers → controller → {options.ranks} ranks over gloo, {options.batch_size} a step"
    )
    runs: list[Figures] = []
    code, problem = _INTERRUPTED, "interrupted; all its processes have been ended"
    try:
        runs = anyio.run(_run_all, options, workload, configs, console, backend=options.backend)
    except* KeyboardInterrupt:  # before the signal was waited for
        pass
    except* ProcessException as group:
        code, problem = 1, _of_rank(group)
    if len(runs) < len(configs):
        console.print(f"demo: {problem}", style="red", markup=False, soft_wrap=True)
        return code
    usual, balanced = runs
    once = usual["exactly_once"] and balanced["exactly_once"]
    if options.json:
        idle = [run["idle_fraction"] for run in runs]
        said = {
            "lengths": workload.lengths,
            "options": asdict(options) | {"trace": options.trace and str(options.trace)},
            "round_robin": usual,
            "balanced": balanced,
            "idle_ratio": idle[1] / idle[0] if idle[0] else None,
            "exactly_once": once,
        }
        sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
    else:
        notes = _NOTES.format(speed=options.tokens_per_second, **workload.lengths)
        Console(highlight=False).print(comparison(*runs), notes)
    return 0 if once else 1


def _of_rank(group: BaseException) -> str:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    assert isinstance(group, ProcessException)
    return f"rank {group.error_index} (process {group.error_pid}) failed: {str(group).strip()}"


_LENGTHS = "{rollouts} rollouts, {tokens:,} tokens, longest {longest}: lengths of {source} × {scale:.4g}\n"
_NOTES = (
    "Lengths: {source}, multiplied by {scale:.4g}. Generation is pretended, at {speed:g} tokens/s per worker.\n"
    "Compute is CPU time of forward and backward on each rank's training thread, after a warm-up.\n"
    "Idle = 1 - sum over steps of the ranks' mean / sum over steps of the slowest rank.\n"
    "Wall times say little: the ranks share this machine's cores, so where one waits another computes."
)


def _config(options: DemoOptions, policy: str) -> sb.BalancerConfig:
    """The usual way sends rollouts ``batch_size`` by ``batch_size`` as they come; the balanced one has a window to
    choose from."""
    window = 2 * options.batch_size if options.window is None else options.window
    return sb.BalancerConfig(
        dp_size=options.ranks,
        batch_size=options.batch_size,
        window=options.batch_size if policy == "round_robin" else window,
        deadline_s=options.deadline_s,
        cost=training_cost(options),
        policy=policy,  # type: ignore[arg-type]
    )


async def _run_all(
    options: DemoOptions, workload: Workload, configs: Sequence[sb.BalancerConfig], console: Console
) -> list[Figures]:
    """Runs, one after another; fewer if SIGINT or SIGTERM came. ProcessException (in a group) if a rank dies."""
    runs: list[Figures] = []
    async with anyio.create_task_group() as group:
        await group.start(_cancel_on_signal, group.cancel_scope)  # before a rank is begun: it would be left half begun
        with Bars(console) as bars:
            for config in configs:
                name, total = NAMES[config.policy], len(workload.rollouts)
                console.print(f"{name}: starting processes")
                watched = _Watched(partial(bars.show, bars.add_task(name, total=total), total=total))
                runs.append(await _run(options, workload, config, watched))  # kept if a signal comes
        group.cancel_scope.cancel()
    return runs


class _Watched(sb.Observer):
    """How long rollouts waited, and how many were trained on."""

    def __init__(self, show: Callable[[int], None]) -> None:
        self._show, self._num_trained = show, 0
        self._accepted_at: dict[str, float] = {}
        self.delays_s: list[float] = []  # from acceptance to dispatch, of each rollout

    def accepted(self, rollouts: Sequence[sb.Rollout], now: float) -> None:
        """Note when."""
        self._accepted_at |= {rollout.rollout_id: now for rollout in rollouts}

    def dispatched(self, batch: sb.Batch) -> None:
        """Note how long that was."""
        now = anyio.current_time()
        self.delays_s += [now - self._accepted_at[r.rollout_id] for r in batch.rollouts if not r.is_padding]

    def acknowledged(self, batch: sb.Batch) -> None:
        """Move the bar."""
        self._num_trained += batch.num_rollouts
        self._show(self._num_trained)


async def _cancel_on_signal(scope: anyio.CancelScope, *, task_status: TaskStatus[None]) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            scope.cancel()


async def _run(options: DemoOptions, workload: Workload, config: sb.BalancerConfig, watched: _Watched) -> Figures:
    """A run, with ranks of its own."""
    token = secrets.token_hex(16)
    with TemporaryDirectory() as name:
        folder = Path(name)
        async with (
            sb.StreamBalancer(config) as balancer,
            sb.TorchTransport.listen(dp_size=options.ranks, token=token) as transport,
        ):
            balancer.observers.append(watched)
            with _started(
                (options, transport.address, token, workload.lengths["longest"], folder), options.ranks
            ) as ranks:
                async with anyio.create_task_group() as group:
                    for rank in range(options.ranks):
                        group.start_soon(_watch, ranks, rank)
                    # for ever: `_watch` knows better than the transport what happened to a rank that is gone
                    group.start_soon(partial(sb.serve, balancer, transport, rejoin_timeout_s=math.inf))
                    began_s = anyio.current_time()
                    await _generate(options, workload, balancer)
                    balancer.end()
                wall_s = anyio.current_time() - began_s
            said = balancer.statistics()
        done = [msgspec.json.decode((folder / f"{n}.json").read_bytes(), type=RankRun) for n in range(options.ranks)]
    return summarize(config.policy, said, watched.delays_s, wall_s, done, workload.rollouts)


@contextmanager
def _started(arguments: tuple[object, ...], ranks: int) -> Iterator[ProcessContext]:
    """The ranks' processes; none is left when the block ends."""
    before = dict(os.environ)
    resource_tracker.ensure_running()  # here: it would unblock what is blocked next
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # ranks inherit it: Ctrl-C is for us alone
    os.environ.update(_ENVIRONMENT | before | _ONE_THREAD)
    try:
        processes: ProcessContext = spawn(run_rank, arguments, ranks, join=False, daemon=True)  # type: ignore[no-untyped-call]
    finally:
        os.environ.clear()
        os.environ.update(before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        yield processes
    finally:
        for process in processes.processes:
            process.kill()
            process.join()


async def _watch(ranks: ProcessContext, rank: int) -> None:
    """Wait for a rank's end. Raises ProcessException, with its traceback, unless it ended well."""
    await anyio.wait_readable(ranks.processes[rank].sentinel)
    ranks.join(timeout=0)


async def _generate(options: DemoOptions, workload: Workload, balancer: sb.StreamBalancer) -> None:
    """Workers, until every rollout was put: pick one, take as long over it as its output is long, put it, and again."""
    todo = iter(workload.rollouts)

    async def work() -> None:
        for rollout in todo:
            await anyio.sleep(rollout.num_loss_tokens / options.tokens_per_second)
            await balancer.put(rollout)

    async with anyio.create_task_group() as workers:
        for _ in range(options.workers):
            workers.start_soon(work)

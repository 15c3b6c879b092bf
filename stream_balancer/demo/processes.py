"""Children that never outlive their parent.

::

    parent --task (JSON line)------> stdin  child    stdin then stays open: when the parent is gone, for whatever
    parent <------messages (JSON)-- stdout  child    reason, the child reads its end and exits at once

Ctrl-C goes to the parent alone (children ignore SIGINT); whatever ends :func:`run_children` early kills every child.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from subprocess import PIPE

import anyio
from anyio.abc import ByteReceiveStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream

from stream_balancer.demo.messages import Message, Task, decode, encode

__all__ = ["ChildError", "run_children"]

CHILD = (sys.executable, "-m", "stream_balancer.demo.child")
"""What to run for a task."""

_LINE_LIMIT = 64 * 2**20  # a message is small; this only bounds what a broken child could make us hold
_STDERR_LINES = 30  # enough for a traceback's useful end


class ChildError(RuntimeError):
    """A child process ended with an error; the message names it and holds the end of what it said."""


async def run_children(
    tasks: Sequence[Task], on_message: Callable[[Message], None], command: Sequence[str] = CHILD
) -> None:
    """Run one ``command`` per task, all to their end; ``on_message`` is called with each message as it comes.

    Raises :class:`ChildError` for the first child that fails. However this ends, no child is left running.
    """
    failures: list[ChildError] = []
    async with anyio.create_task_group() as group:

        async def run(task: Task) -> None:
            try:
                await _run_child(task, on_message, command)
            except ChildError as error:
                failures.append(error)
                group.cancel_scope.cancel()

        for task in tasks:
            group.start_soon(run, task)
    if failures:
        raise failures[0]


async def _run_child(task: Task, on_message: Callable[[Message], None], command: Sequence[str]) -> None:
    name = "controller" if task.rank is None else f"rank {task.rank}"
    process = await anyio.open_process(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=_environment())
    said: deque[str] = deque(maxlen=_STDERR_LINES)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        async with anyio.create_task_group() as group:
            group.start_soon(_keep_last_lines, process.stderr, said)
            with suppress(anyio.BrokenResourceError):  # it died first: its exit code and its stderr say why
                await process.stdin.send(encode(task))
            await _relay(process.stdout, on_message)
        if code := await process.wait():
            raise ChildError(_describe(name, process, code, said))
    finally:
        await _kill(process)


async def _relay(stdout: ByteReceiveStream, on_message: Callable[[Message], None]) -> None:
    lines = BufferedByteReceiveStream(stdout)
    while True:
        try:
            line = await lines.receive_until(b"\n", _LINE_LIMIT)
        except (anyio.EndOfStream, anyio.IncompleteRead):
            return  # how it ended is for its exit code to say
        on_message(decode(line))


async def _keep_last_lines(stderr: ByteReceiveStream, said: deque[str]) -> None:
    rest = b""
    async for chunk in stderr:
        *lines, rest = (rest + chunk).split(b"\n")
        said.extend(line.decode(errors="replace") for line in lines)
    if rest:
        said.append(rest.decode(errors="replace"))


async def _kill(process: Process) -> None:
    """End the child if it still runs, and reap it."""
    with anyio.CancelScope(shield=True):
        if process.returncode is None:
            process.kill()
        await process.aclose()


def _describe(name: str, process: Process, code: int, said: Sequence[str]) -> str:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    text = "\n".join(f"  {line}" for line in said)
    return f"{name} (process {process.pid}) {how}. " + (f"It said:\n{text}" if text else "It said nothing.")


def _environment() -> dict[str, str]:
    """Environment of the children."""
    return {
        # They share a machine.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        # c10d warns where a loopback address has no host name; errors are enough.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # glibc: keep freed memory, so that CPU seconds measure the model and not page faults.
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**32),
        **os.environ,
        # Ranks share cores: one compute thread each.
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }

"""The feed between real processes: every way out ends with the right exit code, and every loss is told."""

from __future__ import annotations

import signal
import threading
from functools import partial
from pathlib import Path

import anyio
import pytest
from forked import Python, run_world, started
from guard import GUARD_S
from scripted import ScriptedBalancer, make_batch

import stream_balancer as sb
from stream_balancer.errors import RankLostError

SCRIPT = str(Path(__file__).with_name("feed_rank.py"))


def ended(process: Python) -> tuple[int | None, list[str], str]:
    """Exit code, lines of output, errors."""
    out, errors = process.communicate(GUARD_S)
    return process.returncode, out.splitlines(), errors


def test_every_way_out_of_the_loop_ends_the_process_cleanly() -> None:
    anyio.run(_ways_out)  # it is about the ranks' processes: one loop will do


async def _ways_out() -> None:
    modes = {"break": 0, "exit": 3, "raise": 1, "unclosed": 0, "ctrl-c": 0}
    balancer = ScriptedBalancer([make_batch(step, len(modes)) for step in range(2)], hold=True)
    with anyio.fail_after(GUARD_S):
        async with sb.TorchTransport.listen(dp_size=len(modes)) as transport, anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, balancer, transport, rejoin_timeout_s=GUARD_S))
            ranks = {}
            for rank, mode in enumerate([*modes, "unconnected"]):
                context = started(SCRIPT, mode, transport.address, rank % len(modes), len(modes), finalize=True)
                ranks[mode] = (context, context.__enter__())
            try:
                process = ranks["ctrl-c"][1]
                await anyio.to_thread.run_sync(process.stdout.readline, abandon_on_cancel=True)
                await anyio.sleep(0.5)  # it is now blocked in next()
                process.send_signal(signal.SIGINT)
                for mode, code in (modes | {"unconnected": 0}).items():
                    result = await anyio.to_thread.run_sync(ended, ranks[mode][1])
                    assert result[0] == code, (mode, result)
                    assert "terminate called" not in result[2], mode
                    if mode == "ctrl-c":
                        assert result[1][-1] == "interrupted"
            finally:
                for context, _ in ranks.values():
                    context.__exit__(None, None, None)
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_controller_may_live_in_rank_0(backend: str) -> None:
    out = run_world(2, SCRIPT, "world", backend)
    assert out.splitlines()[-1].split() == [str(step) for step in range(12)]


@pytest.mark.parametrize(
    ("mode", "how"), [("serve", signal.SIGKILL), ("serve", signal.SIGINT), ("unclosed", None)], ids=str
)
def test_the_end_of_the_controller_is_told(mode: str, how: signal.Signals | None) -> None:
    with started(SCRIPT, "control", mode) as controller:
        address = controller.stdout.readline().strip()
        with sb.RankFeed(address, rank=0, dp_size=1) as feed:
            assert [next(feed).step for _ in range(2)] == [0, 1]
            if how is not None:
                threading.Timer(0.2, controller.send_signal, [how]).start()
            with pytest.raises(RankLostError, match="rank 0 lost its controller") as caught:
                next(feed)
            assert caught.value.rank == 0
        code, out, errors = ended(controller)
        assert code == (-signal.SIGKILL if how is signal.SIGKILL else 0), errors
        assert out == (["interrupted"] if how is signal.SIGINT else [])

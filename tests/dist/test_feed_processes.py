"""The feed between real processes: every way out ends with the right exit code, and every loss is told."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import anyio
import pytest
from forked import Python, run_world, started
from guard import GUARD_S
from scripted import make_batch

import stream_balancer as sb
from stream_balancer.errors import RankLostError
from stream_balancer.transport.gloo import pair as _gloo

SCRIPT = str(Path(__file__).with_name("feed_rank.py"))


def ended(process: Python) -> tuple[int | None, list[str], str]:
    """Exit code, lines of output, errors."""
    out, errors = process.communicate(GUARD_S)
    return process.returncode, out.splitlines(), errors


def test_every_way_out_of_the_loop_ends_the_process_cleanly() -> None:
    anyio.run(_ways_out)  # it is about the ranks' processes: one loop will do


async def _ways_out() -> None:
    modes = {"break": 0, "exit": 3, "raise": 1, "unclosed": 0, "unconnected": 0, "ctrl-c": 0}
    dp_size = len(modes)
    with anyio.fail_after(GUARD_S):
        async with sb.TorchTransport.listen(dp_size=dp_size) as transport:
            address = transport.address or ""
            ranks = {}
            for rank, mode in enumerate(modes):
                context = started(SCRIPT, mode, address, rank, dp_size, finalize=True)
                ranks[mode] = (context, context.__enter__())
            try:
                fed: set[int] = set()
                while len(fed) < dp_size - 1:
                    link = await transport.accept()
                    if link.rank == list(modes).index("unconnected"):
                        continue  # it may be quick enough to connect before it is gone
                    fed.add(link.rank)
                    while link.credits < 2:
                        await anyio.sleep(0.01)
                    for step in range(2):
                        link.send(make_batch(step, dp_size).ranks[link.rank])
                process = ranks["ctrl-c"][1]
                await anyio.to_thread.run_sync(process.stdout.readline, abandon_on_cancel=True)
                await anyio.sleep(0.2)  # it is now blocked in next()
                process.send_signal(signal.SIGINT)
                for mode, code in modes.items():
                    result = await anyio.to_thread.run_sync(ended, ranks[mode][1])
                    assert result[0] == code, (mode, result)
                    assert "terminate called" not in result[2], mode
                    if mode == "ctrl-c":
                        assert result[1][-1] == "interrupted"
            finally:
                for context, _ in ranks.values():
                    context.__exit__(None, None, None)


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
            assert next(feed).step == 0
            if how is not None:
                assert next(feed).step == 1
                threading.Timer(0.2, controller.send_signal, [how]).start()
            with pytest.raises(RankLostError, match="rank 0 lost its controller") as caught:
                next(feed)
            assert caught.value.rank == 0
        code, out, errors = ended(controller)
        assert code == (-signal.SIGKILL if how is signal.SIGKILL else 0), errors
        assert out == (["interrupted"] if how is signal.SIGINT else [])


@pytest.mark.processes
async def test_idling_longer_than_the_timeouts_of_the_pair_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gloo, "PAIR_TIMEOUT_S", 0.5)
    monkeypatch.setattr(_gloo, "GLOO_TIMEOUT_S", 0.5)
    with anyio.fail_after(GUARD_S):
        async with sb.TorchTransport.listen(dp_size=1, keepalive_s=0.3) as transport:
            feed = sb.RankFeed(transport.address, rank=0, dp_size=1, keepalive_s=0.3)
            link = await transport.accept()
            for step in range(2):
                await anyio.sleep(1.6)  # more than three times either
                link.send(make_batch(step, 1).ranks[0])
                assert (await anext(feed)).step == step
            assert link.live
            await feed.aclose()

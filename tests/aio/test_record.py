"""record(): what arrives is in the file once the balancer is closed, and the disk never touches a put."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import helpers
import pytest
from guard import GUARD_S
from helpers import fill

import stream_balancer as sb
import stream_balancer.host.recorder as record_room
from stream_balancer.testing import make_rollout

config = partial(helpers.config, window=8)


async def read(path: Path) -> sb.Trace:
    return await anyio.to_thread.run_sync(sb.load_trace, path)


async def test_what_arrived_is_a_trace(tmp_path: Path) -> None:
    async with sb.StreamBalancer(config(capacity=12)) as balancer:
        recorder = balancer.record(tmp_path / "lengths.csv")
        with pytest.raises(sb.errors.AlreadyInUseError, match="arrivals go to"):
            balancer.record(tmp_path / "others.csv")
        await balancer.put(make_rollout(10, group_id='a,\n"b', prompt_tokens=4))
        await anyio.sleep(1.5)
        await balancer.put(make_rollout(7, group_id='a,\n"b', prompt_tokens=4))
        await balancer.put_group([make_rollout(5, group_id="c"), make_rollout(6, group_id="c")])
        await anyio.sleep(0.25)
        balancer.put_nowait(make_rollout(3))
        balancer.put_nowait(make_rollout(3, prompt_tokens=3))
    assert recorder.error is None
    assert recorder.num_rollouts == 6
    trace = await read(tmp_path / "lengths.csv")
    assert trace.prompt_tokens.tolist() == [4, 4, 0, 0, 0, 3]
    assert trace.output_tokens.tolist() == [6, 3, 5, 6, 3, 0]
    assert trace.group_ids.tolist() == [0, 0, 1, 1, 2, 3]
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0.0, 1.5, 1.5, 1.5, 1.75, 1.75]


async def test_only_what_is_accepted_arrives(tmp_path: Path) -> None:
    async with sb.StreamBalancer(config(window=4, capacity=4), accept=lambda rs: rs[0].num_tokens != 9) as balancer:
        balancer.record(tmp_path / "t.csv")
        await balancer.put(make_rollout(9))  # turned down
        await fill(balancer, [1, 2, 3, 4])
        with pytest.raises(sb.errors.WouldBlock):
            balancer.put_nowait(make_rollout(5))
        with pytest.raises(sb.errors.DuplicateRolloutError):
            await balancer.put(make_rollout(6, "r0"))
        with anyio.move_on_after(1.0):
            await balancer.put(make_rollout(7))  # waits for room, and gives up
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(balancer.put, make_rollout(8))  # waits for room, and gets it
            await anyio.sleep(2.0)
            await anext(balancer.batches())
    trace = await read(tmp_path / "t.csv")
    assert trace.lengths.tolist() == [1, 2, 3, 4, 8]
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0.0, 0.0, 0.0, 0.0, 3.0]


async def test_another_suffix_is_refused(tmp_path: Path) -> None:
    async with sb.StreamBalancer(config()) as balancer:
        with pytest.raises(sb.errors.ConfigError, match=r"something\.csv"):
            balancer.record(tmp_path / "trace.csv.gz")
        balancer.record(tmp_path / "trace.csv")


@pytest.mark.parametrize("why", ["there already", "No such file or directory"])
async def test_a_file_that_cannot_be_written_is_reported_and_no_put_fails(
    tmp_path: Path, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.csv" if why == "there already" else tmp_path / "nowhere" / "t.csv"
    (tmp_path / "t.csv").write_text("precious")
    with caplog.at_level(logging.ERROR, "stream_balancer.record"):
        async with sb.StreamBalancer(config(capacity=600)) as balancer:
            recorder = balancer.record(path)
            await fill(balancer, [1] * 600)
    assert recorder.error is not None
    assert [r.getMessage().count(why) for r in caplog.records] == [1]
    assert (tmp_path / "t.csv").read_text() == "precious"


async def test_a_disk_that_fills_up_stops_the_recording_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = 0

    def full(*args: Any, **knobs: Any) -> Any:
        nonlocal opened
        opened += 1
        if opened == 3:  # header, 256 rows, then
            raise OSError(28, "No space left on device")
        return open(*args, **knobs)

    monkeypatch.setattr(record_room, "open", full, raising=False)
    async with sb.StreamBalancer(config(capacity=2000)) as balancer:
        recorder = balancer.record(tmp_path / "t.csv")
        await fill(balancer, [3] * 1500)
        assert balancer.statistics().accepted == 1500
    assert "No space left on device" in caplog.text
    assert "stopped after 256 of them" in caplog.text
    assert recorder.error is not None
    assert len(await read(tmp_path / "t.csv")) == 256


async def test_a_disk_that_hangs_holds_no_put_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()

    def stuck(*args: Any, **knobs: Any) -> Any:
        let_go.wait(GUARD_S)
        return open(*args, **knobs)

    monkeypatch.setattr(record_room, "MOST_PENDING", 600)
    monkeypatch.setattr(record_room, "open", stuck, raising=False)
    async with sb.StreamBalancer(config(capacity=4000)) as balancer:
        recorder = balancer.record(tmp_path / "t.csv")
        await fill(balancer, [1] * 3000)
        assert recorder.error is not None
        assert "600 rows behind" in str(recorder.error)
        assert recorder.num_rollouts < 1000, "nothing is kept for a disk that has stopped"
        let_go.set()


async def test_a_slow_run_is_not_far_behind(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    async with sb.StreamBalancer(config()) as balancer:
        balancer.record(path)
        await balancer.put(make_rollout(1))
        await anyio.sleep(record_room.SECONDS)
        await balancer.put(make_rollout(2))

        def wait_for_the_thread() -> str:
            for _ in range(100 * GUARD_S):
                if path.exists() and path.read_text().count("\n") == 3:
                    break
                time.sleep(0.01)
            return path.read_text()

        text = await anyio.to_thread.run_sync(wait_for_the_thread)
        assert text.splitlines()[1:] == ["alone-0,0,1,0.000", "alone-1,0,2,5.000"]

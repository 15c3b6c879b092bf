"""``stream-balancer watch``: pictures over a private socket and from a file, and what they look like. Real sockets, so
real time: nothing here waits longer than it must."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec
import pytest
from guard import GUARD_S
from helpers import until
from rich.console import Console
from typer.testing import CliRunner, Result

import stream_balancer as sb
from stream_balancer.cli import app
from stream_balancer.controller.serve import serve
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.report import preview
from stream_balancer.rank.feed import RankFeed
from stream_balancer.testing import make_rollout
from stream_balancer.transport.memory import MemoryTransport
from stream_balancer.watch import publish
from stream_balancer.watch.publish import publish_status, status_of
from stream_balancer.watch.status import RankRow, Status, fetch, folder, recording
from stream_balancer.watch.view import picture

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])
CONFIG = sb.BalancerConfig(dp_size=2, batch_size=4, window=8, deadline_s=60.0)


@pytest.fixture(autouse=True)
def private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "stream_balancer"


async def put_some(balancer: sb.StreamBalancer, count: int = 6) -> None:
    for number in range(count):
        await balancer.put(make_rollout(1 + 3 * number))


def text_of(status: Status, before: Status | None = None, *, width: int = 120) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115  # rich closes nothing
    console.print(picture(status, before))
    console.file.close()
    return console.export_text()


def some_status(**changes: Any) -> Status:
    async def main() -> Status:
        async with sb.StreamBalancer(CONFIG) as balancer:
            await put_some(balancer)
            return status_of(balancer, "run 7")

    status = msgspec.json.decode(anyio.run(main).line(), type=Status)
    figures = {name: changes.pop(name) for name in list(changes) if name in status.statistics}
    return with_statistics(msgspec.structs.replace(status, **changes), **figures)


def with_statistics(status: Status, **changes: Any) -> Status:
    return msgspec.structs.replace(status, statistics=status.statistics | changes)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["watch", *map(str, arguments)])


# -- publishing --------------------------------------------------------------------------------------------------------


@BACKENDS
def test_a_viewer_sees_the_balancer(backend: str, private_folder: Path) -> None:
    async def main() -> tuple[Status, int, int]:
        async with sb.StreamBalancer(CONFIG) as balancer, publish_status(balancer, name="run 7") as path:
            await put_some(balancer)
            status = await anyio.to_thread.run_sync(fetch, path)
            return status, stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)

    status, mode, folder_mode = anyio.run(main, backend=backend)
    assert (mode, folder_mode) == (0o600, 0o700)
    assert (status.name, status.pid, status.statistics["waiting"]) == ("run 7", os.getpid(), 6)
    assert status.statistics.keys() == sb.Statistics.__dataclass_fields__.keys()
    assert [row[:2] for row in status.lengths] == [(1, 1), (4, 2), (8, 2), (16, 1)]
    assert status.next_batch is not None
    assert status.next_batch["rollouts"] == 4
    assert "6 of 8 rollouts wait" in status.waits_for
    assert list(private_folder.iterdir()) == [], "the socket is gone with the block"


@BACKENDS
def test_ranks_are_shown_while_serve_runs(backend: str) -> None:
    async def main() -> tuple[Status, Status]:
        transport = MemoryTransport(dp_size=2)
        async with sb.StreamBalancer(CONFIG) as balancer:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve, balancer, transport)
                feed = RankFeed(transport.connect(0, depth=1))
                await put_some(balancer, 8)
                await until(lambda: any(state.connected for state in balancer.rank_states()))
                half = status_of(balancer)
                other = RankFeed(transport.connect(1, depth=1))
                await anext(feed)
                await anext(other)
                both = status_of(balancer)
                tasks.cancel_scope.cancel()
            assert balancer.rank_states() == []
            return half, both

    half, both = anyio.run(main, backend=backend)
    assert [row.state for row in half.ranks] == ["waiting", "not connected"]
    assert half.warnings == ["1 ranks are not connected: 1"]
    assert [(row.state, row.queue) for row in both.ranks] == [("step 0", 1)] * 2
    assert [one["step"] for one in both.in_flight] == [0]


@BACKENDS
def test_no_picture_is_taken_while_nobody_looks_and_viewers_share_one(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 0

    def counted(balancer: sb.StreamBalancer, name: str) -> Status:
        nonlocal taken
        taken += 1
        return status_of(balancer, name)

    monkeypatch.setattr(publish, "status_of", counted)

    async def main() -> None:
        async with sb.StreamBalancer(CONFIG) as balancer, publish_status(balancer, interval_s=1000.0) as path:
            await anyio.sleep(0.05)
            assert taken == 1  # the first, before anything runs
            for _ in range(4):
                await anyio.to_thread.run_sync(fetch, path)
            assert taken == 2

    anyio.run(main, backend=backend)


def test_dear_pictures_are_taken_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(balancer: sb.StreamBalancer, name: str) -> Status:
        time.sleep(0.02)
        return status_of(balancer, name)

    monkeypatch.setattr(publish, "status_of", slow)

    async def main() -> list[Status]:
        async with sb.StreamBalancer(CONFIG) as balancer, publish_status(balancer, interval_s=0.001) as path:
            pictures = []
            for _ in range(3):
                pictures.append(await anyio.to_thread.run_sync(fetch, path))
                await anyio.sleep(0.01)
            return pictures

    one, two, three = anyio.run(main)  # 20 ms of the loop each: one in 4 s
    assert one == two == three


def test_a_viewer_that_does_not_read_and_a_picture_that_fails_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with sb.StreamBalancer(CONFIG) as balancer, publish_status(balancer, interval_s=1e-6) as path:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf:
                deaf.connect(str(path))
                monkeypatch.setattr(publish, "status_of", lambda *_: 1 / 0)
                with pytest.raises(ConnectionResetError, match="went away before it answered"):
                    await anyio.to_thread.run_sync(fetch, path)
                monkeypatch.setattr(publish, "status_of", status_of)
                await put_some(balancer)
                status = await anyio.to_thread.run_sync(fetch, path)
                assert status.statistics["waiting"] == 6

    anyio.run(main)


def test_what_the_block_raises_comes_out_as_it_is() -> None:
    async def main() -> None:
        async with sb.StreamBalancer(CONFIG) as balancer, publish_status(balancer):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        anyio.run(main)


def test_knobs_and_folders_that_cannot_be_are_refused(private_folder: Path) -> None:
    async def main(**knobs: Any) -> None:
        async with sb.StreamBalancer(CONFIG) as balancer, publish_status(balancer, **knobs):
            raise AssertionError("published")

    with pytest.raises(ValueError, match="interval_s must be > 0"):
        anyio.run(lambda: main(interval_s=0.0))
    with pytest.raises(OSError, match="No such file"):
        anyio.run(lambda: main(path="/nowhere/at/all.sock"))
    private_folder.mkdir()
    private_folder.chmod(0o755)
    with pytest.raises(PermissionError, match="a folder of your own that nobody else may enter"):
        anyio.run(main)
    private_folder.rmdir()
    private_folder.symlink_to("/tmp")
    with pytest.raises(PermissionError):
        folder()


def test_a_preview_changes_nothing_and_is_what_leaves() -> None:
    core = BalancerCore(CONFIG)
    assert preview(core.state, 0.0) is None
    for number in range(8):
        core.add(make_rollout(1 + number * number), 0.0)
    before = core.statistics(1.0)
    previewed = preview(core.state, 1.0)
    assert previewed is not None
    assert core.statistics(1.0) == before
    core.verify()
    plan, tokens = previewed
    batch = core.poll(1.0)
    assert batch is not None
    assert (tuple(plan.loads), plan.lower_bound, tokens) == (batch.loads, batch.lower_bound, batch.num_tokens)


# -- recordings and the view -------------------------------------------------------------------------------------------


def test_a_recording_is_read_as_it_was_and_may_be_cut_off(tmp_path: Path) -> None:
    statuses = [some_status(time_s=float(n), name=f"{n}") for n in range(3)]
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(status.line() for status in statuses))
    assert list(recording(path)) == statuses
    path.write_bytes(path.read_bytes()[:-20])
    assert list(recording(path)) == statuses[:2]


@pytest.mark.parametrize("line", [b"nonsense\n", b"{}\n", b'{"time_s": "soon"}\n', b"\xff\n"])
def test_what_is_no_picture_is_told_with_its_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(some_status().line() + line)
    pictures = recording(path)
    next(pictures)
    with pytest.raises(ValueError, match="line 2, is no picture of a balancer"):
        next(pictures)


def test_the_view_says_it_all() -> None:
    status = some_status(
        warnings=["rank 1 takes 1.40 times as long"],
        ranks=[RankRow("working", 1, 2.0)] * 2,
        rank_busy_seconds=[60.0] * 2,
        rank_idle_seconds=[{"no_data": 0.0, "window": 30.0, "transport": 10.0}] * 2,
        batches={"window": 12, "deadline": 0},
        evicted={"stale": 3},
        dispatched_tokens=14_400,
        token_variation=0.24,
    )
    before = with_statistics(status, accepted=1)
    text = text_of(status, msgspec.structs.replace(before, time_s=status.time_s - 10.0))
    for part in (
        "run 7 (pid ",
        "2 ranks, batch 4, window 8, deadline 60 s",
        "6 waiting (75 % of the window)",
        "4 - 7",
        "next batch, if it left now: 4 rollouts",
        "window 30.0%, transport 10.0%",
        "60.0%",
        "12 window",
        "1,200, standard deviation 24% of that",
        "evicted: 3 stale",
        "0.5 rollouts put",
        "! rank 1 takes 1.40 times as long",
    ):
        assert part in text, f"{part!r} is not in\n{text}"
    assert "0 deadline" not in text
    assert "no_data" not in text


def test_of_many_ranks_the_idlest_and_the_busiest_are_shown() -> None:
    busy_s = [float(rank) for rank in range(1000)]
    idle_s = [{"window": 1000.0 - seconds} for seconds in busy_s]
    text = text_of(some_status(ranks=[RankRow()] * 1000, rank_busy_seconds=busy_s, rank_idle_seconds=idle_s))
    assert "of 1000 ranks" in text
    assert text.count("\n") < 50
    for rank in (0, 7, 992, 999):
        assert f"\n{rank:>4} " in text


def test_an_empty_balancer_has_a_picture() -> None:
    async def main() -> Status:
        async with sb.StreamBalancer(CONFIG) as balancer:
            return status_of(balancer)

    assert "nothing waits" in text_of(anyio.run(main))


# -- the command -------------------------------------------------------------------------------------------------------


class Published(NamedTuple):
    path: Path
    stop: Callable[[], None]


@pytest.fixture
def published() -> Iterator[Published]:
    """A balancer in a thread of its own, published until stopped."""
    ready, done = threading.Event(), threading.Event()
    paths: list[Path] = []

    async def main() -> None:
        async with sb.StreamBalancer(CONFIG) as balancer, publish_status(balancer, name="mine") as path:
            await put_some(balancer)
            paths.append(path)
            ready.set()
            await anyio.to_thread.run_sync(done.wait)

    thread = threading.Thread(target=anyio.run, args=[main], daemon=True)
    thread.start()
    assert ready.wait(GUARD_S)

    def stop() -> None:
        done.set()
        thread.join(GUARD_S)

    yield Published(paths[0], stop)
    stop()


def test_the_command_finds_the_balancer(published: Published) -> None:
    for arguments in ((), (os.getpid(),), (published.path,)):
        result = run("--once", *arguments)
        assert result.exit_code == 0, result.output
        assert "mine (pid" in result.stdout
        assert result.stdout.endswith("\n")


def test_the_command_shows_and_records_until_the_balancer_is_gone(published: Published, tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    results: list[Result] = []
    command = threading.Thread(target=lambda: results.append(run("--record", record)), daemon=True)
    command.start()
    while not record.exists() or not record.read_bytes().endswith(b"\n"):
        time.sleep(0.005)
    published.stop()
    command.join(GUARD_S)
    assert results[0].exit_code == 0, results[0].output
    assert "mine (pid" in results[0].stdout
    assert "the balancer is gone" in results[0].stdout
    assert next(recording(record)).statistics["waiting"] == 6


def test_pictures_can_be_had_as_json(published: Published, tmp_path: Path) -> None:
    result = run("--once", "--json")
    assert result.exit_code == 0, result.output
    (tmp_path / "run.jsonl").write_text(result.stdout)
    assert next(recording(tmp_path / "run.jsonl")).name == "mine"


def test_what_dead_processes_left_is_swept_away() -> None:
    dead = folder() / "1-0.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(dead))
    assert "no balancer publishes here" in run().stderr
    assert not dead.exists()


def test_the_command_plays_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(some_status(time_s=n / 100, name=f"picture {n}").line() for n in range(3)))
    played = run(path, "--speed", 100)
    assert played.exit_code == 0, played.output
    assert "picture 2" in played.stdout
    assert "picture 2" in run("--once", path).stdout


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    (tmp_path / "garbage").write_text("no\n")
    for arguments, said in (
        (("--once",), "no balancer publishes here"),
        (("123456789",), "process 123456789 does not publish"),
        ((tmp_path / "absent",), "No such file"),
        ((empty, "--once"), "holds no picture"),
        ((tmp_path / "garbage",), "line 1, is no picture"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert said in result.stderr
        assert "Traceback" not in result.stderr

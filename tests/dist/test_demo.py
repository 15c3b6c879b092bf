"""The demo itself, tiny, with its real processes: what it promises, and how it ends when something goes wrong."""

import contextlib
import io
import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
from forked import started
from guard import GUARD_S
from stream_balancer_demo import main
from stream_balancer_demo.options import DemoOptions
from torch.multiprocessing.spawn import start_processes

TINY = {
    "ranks": 2,
    "workers": 8,
    "rollouts": 40,
    "batch_size": 8,
    "max_length": 64,
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "vocab_size": 32,
    "tokens_per_second": 1e4,
}


BACKENDS = ["asyncio", pytest.param("trio", marks=pytest.mark.slow)]


def whole(**options):
    """What a demo says, from here, to stdout and to stderr. Its ranks are forked: those of `make demo` import torch."""
    out, errors = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        patch.setattr(main, "spawn", partial(start_processes, start_method="forkserver"))
        code = main.run_demo(DemoOptions(**TINY | options))
    assert code == 0, errors.getvalue()
    out.seek(0)
    return out.read(), errors.getvalue()


@pytest.fixture(scope="module", params=BACKENDS)
def result(request, tmp_path_factory):
    """JSON, and what went to stderr, of one tiny demo on a trace of 30 rollouts."""
    trace = tmp_path_factory.mktemp("demo") / "lengths.csv"
    rows = [f"g{i // 3},{5 + i},{(i * i) % 97 + 1}" for i in range(30)]
    trace.write_text("\n".join(["group_id,prompt_tokens,output_tokens", *rows]))
    out, errors = whole(backend=request.param, json=True, trace=trace)
    return json.loads(out), errors


@pytest.mark.slow
def test_every_rollout_is_trained_on_exactly_once_in_both_runs(result):
    report, _ = result
    assert report["exactly_once"] is True
    for run in (report["round_robin"], report["balanced"]):
        assert run["problems"] == []
        assert run["num_rollouts"] == 40
        assert run["num_tokens"] == report["lengths"]["tokens"]
        assert sum(run["reasons"].values()) == run["num_steps"]
        assert len(run["compute_s"]) == 2
        assert all(seconds > 0 for seconds in run["compute_s"])
        assert 0 <= run["idle_fraction"] < 1
        assert run["delay_p50_s"] <= run["delay_p99_s"]


@pytest.mark.slow
def test_balancing_shows_in_the_predicted_loads(result):
    """The measured seconds of so small a model are noise; what was planned is not."""
    report, _ = result
    usual, balanced = (report[name]["predicted_idle_fraction"] for name in ("round_robin", "balanced"))
    assert balanced < usual


@pytest.mark.slow
def test_the_report_says_what_it_ran(result):
    report, stderr = result
    assert report["lengths"]["source"] == "lengths"
    assert report["lengths"]["longest"] == 64
    assert 0 < report["lengths"]["scale"] < 1
    assert report["options"]["ranks"] == 2
    assert report["balanced"]["policy"] == "window"
    assert "8 workers → controller → 2 ranks" in stderr
    assert "balanced" in stderr


@pytest.mark.slow
def test_tables_go_to_stdout():
    out, _ = whole()
    for part in ("round-robin", "balanced", "idle fraction", "Exactly once: in both runs all 40", "multiplied by"):
        assert part in out


@pytest.mark.slow
def test_fewer_rollouts_than_ranks_are_trained_on_once_too():
    report = json.loads(whole(rollouts=1, json=True)[0])
    assert report["exactly_once"] is True
    assert report["balanced"]["num_steps"] == 1


DEMO = "import sys; from stream_balancer_demo import main, options; "
DEMO += "sys.exit(main.run_demo(options.DemoOptions(**eval(sys.argv[1]))))"
INTERRUPTS = """
import os, signal
from multiprocessing import util
start = util.spawnv_passfds
def interrupted(*command):
    started = start(*command)
    os.kill(os.getpid(), signal.SIGINT)
    return started
util.spawnv_passfds = interrupted
"""


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks into /proc")
class TestAccidents:
    """A demo that would run for minutes, interrupted in its first run."""

    @pytest.fixture
    def backend(self):
        return "asyncio"

    @pytest.fixture
    def demo(self, backend):
        """A demo that is running in a process of its own, and its ranks' pids."""
        with started("-c", DEMO, TINY | {"backend": backend, "tokens_per_second": 20.0}) as process:
            yield process, ranks_of(process.pid, 2)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_killed_rank_ends_the_demo_with_an_error_that_names_it(self, demo):
        process, ranks = demo
        os.kill(ranks[1], signal.SIGKILL)
        _, stderr = process.communicate(GUARD_S)
        assert process.returncode == 1
        assert f"rank 1 (process {ranks[1]}) failed" in stderr
        assert "SIGKILL" in stderr
        assert not any(map(is_running, ranks))

    @pytest.mark.parametrize(
        ("backend", "number"),
        [
            ("asyncio", signal.SIGINT),
            pytest.param("trio", signal.SIGINT, marks=pytest.mark.slow),
            pytest.param("asyncio", signal.SIGTERM, marks=pytest.mark.slow),
        ],
    )
    def test_ctrl_c_ends_every_process(self, demo, number):
        process, ranks = demo
        for pid in ranks:
            os.kill(pid, signal.SIGINT)  # a terminal sends it to all
        process.send_signal(number)
        _, stderr = process.communicate(GUARD_S)
        assert process.returncode == 130
        assert "interrupted; all its processes have been ended" in stderr
        assert "Traceback" not in stderr
        assert not any(map(is_running, ranks))

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_ctrl_c_while_it_starts_its_ranks_ends_them_too(self, backend):
        """A rank that has begun has not been told yet what it is to do."""
        with started("-c", INTERRUPTS + DEMO, TINY | {"backend": backend, "tokens_per_second": 20.0}) as process:
            _, stderr = process.communicate(GUARD_S)  # which is read to its end: no rank holds it
        assert process.returncode == 130
        assert "interrupted; all its processes have been ended" in stderr
        assert "Traceback" not in stderr

    @pytest.mark.slow
    @pytest.mark.parametrize("killed_too", [[], [1]], ids=["alone", "with_a_rank"])
    def test_ranks_end_when_the_controller_is_killed(self, demo, killed_too):
        """At once, while ranks still import torch: one may wait for the other, not for the controller."""
        process, ranks = demo
        process.kill()
        for rank in killed_too:
            os.kill(ranks[rank], signal.SIGKILL)
        while any(map(is_running, ranks)):  # as long as the test's own limit allows
            signal.sigtimedwait([], 0.05)


def ranks_of(pid, number):
    """Pids of the ranks, once there are so many, in the order they were started."""
    while True:
        children = {
            int(p) for task in Path(f"/proc/{pid}/task").iterdir() for p in (task / "children").read_text().split()
        }
        if (
            len(ranks := sorted(p for p in children if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()))
            == number
        ):
            return ranks
        signal.sigtimedwait([], 0.05)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

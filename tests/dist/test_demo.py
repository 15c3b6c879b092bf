"""The demo itself, tiny, with its real processes: what it promises, and how it ends when something goes wrong. Whoever
sweeps may be killed, too."""

import contextlib
import io
import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from forked import started
from guard import GUARD_S
from processes import children_of, is_running, wait_until
from stream_balancer_demo import main
from stream_balancer_demo.options import DemoOptions
from torch.multiprocessing.spawn import start_processes

TINY = {
    **{"ranks": 2, "workers": 8, "rollouts": 40, "batch_size": 8, "max_length": 64, "tokens_per_second": 1e4},
    **{"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32},
}


def whole(**options):
    """What a demo says, from here, to stdout and to stderr. Its ranks are forked: those of `make demo` import torch."""
    out, errors = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        patch.setattr(main, "spawn", partial(start_processes, start_method="forkserver"))
        code = main.run_demo(DemoOptions(**TINY | options))
    assert code == 0, errors.getvalue()
    out.seek(0)
    return out.read(), errors.getvalue()


@pytest.mark.slow
def test_every_rollout_is_trained_on_once_in_both_runs_and_the_report_says_so(tmp_path):
    trace = tmp_path / "lengths.csv"
    rows = [f"g{i // 3},{5 + i},{(i * i) % 97 + 1}" for i in range(30)]
    trace.write_text("\n".join(["group_id,prompt_tokens,output_tokens", *rows]))
    out, errors = whole(backend="trio", json=True, trace=trace)
    report = json.loads(out)
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
    # the measured seconds of so small a model are noise; what was planned is not
    assert report["balanced"]["predicted_idle_fraction"] < report["round_robin"]["predicted_idle_fraction"]
    assert (report["lengths"]["source"], report["lengths"]["longest"]) == ("lengths", 64)
    assert 0 < report["lengths"]["scale"] < 1
    assert (report["options"]["ranks"], report["balanced"]["policy"]) == (2, "window")
    assert "8 workers → controller → 2 ranks" in errors


@pytest.mark.slow
def test_fewer_rollouts_than_ranks_are_trained_on_once_too_and_tables_go_to_stdout():
    out, _ = whole(rollouts=1)
    for part in ("round-robin", "balanced", "idle fraction", "Exactly once: in both runs", "multiplied by"):
        assert part in out


DEMO = "import sys; from stream_balancer_demo import main, options; "
DEMO += "sys.exit(main.run_demo(options.DemoOptions(**eval(sys.argv[1]))))"
SWEEP = """
import stream_balancer as sb
trace = sb.generate_trace(20_000, "lrm")
sb.tune(trace, sb.BalancerConfig(dp_size=8, batch_size=32), processes=2)
"""


def ranks_of(pid):
    """Pids of the two ranks, once they are there."""
    ranks = [p for p in children_of(pid) if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]
    return ranks if len(ranks) == 2 else None


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="looks into /proc")
class TestAccidents:
    """A demo that would run for minutes, interrupted in its first run."""

    @pytest.fixture
    def demo(self):
        """A demo that is running in a process of its own, and its ranks' pids."""
        with started("-c", DEMO, TINY | {"tokens_per_second": 20.0}) as process:
            yield process, wait_until(partial(ranks_of, process.pid), "no ranks")

    def test_a_killed_rank_ends_the_demo_with_an_error_that_names_it(self, demo):
        process, ranks = demo
        os.kill(ranks[1], signal.SIGKILL)
        _, stderr = process.communicate(GUARD_S)
        assert process.returncode == 1
        assert f"rank 1 (process {ranks[1]}) failed" in stderr
        assert "SIGKILL" in stderr
        assert not any(map(is_running, ranks))

    @pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
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

    @pytest.mark.slow
    def test_the_processes_of_a_sweep_that_is_killed_end(self):
        with started("-c", SWEEP) as parent:  # all is ended in any case: a whole sweep takes an hour on a slow machine
            wait_until(lambda: len(children_of(parent.pid)) >= 2, "no sweep began")
            time.sleep(1.0)  # they are at work, or still importing: both must do
            children = children_of(parent.pid)
            parent.kill()
            wait_until(lambda: not any(map(is_running, children)), "still running")

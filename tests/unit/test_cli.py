"""The command line: what it prints, and that a mistake is one line and exit code 2, never a traceback."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import stream_balancer
import stream_balancer.tools.shown
from stream_balancer.cli import app

HEADER = "group_id,prompt_tokens,output_tokens\n"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    """The one line of an error."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("stream-balancer: error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return result.stderr.removeprefix("stream-balancer: error: ").strip()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    rows = [f"p{i // 4},{i % 7},{1 + i * i % 500}" for i in range(400)]
    path.write_text(HEADER + "\n".join(rows))
    return path


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ()])
def test_help_names_the_commands(arguments: tuple[str, ...]) -> None:
    assert {"demo", "replay", "tune", "status"} <= {*run(*arguments).output.split()}


def test_the_module_runs_and_says_its_version() -> None:
    command = [sys.executable, "-m", "stream_balancer", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"stream-balancer {stream_balancer.__version__}\n")


class TestReplay:
    def test_it_prints_what_the_readme_says(self) -> None:
        page = (Path(__file__).parents[2] / "README.md").read_text()
        command, shown = page.partition("stream-balancer replay ")[2].split("```")[:3:2]
        said = " ".join(run("replay", *command.split()).output.split())
        table, sentence = shown.strip().rsplit("│\n", 1)
        for line in [*table.split("\n"), sentence]:
            assert " ".join(line.split()).strip("│ ") in said

    def test_table_of_three_policies(self, trace: Path) -> None:
        result = run("replay", trace, "--dp-size", 4, "--batch-size", 16, "--slots", 8)
        assert result.exit_code == 0, result.output
        assert "lengths: 400 rollouts" in result.stdout
        assert "4 ranks, 16 rollouts a step, window 24, max_skips 16, deadline none, cost quadratic" in result.stdout
        for word in ("round-robin", "arrival order", "window", "idle fraction", "wait p50 / p99 / max"):
            assert word in result.stdout
        assert "\x1b" not in result.stderr, "no display where there is no terminal: a line now and then"

    def test_json(self, trace: Path) -> None:
        more = [
            *("--dp-size", 4, "--batch-size", 16, "--window", 48, "--max-skips", 12, "--capacity", 96),
            *("--deadline-s", 500, "--cost", "quadratic", "--slots", 8, "--equal-rollouts", "--seed", 3),
            *("--warm-up", 2, "--json"),
        ]
        result = run("replay", trace, *more)
        assert result.exit_code == 0, result.output
        assert result.stdout.count("\n") == 1
        found: dict[str, Any] = json.loads(result.stdout)
        assert found["trace"]["rollouts"] == 400
        assert found["trace"]["groups"] == 100
        assert [found["knobs"][name] for name in ("window", "deadline_s", "equal_rollouts")] == [48, 500.0, True]
        assert list(found["policies"]) == ["round_robin", "fifo", "window"]
        for report in found["policies"].values():
            assert report["overall"]["rollouts"] == 400
            assert 0 <= report["idle_fraction"] < 1
        assert found["policies"]["window"]["max_skips_seen"] <= 12
        assert run("replay", trace, *more).stdout == result.stdout, "the same seed, the same figures"

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("knobs.yaml", "{dp_size: 4, groups: {size: 2}, cost: 'quadratic:0:1', max_skips: null}"),
            ("knobs.JSON", '{"dp_size": 4, "groups": {"size": 2}, "cost": "quadratic:0:1"}'),
            ("knobs.toml", "dp_size = 4\ncost = 'quadratic:0:1'\n[groups]\nsize = 2"),
        ],
    )  # fmt: skip
    def test_knobs_from_a_file_and_options_on_top(self, trace: Path, tmp_path: Path, name: str, text: str) -> None:
        (path := tmp_path / name).write_text(text)
        result = run("replay", trace, "--config", path, "--batch-size", 8, "--groups.min-size", 1, "--json")
        assert result.exit_code == 0, result.output
        knobs = json.loads(result.stdout)["knobs"]
        assert (knobs["dp_size"], knobs["batch_size"], knobs["groups.size"]) == (4, 8, 2)
        assert knobs["groups.min_size"] == 1
        assert knobs["cost"] == "quadratic:0:1", "as it was given, in a file as by an option"
        assert (knobs["max_skips"] is None) == name.endswith("yaml")
        path.write_text("{" if name != "knobs.toml" else "dp_siz = 4")
        said = "Did you mean dp_size?" if name == "knobs.toml" else f"--config {path}: "
        assert said in refused("replay", trace, "--config", path)
        assert "absent.yaml: " in refused("replay", trace, "--config", tmp_path / "absent.yaml")

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("knobs.yaml", b"\xff\xfe{", "'utf-8' codec can't decode"),
            ("knobs.yaml", b"[1]", "holds a list where a mapping from knobs to values should be. Write one"),
            *(
                (f"knobs.{kind}", b" \n", "holds nothing where a mapping from knobs to values should be. Write one")
                for kind in ("yml", "json", "toml")
            ),
            ("knobs.yaml", b"# dp_size: 8", "holds nothing where a mapping from knobs to values should be. Write one"),
            ("knobs.JSON", b'{"dp_siz": 4}', "Did you mean dp_size?"),
            ("knobs.json", b'{"groups": 4}', "groups must be Groups(...), or a mapping"),
        ],
    )
    def test_a_file_that_holds_no_knobs(self, tmp_path: Path, name: str, content: bytes, said: str) -> None:
        (path := tmp_path / name).write_bytes(content)
        assert said in refused("replay", "generate:rg:50", "--config", path, "--groups.size", 4)

    def test_yaml_is_an_extra(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "yaml", None)
        (path := tmp_path / "knobs.yaml").write_text("dp_size: 8")
        assert "requires PyYAML" in refused("replay", "generate:rg:50", "--config", path)

    def test_a_trainer_that_takes_time_and_a_run_that_is_too_short(self, trace: Path) -> None:
        told = run("replay", trace, "--trainer", "matched").stdout
        assert "end to end, s" in told
        assert "put waited" in told
        told = run("replay", "generate:rg:40").stdout
        assert "put waited" not in told
        assert "Too short a run for a steady state" in told
        assert "left out" not in told, "the figures are of all steps"

    def test_the_cost_of_a_model_by_its_configuration(self, tmp_path: Path) -> None:
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128}
        (model := tmp_path / "config.json").write_text(json.dumps(sizes | {"vocab_size": 1000, "model_type": "llama"}))
        result = run("replay", "generate:rg:400", "--cost", model, "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["knobs"]["cost"] == str(model)


class TestMistakes:
    def test_a_trace_that_cannot_be_read(self, tmp_path: Path) -> None:
        assert "absent.csv: cannot be read" in refused("replay", tmp_path / "absent.csv")
        (path := tmp_path / "bad.csv").write_text(HEADER + "1,2,3\n1,2,x\n")
        assert "bad.csv, line 3: Expected `int`, got `str` - at `$.output_tokens`" in refused("replay", path)
        assert "no length model is called 'help'; use one of rg, lrm" in refused("replay", "generate:help")
        assert "'many' is not a number of rollouts. Write generate:rg:20000" in refused("replay", "generate:rg:many")
        assert "at least 1 rollout, not 0" in refused("replay", "generate:rg:0")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--window", 8), "window (8) must be >= batch_size (32)"),
            (("--dp-size", 0), "--dp-size 0: must be an int >= 1"),
            (("--deadline-s", "nan"), "--deadline-s nan: must be a finite number"),
            (("--slots", 0), "slots (0) must be >= 1"),
            (("--tokens-per-second", 0), "tokens_per_second (0.0) a finite number > 0"),
            (("--warm-up", -1), "warm_up must be >= 0"),
            (("--rollouts", 0), "at least 1 rollout must be drawn"),
            (("--seed", -1), "seed must be >= 0, not -1"),
            (("--scale", 0), "the scale must be a finite number > 0"),
            (("--trainer", "fast"), "--trainer fast: must be instant, matched, or a number"),
            (("--trainer", "-3"), "trainer must be 'instant', 'matched' or work units per second"),
            (("--cost", "flops"), "cost 'flops': no such cost model. Use tokens"),
            (("--cost", "absent.json"), "cost 'absent.json': "),
            (("--micro-batches.max-tokens", 50, "--sync", "step"), "above micro_batches.max_tokens (50)"),
        ],
    )
    def test_every_refused_knob_is_one_line(self, trace: Path, options: tuple[object, ...], message: str) -> None:
        assert message in refused("replay", trace, *options)

    @pytest.mark.parametrize(
        ("command", "option", "value", "message"),
        [
            ("tune", "--windows", "4;8", "--windows 4;8: must be numbers with commas between, as in 32,64"),
            ("tune", "--deadlines", "never", "--deadlines never: must be numbers with commas between, or none among"),
            ("tune", "--max-age", -1, "max_added_age must be a finite number of steps >= 0, not -1.0"),
            ("tune", "--plot", "front.png", "a plot is called something.html, not 'front.png'"),
            ("tune", "--capacities", "8", "capacities need a trainer that takes time"),
            *(
                ("demo", "--tokens-per-second", value, "tokens_per_second must be a finite number > 0")
                for value in (0, "nan")
            ),
            ("demo", "--hidden-size", 3, "hidden_size (3) must be a multiple of 2 x num_heads (8)"),
            ("demo", "--seed", -1, "seed must be >= 0, not -1"),
            *(("demo", name, 0, " must be >= 1, not 0") for name in ("--num-heads", "--max-length", "--workers")),
        ],
    )
    def test_so_is_an_option_of_another_command(
        self, trace: Path, command: str, option: str, value: object, message: str
    ) -> None:
        if command == "demo":
            pytest.importorskip("stream_balancer_demo.main")
        assert message in refused(*([command] if command == "demo" else [command, trace]), option, value)


class TestDemo:
    def test_options_reach_the_demo(self, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        main = pytest.importorskip("stream_balancer_demo.main")
        seen: list[Any] = []

        def run_demo(options: Any) -> int:
            seen.append(options)
            return 0

        monkeypatch.setattr(main, "run_demo", run_demo)
        result = run(
            "demo", "--ranks", 2, "--workers", 8, "--rollouts", 64, "--batch-size", 16, "--window", 48,
            "--deadline-s", 2.5, "--trace", trace, "--scale", 0.5, "--seed", 7, "--backend", "trio", "--json",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        (options,) = seen
        assert (options.ranks, options.workers, options.rollouts, options.batch_size) == (2, 8, 64, 16)
        assert (options.window, options.deadline_s, options.trace, options.scale) == (48, 2.5, trace, 0.5)
        assert (options.seed, options.backend, options.json) == (7, "trio", True)
        assert run("demo").exit_code == 0
        assert seen[1] == type(options)()
        assert logging.getLogger("stream_balancer").level == logging.NOTSET  # as it was


@pytest.mark.usefixtures("short_sweeps")
class TestTune:
    OPTIONS = ("--dp-size", 2, "--batch-size", 4, "--slots", 8, "--windows", "4,8", "--max-skips", 12, "--processes", 1)

    def test_table_and_recommendation(self, trace: Path) -> None:
        result = run("tune", trace, *self.OPTIONS)
        assert result.exit_code == 0, result.output
        assert "lengths: 400 rollouts a run; 2 ranks, 4 rollouts a step" in result.stdout
        for word in ("round-robin", "arrival order", "recommended", "added age", "Recommended: window="):
            assert word in result.stdout
        assert "\x1b" not in result.stderr, "no display where there is no terminal: a line now and then"

    @pytest.mark.slow
    def test_json_and_a_picture(self, trace: Path, tmp_path: Path) -> None:
        picture = tmp_path / "front.html"
        result = run("tune", trace, *self.OPTIONS, "--deadlines", "none,60", "--json", "--plot", picture)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        tried = [(o["window"], o["deadline_s"]) for o in found["outcomes"]]
        assert tried == [(4, None), (4, 60.0), (8, None), (8, 60.0)]
        assert picture.read_text().startswith("<!doctype html>")

    def test_with_a_trainer_that_takes_time_window_and_capacity(self, trace: Path) -> None:
        result = run("tune", trace, *self.OPTIONS, "--trainer", "matched", "--capacities", "8,16")
        assert result.exit_code == 0, result.output
        for word in ("whole", "capacity", " / 16", "put", "Recommended: window="):
            assert word in result.stdout
        assert "the wait for rollouts included" in " ".join(result.stdout.split())

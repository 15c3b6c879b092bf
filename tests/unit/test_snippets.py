"""Every Python block of every page runs: by itself, as an excerpt of an example that runs, or as a fragment on a stage
(tests/snippets/<page>_<number>.py) that has what the fragment takes for granted."""

from __future__ import annotations

import importlib
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked import run_python
from typer.testing import CliRunner

from stream_balancer.cli import app

ROOT = Path(__file__).parents[2]
STAGES = ROOT / "tests" / "snippets"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
# they need the trainers' packages: tests/integrations calls what they show, but for blocks that have a stage
ELSEWHERE = {"adapters", "scale", "trainers", "trl", "verl"}
_BLOCK = re.compile(r"(?:<!-- from (\S+) -->\n)?```python\n(.*?)```", re.S)
_PLACE = re.compile(r"^( *)pass  # the snippet(?:: (.*?) -> (.*?))?$", re.M)


@dataclass(frozen=True)
class Snippet:
    page: str
    number: int
    excerpt_of: str | None
    code: str

    @property
    def stage(self) -> Path:
        return STAGES / f"{self.page}_{self.number}.py"

    def program(self) -> str:
        if not self.stage.exists():
            return self.code
        stage = self.stage.read_text()
        place = _PLACE.search(stage)
        assert place is not None, f"{self.stage.name} has no line 'pass  # the snippet'"
        code = self.code if place[2] is None else self.code.replace(place[2], place[3])
        assert place[2] is None or place[2] in self.code, f"{self.stage.name} replaces what the snippet does not have"
        return stage[: place.start()] + textwrap.indent(code, place[1]) + stage[place.end() :]


EVERYWHERE = [
    Snippet(page.stem, number, found[1] or None, found[2])
    for page in PAGES
    for number, found in enumerate(_BLOCK.finditer(page.read_text()))
]
ALL = [snippet for snippet in EVERYWHERE if snippet.page not in ELSEWHERE or snippet.stage.exists()]


def name(snippet: Snippet) -> str:
    return f"{snippet.page}-{snippet.number}"


@pytest.mark.parametrize("snippet", [s for s in ALL if s.excerpt_of is None or s.stage.exists()], ids=name)
def test_it_runs(snippet: Snippet, tmp_path: Path) -> None:
    done = run_python("-c", snippet.program(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("snippet", [s for s in ALL if s.excerpt_of is not None], ids=name)
def test_it_is_what_the_example_says(snippet: Snippet) -> None:
    assert snippet.excerpt_of is not None
    example = [line.strip() for line in (ROOT / snippet.excerpt_of).read_text().splitlines()]
    for line in snippet.code.splitlines():
        said = line.strip()
        assert said in ("", "...") or said in example, f"{snippet.excerpt_of} has no line {line!r}"


COMPARED_ELSEWHERE = {
    "cost-3": "the loss is the reader's",
    "trl-3": "tests/integrations/torch_data_rank.py",
    "trl-4": "tests/integrations/torch_data_rank.py",
}


@pytest.mark.parametrize("snippet", [s for s in EVERYWHERE if re.search(r"backward\(|global_num_", s.code)], ids=name)
def test_a_loss_of_a_page_is_compared_with_sequences_by_themselves(snippet: Snippet) -> None:
    if name(snippet) in COMPARED_ELSEWHERE:
        return
    assert re.search(r"_of_sequences\(|weight.item\(\) - 0.36", snippet.stage.read_text())


def test_every_stage_has_its_snippet() -> None:
    staged = {snippet.stage.name for snippet in ALL}
    assert {path.name for path in STAGES.glob("*_*.py")} - {"_stage.py"} <= staged
    assert len(ALL) >= 20


PROGRAM = "stream-balancer "
COMMANDS = [line.removeprefix(PROGRAM) for line in PAGES[0].read_text().splitlines() if line.startswith(PROGRAM)]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readmes_commands_run_on_few_rollouts(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_sweeps: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.import_module("stream_balancer.tools.tune"), "LEAST_BATCHES", 12)
    few, changes = re.subn(r"generate:(\w+):\d+", r"generate:\1:400", command)
    assert changes == 1
    done = CliRunner().invoke(app, few.split())
    assert done.exit_code == 0, done.output
    assert "idle" in done.stdout

"""Snippets of the README, docs/staleness.md and docs/tuning.md run, or are pieces of examples that run; every link
leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = [ROOT / "README.md", ROOT / "docs" / "staleness.md", ROOT / "docs" / "tuning.md"]
SNIPPETS = [
    found
    for page in RUN
    for found in re.findall(r"(<!-- from (\S+) -->\n)?```python\n(.*?)```", page.read_text(), re.S)
]


@pytest.mark.parametrize("code", [code for _, of, code in SNIPPETS if not of])
def test_snippets_run(code: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("of", "code"), [(of, code) for _, of, code in SNIPPETS if of])
def test_excerpts_are_what_the_example_says(of: str, code: str) -> None:
    example = [line.strip() for line in (ROOT / of).read_text().splitlines()]
    for line in code.splitlines():
        assert not line.strip() or line.strip() == "..." or line.strip() in example, f"{of} has no line {line!r}"


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_name_targets_and_files_that_exist(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for target in re.findall(r"^(?:\$ )?make ([a-z-]+)", text, re.M):
        assert target in targets, target
    for script in re.findall(r"(?:bench|examples)/\w+\.py", text):
        assert (ROOT / script).exists(), script

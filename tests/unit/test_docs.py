"""Pages, help() and docstrings: links lead somewhere, names exist, every field is explained, every example runs."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import pydoc
import re
from importlib import import_module
from pathlib import Path

import pytest
from architecture import modules

import stream_balancer as sb
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.host.journal import Recovered
from stream_balancer.statistics import CostFit, Straggler

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MEASURED = sorted((ROOT / "bench" / "results").glob("*.md"))


@pytest.mark.parametrize(
    "page", [*PAGES, *MEASURED, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_pages_that_the_code_names_exist() -> None:
    named = {
        (page, path.relative_to(ROOT).as_posix())
        for folder in ("stream_balancer", "bench", "examples", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for page in re.findall(r"\b(?:docs|bench/results)/\w+\.md", path.read_text())
    }
    assert named
    assert {(page, path) for page, path in named if not (ROOT / page).exists()} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_name_targets_and_files_that_exist(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for target in re.findall(r"^(?:\$ )?make ([a-z-]+)", text, re.M):
        assert target in targets, target
    for script in re.findall(r"(?:bench|examples)/\w+\.py", text):
        assert (ROOT / script).exists(), script


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda p: p.name)
def test_every_page_is_in_the_sites_navigation(page: Path) -> None:
    assert f": {page.name}\n" in (ROOT / "mkdocs.yml").read_text(), f"add {page.name} to nav in mkdocs.yml"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_names_of_the_library_exist(page: Path) -> None:
    text = page.read_text()
    for name in set(re.findall(r"\bsb\.([A-Za-z]\w+)", text)):
        assert hasattr(sb, name), f"sb.{name}"
    for name in set(re.findall(r"statistics\(\)\.(\w+)", text)):
        assert name in sb.Statistics.__dataclass_fields__ or hasattr(sb.Statistics, name), f"statistics().{name}"


@pytest.mark.parametrize(
    "page", [*PAGES, *MEASURED, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name
)
def test_anchors_of_links_are_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        linked = page.parent / target if target else page
        headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", linked.read_text(), flags=re.S), re.M)
        assert anchor in map(_anchor, headings), f"{page.name} links to {target}#{anchor}"


def _anchor(heading: str) -> str:
    """As the site and GitHub make it."""
    words = re.sub(r"[`*]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", words))


CLASSES = [
    sb.MicroBatches, sb.Rollout, sb.rollouts.MicroBatch, sb.rollouts.RankBatch, sb.Batch, sb.Statistics, Snapshot,
    Straggler, CostFit, Recovered,
]  # fmt: skip


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_help_explains_every_public_field(cls: type) -> None:
    shown = pydoc.plain(pydoc.render_doc(cls))
    text = inspect.getdoc(cls)
    assert text is not None
    for field in dataclasses.fields(cls):
        if not field.name.startswith("_"):
            _, found, after = text.partition(f"\n    {field.name}:\n        ")
            assert found, field.name
            assert after.split("\n")[0] in shown


WITH_EXAMPLES = [module for module, path in modules().items() if ">>> " in path.read_text()]
VALUES = {"OversizeError", "Plan", "PlanKnobs", "Waiting", "LengthBiasSummary"}  # shown where they are made
MUST_HAVE = [
    *(getattr(sb.planning, name) for name in sb.planning.__all__ if name not in VALUES),
    *(getattr(sb.cost, name) for name in sb.cost.__all__ if name.endswith("Cost")),
    sb.rollouts.MicroBatch,
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_give_what_they_show(module: str) -> None:
    result = doctest.testmod(import_module(module))
    assert result.failed == 0
    assert result.attempted > 0


@pytest.mark.parametrize("thing", MUST_HAVE, ids=lambda thing: thing.__name__)
def test_what_computes_has_an_example(thing: object) -> None:
    assert "Examples:\n" in (thing.__doc__ or "")

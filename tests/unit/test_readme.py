"""Every link of the pages leads somewhere, every command names what exists. Their code: test_snippets.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import stream_balancer as sb

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


def test_the_page_of_files_that_a_run_executes_names_files_that_exist() -> None:
    rows = re.findall(r"^\| `([\w/]+)` \|.*\| (.*) \|$", (ROOT / "docs" / "run_files.md").read_text(), re.M)
    package = ROOT / "stream_balancer"
    files = [
        (package if folder == package.name else package / folder) / f"{name}.py"
        for folder, names in rows
        for name in re.findall(r"`(\w+)`", names)
    ]
    assert len(files) > 50
    assert [path for path in files if not path.exists()] == [], "python docs/_site/run_files.py writes it anew"


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

"""The documentation site in a browser: at a desk and on a phone, by day and by night, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chromium import VIEWS, Browser
from visits import HERE, ROOT, Served, Visit, visit

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

FAULTS = """<!doctype html><meta name="viewport" content="width=device-width"><title>faults</title>
<style>body { color: #222; background: #fff }</style>
<p style="width: 2000px">too wide</p>
<div style="overflow: hidden"><p style="position: relative; left: 1290px; white-space: nowrap">cut off</p></div>
<table><td style="max-width: 40px; word-break: break-all"><code>a_name_that_is_broken</code></table>
<p style="color: #ccc">faint</p><p style="font-size: 6px">small</p>
<script>console.error("a complaint"); fetch("https://example.invalid/font.woff2").catch(() => 0)</script>
<img src="missing.png"><img src="other.svg">
"""
OTHER = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 4000 400" width="400">
<text x="9" y="50" font-size="30">words on no background</text></svg>"""


def stumbles(visits: dict[str, Visit], *kinds: str) -> list[str]:
    """Page, view and what was found there of these kinds."""
    return [
        f"{page} {view.width_px} px {view.scheme}: {kind}: {what}"
        for page, about in visits.items()
        for view, found in about.seen.items()
        for kind in kinds
        for what in found[kind]
    ]


def test_each_fault_is_found(browser: Browser, serve: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of a page that has one of each: otherwise the tests below could not fail."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "page.html").write_text(FAULTS)
    (folder / "other.svg").write_text(OTHER)
    served = serve(folder)
    page = served.url + "page.html"
    found = visit(browser, page)
    for view, seen in found.seen.items():
        assert seen["scroll"] == [f"the page is 2008 px wide on {view.width_px} px"]
        assert any("cut off" in what for what in seen["cut"])
        assert [what for what in seen["faint"] if "faint" in what]
        assert len(seen["faint"]) == len(seen["small"]) == 1
        assert seen["split"] == ["<code> a_name_that_is_broken"]
        assert seen["pictures"] == [served.url + "missing.png"]
    assert any("a complaint" in said for said in found.complaints)
    assert [url for url in found.requests if not url.startswith(served.url)] == ["https://example.invalid/font.woff2"]
    browser.ask("document.querySelector('img').remove()")
    (picture,) = browser.ask((HERE / "pictures.js").read_text())
    assert picture["words"] == pytest.approx(3.0)
    assert picture["clear"] > 0.9


def test_the_site_has_every_page(built: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages <= {path.parent.name for path in built.rglob("index.html")}


def test_every_page_is_opened_and_nothing_complains(visits: dict[str, Visit]) -> None:
    assert len(visits) > len(list((ROOT / "docs").glob("*.md")))
    assert [f"{page}: {said}" for page, about in visits.items() for said in about.complaints] == []


def test_nothing_is_asked_of_another_machine(visits: dict[str, Visit], site: Served) -> None:
    asked = {url for about in visits.values() for url in about.requests}
    assert len(asked) > len(visits)
    assert sorted(url for url in asked if not url.startswith(site.url)) == []


def test_no_page_scrolls_sideways_and_nothing_is_cut_off(visits: dict[str, Visit]) -> None:
    assert stumbles(visits, "scroll", "cut") == []


def test_words_can_be_read(visits: dict[str, Visit]) -> None:
    assert stumbles(visits, "faint", "small", "split") == []


def test_pictures_load_and_can_be_read_by_day_and_night(
    browser: Browser, visits: dict[str, Visit], site: Served
) -> None:
    """A picture knows nothing of the page's colours, so it needs a background of its own."""
    shown, wrong = set(), stumbles(visits, "pictures")
    for page, about in visits.items():
        if not any(url.endswith((".svg", ".png")) and "/pictures/" in url for url in about.requests):
            continue
        browser.open(page)
        for view in VIEWS:
            browser.look(view)
            for picture in browser.ask((HERE / "pictures.js").read_text()):
                shown.add(picture["src"].rpartition("/")[2])
                if picture["clear"] > 0.0:
                    wrong.append(f"{page}: what is behind {picture['src']} shows")
                if picture["strong"] < 0.005:
                    wrong.append(f"{page}: nothing stands out in {picture['src']}")
                if picture["words"] is not None and picture["words"] < 8.0:
                    wrong.append(f"{page} {view.width_px} px: words of {picture['words']:.1f} px in {picture['src']}")
    assert wrong == []
    assert shown == {path.name for path in (ROOT / "docs" / "pictures").iterdir()}

"""The page of ``stream-balancer tune --plot`` in a browser: a file that one opens, mails and keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from chromium import VIEWS, Browser, View

import stream_balancer as sb
from stream_balancer.tools.plot import write_plot

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


class Visit(NamedTuple):
    """What a browser found on a page."""

    seen: dict[View, dict[str, Any]]
    complaints: list[str]
    requests: list[str]


def visit(browser: Browser, url: str) -> Visit:
    """Load the page once, and look at it in every way."""
    browser.complaints(), browser.requests()  # of the page before
    browser.look(VIEWS[0])
    browser.open(url)
    script = (Path(__file__).parent / "look.js").read_text()
    seen = {}
    for view in VIEWS:
        browser.look(view)
        seen[view] = browser.ask(script, view.width_px)
    return Visit(seen, browser.complaints(), browser.requests())


@pytest.fixture(scope="module")
def opened(browser: Browser, tmp_path_factory: pytest.TempPathFactory, short_sweeps: None) -> Visit:
    config = sb.BalancerConfig(dp_size=8, batch_size=32, cost=sb.cost.QuadraticCost())
    report = sb.tune(sb.generate_trace(200, "lrm"), config, windows=[32, 64], max_skips=[8, 16, 32], deadlines_s=[None])
    path: Path = tmp_path_factory.mktemp("tune") / "front.html"
    write_plot(report, path)
    return visit(browser, path.as_uri())


def test_nothing_complains_and_nothing_is_fetched(opened: Visit) -> None:
    assert opened.complaints == opened.requests == []


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: f"{view.width_px}-{view.scheme}")
def test_it_fits_and_can_be_read(opened: Visit, view: tuple[int, int, str]) -> None:
    found = opened.seen[view]
    assert [*found["scroll"], *found["cut"], *found["faint"], *found["small"]] == []


def test_it_is_as_light_or_dark_as_the_system(browser: Browser, opened: Visit) -> None:
    paper = {}
    for view in VIEWS:
        browser.look(view)
        paper[view.scheme] = browser.ask("return getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(26, 31, 39)"}


def test_a_dot_says_which_setting_it_is_and_the_chosen_one_is_on_top(browser: Browser, opened: Visit) -> None:
    browser.look(VIEWS[0])
    said = browser.ask(
        "return [...document.querySelectorAll('circle')].map(dot => { const box = dot.getBoundingClientRect();"
        "scrollTo(0, box.top - 100); const at = dot.getBoundingClientRect();"
        "const top = document.elementFromPoint(at.x + at.width / 2, at.y + at.height / 2);"
        "return [dot.querySelector('title').textContent, top === dot, dot.getAttribute('r')] })"
    )
    assert len(said) == 6
    assert all("idle" in title for title, _, _ in said)
    assert [on_top for _, on_top, radius in said if radius == "6"] == [True]

"""What a browser finds on the pages of a served folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from chromium import VIEWS, Browser, View

__all__ = ["HERE", "ROOT", "Served", "Visit", "nothing_to_search", "visit"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Served(NamedTuple):
    """A folder, and where it is served."""

    folder: Path
    url: str


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
    script = (HERE / "look.js").read_text()
    seen = {}
    for view in VIEWS:
        browser.look(view)
        seen[view] = browser.ask(script, view.width_px)
    return Visit(seen, browser.complaints(), browser.requests())


@contextmanager
def nothing_to_search(site: Served) -> Iterator[None]:
    """Otherwise every page indexes the whole site when it is opened, which takes as long as all else."""
    path = site.folder / "search" / "search_index.json"
    whole = path.read_bytes()
    path.write_text(json.dumps(json.loads(whole) | {"docs": []}))
    yield
    path.write_bytes(whole)

"""What a browser finds on the pages of a served folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urldefrag

from chromium import VIEWS, Browser, View

__all__ = ["HERE", "ROOT", "Served", "Visit", "broken", "nothing_to_search", "visit"]

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
    links: list[str]
    ids: set[str]


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
    links, ids = browser.ask(
        "return [[...document.querySelectorAll('a[href]')].map(a => a.href), "
        "[...document.querySelectorAll('[id], a[name]')].map(e => e.id || e.name)]"
    )
    return Visit(seen, browser.complaints(), browser.requests(), links, set(ids))


def broken(visits: dict[str, Visit], served: Served) -> list[str]:
    """Links of these pages (address -> what was found) to nowhere; those that leave the site are not followed."""
    found = []
    for page, about in visits.items():
        for link in sorted({link for link in about.links if link.startswith(served.url)}):
            url, anchor = urldefrag(link)
            if url in visits:
                if anchor and anchor not in visits[url].ids:
                    found.append(f"{page}: {link}: no such place on that page")
            elif not (served.folder / url.removeprefix(served.url)).is_file():
                found.append(f"{page}: {link}: no such page")
    return found


@contextmanager
def nothing_to_search(site: Served) -> Iterator[None]:
    """Otherwise every page indexes the whole site when it is opened, which takes as long as all else."""
    path = site.folder / "search" / "search_index.json"
    whole = path.read_bytes()
    path.write_text(json.dumps(json.loads(whole) | {"docs": []}))
    yield
    path.write_bytes(whole)

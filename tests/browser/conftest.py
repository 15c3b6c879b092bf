"""A browser for all tests of a run, and the site as `make docs` builds it, served on loopback."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urldefrag

import pytest
from chromium import VIEWS, Browser, View, chromium, missing

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quietly."""


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


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if reason := missing():
        pytest.skip(reason)
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="session")
def serve() -> Iterator[Any]:
    """A function: folder -> Served."""
    servers: list[ThreadingHTTPServer] = []

    def start(folder: Path) -> Served:
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=folder))
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return Served(folder, f"http://127.0.0.1:{server.server_port}/")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="session")
def site(browser: Browser, serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Served:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed (pip install -e '.[docs]')")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", folder], cwd=ROOT, check=True)
    served: Served = serve(folder)
    return served


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


@pytest.fixture(scope="session")
def visits(browser: Browser, site: Served) -> dict[str, Visit]:
    """Address of every page of the site -> what was found there."""
    pages = sorted(path.relative_to(site.folder).as_posix() for path in site.folder.rglob("*.html"))
    with nothing_to_search(site):
        return {url: visit(browser, url) for url in (site.url + page.removesuffix("index.html") for page in pages)}


@contextmanager
def nothing_to_search(site: Served) -> Iterator[None]:
    """Otherwise every page indexes the whole site when it is opened, which takes as long as all else."""
    path = site.folder / "search" / "search_index.json"
    whole = path.read_bytes()
    path.write_text(json.dumps(json.loads(whole) | {"docs": []}))
    yield
    path.write_bytes(whole)

"""A browser for all tests of a run, and the site as `make docs` builds it, served on loopback."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser, chromium, missing
from visits import ROOT, Served, Visit, nothing_to_search, visit


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quietly."""


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
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site; warnings are errors. Needs no browser."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed (pip install -e '.[docs]')")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]  # with -q it counts no warnings
    ran = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    return folder


@pytest.fixture(scope="session")
def site(browser: Browser, serve: Any, built: Path) -> Served:
    served: Served = serve(built)
    return served


@pytest.fixture(scope="session")
def visits(browser: Browser, site: Served) -> dict[str, Visit]:
    """Address of every page of the site -> what was found there."""
    pages = sorted(path.relative_to(site.folder).as_posix() for path in site.folder.rglob("*.html"))
    with nothing_to_search(site):
        return {url: visit(browser, url) for url in (site.url + page.removesuffix("index.html") for page in pages)}

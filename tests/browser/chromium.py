"""A headless Chromium that tells what it was asked for and what it complained of. It reaches this machine only."""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from selenium import webdriver

__all__ = ["VIEWS", "Browser", "View", "chromium", "missing"]

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",  # it may run as root, in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
_WITHIN = {"about", "blob", "chrome", "chrome-untrusted", "data", "file"}
"""Schemes of what is not fetched over a network."""
_TIMEOUT_S = 120.0


class View(NamedTuple):
    """How a page is looked at."""

    width_px: int
    height_px: int
    scheme: str


VIEWS = (View(1280, 800, "light"), View(1280, 800, "dark"), View(390, 844, "dark"), View(390, 844, "light"))
"""A desk and a phone, by day and by night; from one to the next one thing changes, which is quick."""


def missing() -> str | None:
    """What is not installed here, or None."""
    if importlib.util.find_spec("selenium") is None:
        return "Selenium is not installed (pip install -e '.[browser]')"
    if not any(map(shutil.which, _BROWSERS)):
        return "Chromium is not installed (Debian: apt-get install chromium chromium-driver)"
    if not shutil.which("chromedriver"):
        return "ChromeDriver is not installed (Debian: apt-get install chromium-driver)"
    return None if shutil.which("setpriv") else "setpriv of util-linux is not installed"


class Browser:
    """One tab."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Load the page and wait until everything in it has been fetched."""
        self.driver.get(url)

    def look(self, view: View) -> None:
        """Show the open page so."""
        size = {"width": view.width_px, "height": view.height_px, "deviceScaleFactor": 1, "mobile": view.width_px < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": view.scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def screenshot(self) -> bytes:
        """The whole page as PNG, also what lies below."""
        how = {"format": "png", "captureBeyondViewport": True}
        return base64.b64decode(self.driver.execute_cdp_cmd("Page.captureScreenshot", how)["data"])

    def ask(self, script: str, *arguments: Any) -> Any:
        """What the body of a JavaScript function, which may be awaited in, returns."""
        done = "const done = arguments[arguments.length - 1];"
        run = f"(async (...given) => {{{script}}})(...arguments).then(done, error => done({{failed: String(error)}}))"
        found = self.driver.execute_async_script(done + run, *arguments)
        if isinstance(found, dict) and "failed" in found:
            raise RuntimeError(found["failed"])
        return found

    def complaints(self) -> list[str]:
        """Warnings and errors on the console since the last call."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses asked for since the last call, over a network."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if urlsplit(url).scheme not in _WITHIN]


def _ending_with_its_parent(program: str, folder: Path) -> str:
    """A command that runs the program, which is killed when whoever started it dies."""
    command = folder / f"{program}_for_tests"
    command.write_text(f'#!/bin/sh\nexec setpriv --pdeathsig KILL {program} "$@"\n')
    command.chmod(0o700)
    return str(command)


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser of its own, with an empty ``profile``; closed afterwards."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = _ending_with_its_parent(next(filter(shutil.which, _BROWSERS)), profile.parent)
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = Service(_ending_with_its_parent("chromedriver", profile.parent))  # named: else Selenium downloads one
    driver = webdriver.Chrome(options, service)
    try:
        driver.set_page_load_timeout(_TIMEOUT_S)
        driver.set_script_timeout(_TIMEOUT_S)
        yield Browser(driver)
    finally:
        driver.quit()

"""What a user looks at, as pictures in docs/pictures/: ``make screenshots``, in about three minutes.

``tune_terminal.svg`` and ``tune_page.png``: the command `tune`, and its page in Chromium. ``status.svg``: the command
`status` during a run of eight ranks (``live.py``). ``dashboard.svg``: the Grafana dashboard's panels, from its own
queries to a Prometheus that scraped that run (``dashboard.py``). Needs Chromium, ChromeDriver and Prometheus.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import anyio
import matplotlib as mpl
from PIL import Image
from rich.console import Console, Group, RenderableType
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
sys.path.append(str(ROOT / "tests" / "browser"))

mpl.use("svg")
mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "stream_balancer", "font.family": "sans-serif"}
import dashboard  # noqa: E402 - after use()
from chromium import Browser, View, chromium  # noqa: E402
from live import training  # noqa: E402

from stream_balancer.cli.status import page, read  # noqa: E402
from stream_balancer.metrics.prometheus import exporter  # noqa: E402

TUNE = "tune generate:lrm:1000 --dp-size 8 --batch-size 32 --cost quadratic --plot front.html"
RUN_S, RATES_OVER_S = 100, 10
COLUMNS = 124
_ANSI = [(40, 44, 52), (224, 108, 117), (152, 195, 121), (229, 192, 123), (97, 175, 239), (198, 120, 221)]
_ANSI += [(86, 182, 194), (171, 178, 191)]
THEME = TerminalTheme((24, 27, 31), (204, 204, 220), _ANSI, _ANSI)
# Rich's own format fetches a font from elsewhere.
TERMINAL = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
text {{ font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px; white-space: pre }}
{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
<rect width="100%" height="100%" fill="#181b1f"/>
<g transform="translate(9, 20)">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


def save_terminal(shown: RenderableType, name: str) -> None:
    """What a terminal would show."""
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(shown)
    svg = console.export_svg(theme=THEME, code_format=TERMINAL, unique_id=name)
    (PICTURES / f"{name}.svg").write_text(svg)


def draw_tune(browser: Browser, folder: Path) -> None:
    """The command's output, and its page."""
    command = [sys.executable, "-m", "stream_balancer", *TUNE.split()]
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    save_terminal(Text.from_ansi(f"$ stream-balancer {TUNE}\n{said}"), "tune_terminal")
    browser.look(View(760, 800, "light"))
    browser.open((folder / "front.html").as_uri())
    with Image.open(io.BytesIO(browser.screenshot())) as shot:
        shot.convert("RGB").quantize(128, kmeans=1).save(PICTURES / "tune_page.png", optimize=True)


async def draw_run(folder: Path) -> None:
    """`status` at the end of a run, and the dashboard over all of it."""
    async with (
        training(step_s=0.8, slow_after_steps=RUN_S // 2) as balancer,
        exporter(balancer, port=0) as port,
    ):
        source = f"http://127.0.0.1:{port}/metrics"
        with dashboard.prometheus(folder, port, "1s") as url:
            since_s = time.time()
            await anyio.sleep(RUN_S - RATES_OVER_S)
            before = await anyio.to_thread.run_sync(read, source)
            await anyio.sleep(RATES_OVER_S)
            now = await anyio.to_thread.run_sync(read, source)
            save_terminal(Group("$ stream-balancer status", page(now, before)), "status")
            answered = [
                (panel, [line for query, legend in panel.queries for line in await ask(url, query, legend, since_s)])
                for panel in dashboard.panels("15s")
            ]
    drawn = io.StringIO()
    dashboard.draw(answered, since_s).savefig(drawn, format="svg", metadata={"Date": None})
    small = re.sub(r"font-family: [^;]*;", "font-family: sans-serif;", drawn.getvalue())  # a long list, at every word
    small = re.sub(r"(\d\.\d)\d+", r"\1", small)  # a tenth of a point is enough
    (PICTURES / "dashboard.svg").write_text(small)


async def ask(url: str, query: str, legend: str, since_s: float) -> list[dashboard.Series]:
    """In a thread: the scrapes come to this event loop."""
    return await anyio.to_thread.run_sync(partial(dashboard.series, url, query, legend, since_s, time.time(), 2.5))


def main() -> None:
    """All of them."""
    with tempfile.TemporaryDirectory() as folder, chromium(Path(folder) / "profile") as browser:
        anyio.run(draw_run, Path(folder))
        draw_tune(browser, Path(folder))


if __name__ == "__main__":
    main()

"""The picture of a sweep: one HTML page of SVG, no script, nothing fetched, so it may be mailed and kept.

It shows idle time against queueing delay with the front, and delay by length decile. Only drawing here; the figures
come from a ``TuneReport``. A chart is a list of SVG elements in a box of 640 x 360 units. Every number is formatted
here and nothing but names comes from outside; those are escaped.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from html import escape
from pathlib import Path

from stream_balancer.errors import ConfigError
from stream_balancer.tools.tune_report import Outcome, TuneReport

WIDTH, HEIGHT = 640.0, 360.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 16.0, 16.0, 48.0
UNDER = HEIGHT - BOTTOM + 16  # baseline of what stands under the x axis
GREY, BLUE, RED, LINE = "#9aa5b1", "#2563eb", "#dc2626", "#d8dee6"

_STYLE = f"""
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem; max-width: 44rem }}
body {{ color: #1f2933; background: #fff }}
h1 {{ font-size: 1.3rem }} h2 {{ font-size: 1.05rem; margin-top: 2rem }} h1, p {{ overflow-wrap: anywhere }}
p.reason {{ font-weight: 600 }}
figure {{ margin: 0; overflow-x: auto }} svg {{ width: 100%; min-width: 34rem; height: auto }}
svg text {{ paint-order: stroke; stroke: #fff; stroke-width: 4px }}
@media (prefers-color-scheme: dark) {{
  body {{ color: #e4e7eb; background: #1a1f27 }} svg text {{ fill: #b8c2cc; stroke: #1a1f27 }}
  line[stroke="{LINE}"] {{ stroke: #3a4450 }}
  [fill="{BLUE}"] {{ fill: #60a5fa }} [stroke="{BLUE}"] {{ stroke: #60a5fa }} [fill="{RED}"] {{ fill: #f87171 }}
}}
"""
_PHONE = '<meta name="viewport" content="width=device-width"/>'


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raise ConfigError, before a long sweep, where :func:`write_plot` could not write."""
    path = Path(path)
    if path.suffix != ".html":
        raise ConfigError(f"a plot is called something.html, not {path.name!r}")
    if not path.parent.is_dir():
        raise ConfigError(f"the plot {path} cannot be written: there is no folder {path.parent}. Make it first")


def write_plot(report: TuneReport, path: str | os.PathLike[str]) -> None:
    """Write the page. Raises OSError where the file cannot be written."""
    Path(path).write_text(page(report), encoding="utf-8")


def page(report: TuneReport) -> str:
    """The whole document."""
    chosen = report.recommended
    knobs = ", ".join(f"{name}={value}" for name, value in chosen.knobs.items())
    ranks, a_step = report.config.dp_size, report.config.batch_size
    parts = [
        f"<h1>{escape(report.trace_name)}: {report.num_rollouts:,} rollouts, {a_step} a step on {ranks} ranks</h1>",
        f'<p class="reason">{escape(report.reason)}</p><p>Recommended: <code>{escape(knobs)}</code></p>',
        "<h2>Idle time against queueing delay</h2>",
        f"<figure>{_front(report)}</figure>",
        "<h2>Delay by length</h2>",
        f"<figure>{_deciles(chosen)}</figure>",
    ]
    title = escape(f"stream-balancer tune {report.trace_name}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{_PHONE}<title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>\n{chr(10).join(parts)}\n</body></html>\n"
    )


def _front(report: TuneReport) -> str:
    usual = {"round-robin": report.round_robin, "arrival order, best partition": report.fifo}
    shown = (*report.outcomes, *usual.values())
    ages, most_idle = [o.added_age for o in shown], max(0.01, *(o.compared_idle for o in shown))
    chart = _Chart(
        min(0.0, *ages),  # a small capacity can make less delay than no window
        max(1.0, *ages) * 1.05,
        most_idle * 1.05,
        ("added mean queueing delay, steps", "idle fraction of rank time"),
        lambda idle: f"{100 * idle:.3g} %",
    )
    for value in ticks(max(1.0, *ages) * 1.05):
        chart.text(chart.x(value), UNDER, f"{value:g}", "middle")
    for name, outcome in usual.items():
        at = chart.y(outcome.compared_idle)
        chart.line(at, GREY, dashed=True)
        chart.text(WIDTH - RIGHT, at - 4, f"{name}: {outcome.compared_idle:.1%}", "end")
    path = " ".join(f"{chart.x(o.added_age):.1f},{chart.y(o.compared_idle):.1f}" for o in report.front)
    chart.parts.append(f'<polyline points="{path}" fill="none" stroke="{BLUE}" stroke-width="1.5"/>')
    front = {id(o) for o in report.front}
    for o in sorted(report.outcomes, key=lambda o: o is report.recommended):  # on top of those that lie close by
        colour, size = (RED, 6) if o is report.recommended else (BLUE, 4) if id(o) in front else (GREY, 3)
        chart.parts.append(
            f'<circle cx="{chart.x(o.added_age):.1f}" cy="{chart.y(o.compared_idle):.1f}" r="{size}" fill="{colour}">'
            f"<title>{_describe(o)}</title></circle>"
        )
    return chart.svg()


def _describe(o: Outcome) -> str:
    config = o.report.config
    deadline = "none" if config.deadline_s is None else f"{config.deadline_s:g} s"
    return (
        f"{o.knobs_of_size}, max_skips {config.max_skips}, deadline {deadline}: idle {o.compared_idle:.2%}, "
        f"{o.added_age:.2f} steps"
    )


def _deciles(outcome: Outcome) -> str:
    delays = [0.0 if math.isnan(delay) else delay for delay in outcome.report.length_bias.delay_per_decile]
    names = "length decile, shortest to longest", "mean steps waited"
    chart = _Chart(0.0, 10.0, max(0.1, *delays) * 1.1, names, "{:.3g}".format)
    for decile, delay in enumerate(delays):
        left, right, top = chart.x(decile + 0.15), chart.x(decile + 0.85), chart.y(delay)
        chart.parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{HEIGHT - BOTTOM - top:.1f}" '
            f'fill="{BLUE}"><title>{delay:.2f}</title></rect>'
        )
        chart.text((left + right) / 2, UNDER, str(decile + 1), "middle")
    return chart.svg()


class _Chart:
    """A box with two axes: grid lines at round values of y, with these values; names below and beside."""

    def __init__(
        self, least_x: float, most_x: float, most_y: float, names: tuple[str, str], said: Callable[[float], str]
    ) -> None:
        self.parts: list[str] = []
        self._least_x, self._span_x, self._most_y = least_x, most_x - least_x, most_y
        for value in ticks(most_y):
            self.line(self.y(value), LINE)
            self.text(LEFT - 8, self.y(value) + 4, said(value), "end")
        self.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, names[0], "middle")
        self.parts.append(
            f'<text transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle">'
            f"{names[1]}</text>"
        )

    def x(self, value: float) -> float:
        return LEFT + (value - self._least_x) / self._span_x * (WIDTH - RIGHT - LEFT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self._most_y * (HEIGHT - BOTTOM - TOP)

    def line(self, y: float, colour: str, *, dashed: bool = False) -> None:
        """Straight across."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<line x1="{LEFT:.1f}" y1="{y:.1f}" x2="{WIDTH - RIGHT:.1f}" y2="{y:.1f}" stroke="{colour}"{dash}/>'
        )

    def text(self, x: float, y: float, text: str, anchor: str) -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def svg(self) -> str:
        return (
            f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" xmlns="http://www.w3.org/2000/svg" role="img" '
            f'font-family="system-ui, sans-serif" font-size="12" fill="#52606d">{"".join(self.parts)}</svg>'
        )


def ticks(most: float) -> list[float]:
    """Round values from 0 up to ``most``, four to ten of them."""
    step = 10.0 ** math.floor(math.log10(most))
    step *= next(part for part in (0.125, 0.25, 0.5, 1.0) if most / (step * part) <= 9 or part == 1.0)
    return [index * step for index in range(int(most / step) + 1)]

"""Bars of any figures, as an SVG: what the pages of results show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

BLUE, GREY, RED = "#2563eb", "#9aa5b1", "#dc2626"
WIDTH = 640.0


def bars(rows: Mapping[str, Sequence[float]], series: Sequence[str]) -> str:
    """An SVG of its own: a row a name, a bar a series (up to three), fractions as percent. In the order given."""
    colours, left, tall, gap = (BLUE, GREY, RED), 250.0, 11.0, 7.0
    most = max((value for values in rows.values() for value in values), default=0.0)
    scale = (WIDTH - 60.0 - left) / max(most, 1e-9)
    parts, at = ['<rect width="100%" height="100%" fill="#fff"/>'], 24.0
    first = left if len(series) < 3 else 60.0
    for index, name in enumerate(series):
        parts.append(
            f'<rect x="{first + 195 * index:.0f}" y="4" width="{tall}" height="{tall}" fill="{colours[index]}"/>'
        )
        parts.append(_text(first + 195 * index + 16, 14, name))
    for name, values in rows.items():
        parts.append(_text(left - 8, at + tall * len(values) / 2 + 4, name, anchor="end"))
        for value, colour in zip(values, colours, strict=False):
            width = scale * value
            parts.append(f'<rect x="{left}" y="{at:.0f}" width="{width:.1f}" height="{tall - 1}" fill="{colour}"/>')
            parts.append(_text(left + width + 4, at + tall - 2, f"{100 * value:.1f} %"))
            at += tall
        at += gap
    return _svg(parts, height=at)


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str], height: float) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#52606d">{"".join(parts)}</svg>'
    )

"""Pictures of a sweep: a self-contained HTML page, or a PNG where matplotlib is installed.

Both show the same three things: idle time against queueing delay with the front, delay by length decile, and every
rank's work in some consecutive steps, before and after. Only drawing here; the figures come from a ``TuneReport``.
"""

from __future__ import annotations

import os
from pathlib import Path

from stream_balancer.errors import ConfigError
from stream_balancer.tools.tune_report import TuneReport

__all__ = ["check_plot", "write_plot"]

SUFFIXES = (".html", ".png")


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raise ConfigError, before a long sweep, where :func:`write_plot` could not write."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"a plot is called something.html or something.png, not {path.name!r}")
    if not path.parent.is_dir():
        raise ConfigError(f"the plot {path} cannot be written: there is no folder {path.parent}. Make it first")
    if path.suffix == ".png":
        _require_matplotlib()


def write_plot(report: TuneReport, path: str | os.PathLike[str]) -> None:
    """Write the picture; its suffix says as what. Raises ConfigError for another suffix, or without matplotlib for a
    PNG; OSError where the file cannot be written."""
    check_plot(path)
    if Path(path).suffix == ".html":
        from stream_balancer.tools.plot._html import page

        Path(path).write_text(page(report), encoding="utf-8")
        return
    from stream_balancer.tools.plot._png import draw

    draw(report, os.fspath(path))


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "a PNG needs matplotlib, which is not installed: pip install 'stream-balancer[plot]', or write an .html"
        ) from None

"""The PNG, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import stream_balancer as sb
from stream_balancer.tools.plot import write_plot


def test_a_png_is_written(tmp_path: Path) -> None:
    report = sb.tune(
        sb.generate_trace(400, "rg"),
        sb.BalancerConfig(dp_size=2, batch_size=4),
        windows=[4, 8],
        max_skips=[8],
        deadlines_s=[None],
    )
    path = tmp_path / "front.png"
    write_plot(report, path)
    image = path.read_bytes()
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(image[16:20], "big") == 1400

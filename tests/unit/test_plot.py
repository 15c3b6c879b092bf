"""The pictures of a sweep: well-formed, self-contained, and of the report's figures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

import stream_balancer as sb
from stream_balancer.tools.length_models import LengthModel
from stream_balancer.tools.plot import check_plot, page


@pytest.fixture(scope="module")
def report(short_sweeps: None) -> sb.TuneReport:
    trace = sb.generate_trace(120, LengthModel(mu=5.0, sigma_between=0.0, sigma_within=1.4))
    config = sb.BalancerConfig(dp_size=2, batch_size=4)
    return sb.tune(trace, config, windows=[4, 8], max_skips=[8], deadlines_s=[None, 90.0])


def test_a_page_is_well_formed_and_fetches_nothing(report: sb.TuneReport) -> None:
    text = page(report)
    body = ElementTree.fromstring(text.removeprefix("<!doctype html>\n").replace('<meta charset="utf-8">', ""))
    assert len(body.findall(".//{http://www.w3.org/2000/svg}svg")) == 2
    assert not re.search(r"<script|src=|href=|@import|url\(", text)
    assert report.reason in text


def test_every_setting_is_a_dot_and_the_chosen_one_is_red(report: sb.TuneReport) -> None:
    dots = re.findall(r'<circle [^>]*fill="([^"]+)"><title>window=(\d+), max_skips (\d+)', page(report))
    assert len(dots) == len(report.outcomes)
    red = [(int(window), int(skips)) for colour, window, skips in dots if colour == "#dc2626"]
    assert red == [(report.recommended.window, report.recommended_config.max_skips)]


def test_a_name_is_text(report: sb.TuneReport) -> None:
    assert "<script>" not in page(replace(report, trace_name="<script>alert(1)</script>"))


def test_another_suffix_or_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sb.errors.ConfigError, match=r"something\.html, not 'front\.png'"):
        check_plot(tmp_path / "front.png")
    with pytest.raises(sb.errors.ConfigError, match="there is no folder"):
        check_plot(tmp_path / "nowhere" / "front.html")

"""Ctrl-C at any moment, and again and again: nothing is lost, nothing comes twice, nothing hangs."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import run_python
from guard import GUARD_S

DRILL = Path(__file__).with_name("interrupts.py")


@pytest.mark.parametrize(
    "runs_of_each_form",
    [2, pytest.param(72, marks=pytest.mark.soak)],  # each form on both loops, or more often
)
def test_a_storm_of_interrupts_loses_nothing(runs_of_each_form: int) -> None:
    ended = run_python(DRILL, runs_of_each_form, 0, timeout_s=GUARD_S * runs_of_each_form)
    assert ended.returncode == 0, ended.stdout + ended.stderr

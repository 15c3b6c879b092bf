"""Windows worth comparing under ``window="auto"``. Pure numbers: which of them is in force is fitted at run time, to
the lengths that come."""

from __future__ import annotations

from .arrays import rounded_up

WIDTHS = (1.0, 1.25, 1.5, 2.0, 3.0)
"""Windows to choose from, in batches. Finer ones differ by less than the noise; wider ones add more than two
steps of mean queueing delay, which nobody should get without asking."""
START = 2.0
"""Batches of window before anything is known."""


def window_choices(batch_size: int, unit: int, limit: int) -> tuple[int, ...]:
    """Windows in rollouts, ascending: whole units (groups of siblings), none above the limit.

    Examples:
        >>> window_choices(32, 1, 1000)
        (32, 40, 48, 64, 96)
        >>> window_choices(24, 8, 47)
        (24, 32, 40)
    """
    # rounded up: rounded down, the narrowest window could not hold a batch
    wide = {rounded_up(round(width * batch_size), unit) for width in WIDTHS}
    return tuple(sorted(window for window in wide if window <= limit))

"""The configuration of a balancer: its knobs, complete and checked."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import FrozenInstanceError, fields
from typing import TYPE_CHECKING, Any, Never, NoReturn, Self

from stream_balancer.config.checks import automatic_windows, check_values, combinations
from stream_balancer.config.knobs import USUAL_MAX_SKIPS, Knobs
from stream_balancer.cost import cost_of
from stream_balancer.errors import ConfigError
from stream_balancer.field_docs import documented
from stream_balancer.planning.windows import START, window_choices

__all__ = ["BalancerConfig"]

_NONE_IS_A_VALUE = ("max_skips", "loss_mask_column")


@documented
class BalancerConfig(Knobs):
    """The knobs of a balancer. Raises :class:`ConfigError` (a ValueError) for a value or a combination that cannot
    work.

    Knobs left out are derived from the others; :meth:`replace` derives them anew.
    """

    if not TYPE_CHECKING:  # type checkers know the knobs

        def __init__(self, **knobs: Any) -> None:
            _refuse_unknown(knobs)
            super().__init__(**knobs)

        __signature__ = inspect.signature(Knobs)

    @classmethod
    def from_dict(cls, knobs: Mapping[str, Any]) -> Self:
        """A config from plain data, as YAML or JSON has it: ``from_dict(yaml.safe_load(text))``. Lists stand for
        tuples, and ``cost`` is a text as the command line takes it. Raises :class:`ConfigError`.

        Examples:
            >>> BalancerConfig.from_dict({"dp_size": 2, "batch_size": 8, "cost": "quadratic:3:1"}).cost
            QuadraticCost(linear=3.0, quadratic=1.0)
        """
        if not isinstance(knobs, Mapping):
            raise ConfigError(f"from_dict() takes a mapping from knobs to values, not a {type(knobs).__name__}")
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in knobs.items()}
        return cls(**plain)

    def __post_init__(self) -> None:
        if isinstance(self.cost, str):
            _put(self, cost=cost_of(self.cost))
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        # What was given, without what is derived: replace() starts from it, so a knob left out follows the others.
        given = {k: v for k, v in given.items() if v is not None or k in _NONE_IS_A_VALUE}
        _put(self, _given=given, auto_windows=())
        check_values(self, self._given)
        if self.batch_size_range is not None:
            _put(self, batch_size_range=tuple(self.batch_size_range))
        _put(self, cp_sizes=tuple(self.cp_sizes))
        if self.stratum_shares is not None:  # a dict of our own: nobody may change it later
            _put(self, stratum_shares=dict(self.stratum_shares))
        self._derive()
        for problem in combinations(self):
            raise ConfigError(problem)

    def __setattr__(self, name: str, value: Never) -> NoReturn:
        raise FrozenInstanceError(f"{name} cannot be set: use replace(), or reconfigure() of the balancer")

    def replace(self, **changes: Any) -> BalancerConfig:
        """A config with some knobs changed; knobs that were never given are derived anew. Raises
        :class:`ConfigError`."""
        return BalancerConfig(**{**self._given, **changes})

    def _derive(self) -> None:
        def default(name: str, value: int) -> None:
            if getattr(self, name) is None:
                _put(self, **{name: value})

        if self._given.get("window") == "auto":
            for problem in automatic_windows(self):
                raise ConfigError(problem)
            _put(self, auto_windows=self._legal_windows())
            first = [window for window in self.auto_windows if window <= START * self.batch_size]
            _put(self, window=max(first, default=self.batch_size))
        if self.batch_tokens is not None:
            default("batch_size", self._least_batch_size())
            if "window" not in self._given:
                default("window_tokens", self._batches_of_window * self.batch_tokens)
                default("window", self.batch_size)
        default("window", self._batches_of_window * self.batch_size)
        if self.window_tokens is not None:
            default("capacity_tokens", 2 * self.window_tokens)
            default("capacity", max(self.capacity_tokens or 0, self.window))  # no limit: every rollout has a token
        default("capacity", 2 * self._largest_window)
        default("min_batch_size", self.dp_size)
        if self._given["max_skips"] == "auto":
            _put(self, max_skips=max(USUAL_MAX_SKIPS, self.least_max_skips))
        if self.batch_tokens is not None and self.max_skips is not None:
            default("capacity_tokens", self.max_skips * self.batch_tokens)

    def at_window(self, window: int) -> BalancerConfig:
        """The same knobs with another of :attr:`auto_windows` in force."""
        other = copy(self)
        _put(other, window=window)
        return other

    def _least_batch_size(self) -> int:
        """Rollouts of which every rank gets one for each micro-batch that it must run in each mini-batch, in whole
        groups."""
        least = max(self.dp_size * self.micro_batch_multiple * self.mini_batches, self.group_size or 1)
        least = -(-least // self._whole) * self._whole
        return max(least, self.dp_size * self._whole * self.mini_batches) if self.groups == "same_rank" else least

    def _legal_windows(self) -> tuple[int, ...]:
        """Windows that the knobs allow which were given; capacity and ``max_skips`` follow where they were not."""

        def legal(window: int) -> bool:
            capacity = 2 * window if self.capacity is None else self.capacity
            skips = self._given["max_skips"]
            if isinstance(skips, int) and skips < self._least_max_skips_at(window, capacity):
                return False
            return self.max_staleness is None or window <= (self.max_staleness + 1) * self.batch_size

        whole = self._whole
        limit = 3 * self.batch_size + whole if self.capacity is None else self.capacity // whole * whole
        windows = tuple(window for window in window_choices(self.batch_size, whole, limit) if legal(window))
        if len(windows) < 2:
            raise ConfigError(
                f"window='auto' has nothing to choose from: capacity ({self.capacity}), max_skips ({self.max_skips}) "
                f"and max_staleness ({self.max_staleness}) leave no window above batch_size ({self.batch_size}). "
                "Loosen them, or set window=batch_size"
            )
        return windows


def _put(config: BalancerConfig, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(config, name, value)


def _refuse_unknown(names: Iterable[str]) -> None:
    known = sorted(f.name for f in fields(Knobs) if f.init)
    for name in names:
        if name not in known:
            alike = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {alike[0]}?" if alike else f"The knobs are: {', '.join(known)}"
            raise ConfigError(f"no such knob: {name}. {hint}")


# a knob that is left out is an error of the class that was called, not of its base
Knobs.__init__.__qualname__ = "BalancerConfig.__init__"

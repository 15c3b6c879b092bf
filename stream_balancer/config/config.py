"""The configuration of a balancer: its knobs, complete and checked."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any, Self

from stream_balancer.config import checks
from stream_balancer.config.figures import USUAL_MAX_SKIPS, least_max_skips
from stream_balancer.config.knobs import Knobs
from stream_balancer.config.values import Values
from stream_balancer.cost import cost_of
from stream_balancer.errors import ConfigError
from stream_balancer.planning.windows import START, window_choices

# of these None means no bound and no mask; of all others it means that the knob was not given
_NONE_IS_A_VALUE = ("max_skips", "loss_mask_column")


class BalancerConfig(Knobs):
    """The knobs of a balancer; those left out are derived. A group may be a mapping: ``groups={"size": 8}``.
    Raises :class:`ConfigError` (a ValueError) for a value or a combination that cannot work."""

    @classmethod
    def from_dict(cls, knobs: Mapping[str, Any]) -> Self:
        """A config from plain data: ``from_dict(yaml.safe_load(text))``. A group is a mapping, a tuple may be a list,
        and ``cost`` is a text as the command line takes it. Raises :class:`ConfigError`."""
        if not isinstance(knobs, Mapping):
            raise ConfigError(f"from_dict() takes a mapping from knobs to values, not a {type(knobs).__name__}")
        made: Self = Values.of(cls, knobs)
        return made

    def replace(self, /, **changes: Any) -> BalancerConfig:
        """A config with some knobs changed; knobs that were never given are derived anew. Of a group, a mapping changes
        what it names. Raises :class:`ConfigError`."""
        for name, value in changes.items():
            if isinstance(value, Mapping) and name in BalancerConfig._groups:
                changes[name] = {**vars(self._given[name]), **value}
        return BalancerConfig(**{**self._given, **changes})

    def __post_init__(self) -> None:
        knobs = vars(self)
        # plain data (YAML, the command line) names a model; from here on it is one
        if isinstance(self.cost, str):
            knobs["cost"] = cost_of(self.cost)
        knobs["_given"] = {k: v for k, v in knobs.items() if v is not None or k in _NONE_IS_A_VALUE}
        checks.check_cost(self.cost)
        # before anything is derived, which would look as if it were given
        checks.refuse(checks.given(self))
        self._derive(knobs)
        checks.refuse(checks.combinations(self))
        if self.step_size.rollouts is not None:
            checks.refuse(checks.varying(self))

    def _derive(self, knobs: dict[str, Any]) -> None:
        def default(name: str, value: int) -> None:
            if knobs[name] is None:
                knobs[name] = value

        # policies without a choice wait for no more than they send
        chooses, in_tokens, skips = self.policy == "window", self.step_size.tokens, self.max_skips
        if knobs["window"] == "auto":
            checks.refuse(checks.auto_window(self))
            knobs["auto_windows"] = self._legal_windows()
            first = [window for window in self.auto_windows if window <= START * self.batch_size]
            knobs["window"] = max(first, default=self.batch_size)
        if in_tokens is not None:
            # the fewest that a full step has: checks and skips count with it
            default("batch_size", self._least_batch_size())
            if knobs["window"] is None and self.step_size.window_tokens is None:
                knobs["step_size"] = replace(self.step_size, window_tokens=in_tokens * (1 + chooses))
        # the window before the capacity, and both before max_skips, which follow from what stands here by then
        window_tokens = self.step_size.window_tokens
        if chooses and knobs["window"] is None and window_tokens is None:
            # the least whole idle time for the delay, where generation goes on during a step
            default("capacity", 4 * self.batch_size)
            default("window", -(-3 * self.batch_size // 2))
        default("window", self.batch_size)
        if window_tokens is not None:
            room = self.limits.tokens or 2 * window_tokens
            knobs["limits"] = replace(self.limits, tokens=room)
            # every rollout has a token, so this is no limit of its own
            default("capacity", max(room, self.window))
        # while the trainer is busy a second window of rollouts may come, and the next choice is made from more
        default("capacity", 2 * max(self.auto_windows, default=self.window))
        default("min_batch_size", self.dp_size)
        # last, since the guarantee depends on window, capacity and batch size
        if knobs["max_skips"] == "auto":
            knobs["max_skips"] = skips = max(USUAL_MAX_SKIPS, least_max_skips(self))
        if in_tokens is not None and skips is not None and self.limits.tokens is None:
            knobs["limits"] = replace(self.limits, tokens=skips * in_tokens)

    def _least_batch_size(self) -> int:
        """Rollouts of which every rank gets one for each micro-batch that it must run in each mini-batch, in whole
        groups."""
        whole, mini_batches = self.groups.kept or 1, self.step_size.mini_batches
        least = max(self.dp_size * self.micro_batches.multiple_of * mini_batches, self.groups.size or 1)
        least = -(-least // whole) * whole
        return max(least, self.dp_size * whole * mini_batches) if self.groups.keep == "same_rank" else least

    def _legal_windows(self) -> tuple[int, ...]:
        """Windows that the knobs allow which were given; capacity and ``max_skips`` follow where they were not."""
        given, whole, most_versions = self._given, self.groups.kept or 1, self.staleness.max_versions
        capacity = given.get("capacity")

        def legal(window: int) -> bool:
            skips = self.max_skips
            if isinstance(skips, int) and skips < least_max_skips(self, window, capacity or 2 * window):
                return False
            return most_versions is None or window <= (most_versions + 1) * self.batch_size

        # three batches: a wider one delays by more than two steps, which nobody gets unasked
        limit = 3 * self.batch_size + whole if capacity is None else capacity // whole * whole
        windows = tuple(window for window in window_choices(self.batch_size, whole, limit) if legal(window))
        if len(windows) < 2:
            raise ConfigError(
                f"window='auto' has nothing to choose from: capacity ({capacity}), max_skips ({self.max_skips}) and "
                f"staleness.max_versions ({most_versions}) leave no window above batch_size ({self.batch_size}). "
                "Loosen them, or set window=batch_size"
            )
        return windows


def at_window(config: BalancerConfig, window: int) -> BalancerConfig:
    """Config with another window in force: of ``auto_windows``, or that of a step."""
    # unchecked: wider ones were checked when the config was made, and this happens between two batches
    other = copy(config)
    vars(other)["window"] = window
    return other

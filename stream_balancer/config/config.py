"""The configuration of a balancer: its knobs, complete and checked."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, Self

from stream_balancer.config import checks
from stream_balancer.config.figures import USUAL_MAX_SKIPS, least_max_skips
from stream_balancer.config.knobs import Knobs
from stream_balancer.config.values import Values
from stream_balancer.cost import cost_of
from stream_balancer.errors import ConfigError

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

    def _derive(self, knobs: dict[str, Any]) -> None:
        def default(name: str, value: int) -> None:
            if knobs[name] is None:
                knobs[name] = value

        # policies without a choice wait for no more than they send
        chooses = self.policy == "window"
        # the window before the capacity, and both before max_skips, which follow from what stands here by then
        if chooses and knobs["window"] is None:
            # the least whole idle time for the delay, where generation goes on during a step
            default("capacity", 4 * self.batch_size)
            default("window", -(-3 * self.batch_size // 2))
        default("window", self.batch_size)
        # while the trainer is busy a second window of rollouts may come, and the next choice is made from more
        default("capacity", 2 * self.window)
        default("min_batch_size", self.dp_size)
        # last, since the guarantee depends on window, capacity and batch size
        if knobs["max_skips"] == "auto":
            knobs["max_skips"] = max(USUAL_MAX_SKIPS, least_max_skips(self))


def step_wide(config: BalancerConfig) -> BalancerConfig:
    """Config for steps that begin before they are complete: a window that was not given is as wide as a step."""
    if "window" in config._given:
        return config
    # unchecked: wider ones were checked when the config was made
    other = copy(config)
    vars(other)["window"] = config.batch_size
    return other

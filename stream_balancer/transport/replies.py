"""The reply to a request: an error of the balancer, as a reason and a text on the wire, and back."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from stream_balancer.errors import (
    BrokenResourceError,
    ClosedResourceError,
    ConfigError,
    DuplicateRolloutError,
    JournalError,
    RolloutError,
    WireError,
    WouldBlock,
)
from stream_balancer.transport.requests import RequestCancelled

__all__ = ["error_of", "reason_of"]

Reason: TypeAlias = Literal[
    "cancelled", "rollout", "duplicate", "ended", "full", "type", "value", "knobs", "journal", "lost", "other"
]
_ERRORS: dict[Reason, type[Exception]] = {
    "cancelled": RequestCancelled,
    "rollout": RolloutError,
    "duplicate": DuplicateRolloutError,
    "ended": ClosedResourceError,
    "full": WouldBlock,
    "type": TypeError,
    "value": ValueError,
    "knobs": ConfigError,
    "journal": JournalError,
    "lost": BrokenResourceError,
}


def reason_of(error: Exception) -> tuple[Reason, str]:
    """(reason, text) of an error, for the wire."""
    for reason, kind in _ERRORS.items():
        if type(error) is kind:
            return reason, str(error)
    return "other", f"the controller's put failed: {type(error).__name__}: {error}"


def error_of(reason: Reason, text: str) -> Exception:
    """The error of a refusal, as the balancer raised it."""
    if reason not in get_args(Reason):
        raise WireError(f"the controller refused a put for an unknown reason: {reason}")
    kind = _ERRORS.get(reason, BrokenResourceError)
    return kind(text) if text else kind()

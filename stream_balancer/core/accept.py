"""The filter that a user gives as ``accept=``: how it is called, and what its answers mean. Pure: the controller acts
on them, and waits where it must."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from stream_balancer.rollouts import Rollout

Accept = Callable[[Sequence[Rollout]], bool | Awaitable[bool]]
"""The user's answer, keep these or not: a rollout by itself, or all siblings of a group."""


def call_accept(accept: Accept, rollouts: Sequence[Rollout]) -> bool | Awaitable[Any]:
    """The decision, or what to await for its answer. Raises what ``accept`` raises."""
    answer = accept(rollouts)
    return answer if inspect.isawaitable(answer) else decision_of(answer)


def decision_of(answer: Any) -> bool:
    """True or False; also numpy's and torch's. Raises TypeError for None, which a forgotten ``return`` gives."""
    if answer is None:
        raise TypeError("accept= returned None: return True to keep the rollouts, False to drop them")
    return bool(answer)

"""What a user's ``accept=`` says about rollouts. Pure: it is asked here; the balancer acts, and waits where it must."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from stream_balancer.types import Rollout

__all__ = ["Accept", "Judging", "ask", "verdict_of"]

Accept = Callable[[Sequence[Rollout]], bool | Awaitable[bool]]
"""Whether to keep these: a rollout by itself, or all siblings of a group."""


class Judging(NamedTuple):
    """A put whose verdict has not come yet."""

    rollouts: Sequence[Rollout]
    """What is put."""
    asked: tuple[str, ...]
    """Ids of those that were asked about: the group may change meanwhile."""
    answer: Awaitable[Any]


def ask(accept: Accept, question: Sequence[Rollout]) -> bool | Awaitable[Any]:
    """The verdict, or what to await for it. Raises what ``accept`` raises."""
    answer = accept(question)
    return answer if inspect.isawaitable(answer) else verdict_of(answer)


def verdict_of(answer: Any) -> bool:
    """True or False; also numpy's and torch's. Raises TypeError for None, which a forgotten ``return`` gives."""
    if answer is None:
        raise TypeError("accept= returned None: return True to keep the rollouts, False to drop them")
    return bool(answer)

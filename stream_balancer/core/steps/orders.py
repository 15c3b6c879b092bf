"""Orders: what a ledger asks of its host. ``seat`` is the process of a rank that the order is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from stream_balancer.core.steps.state import Item, StepSeal


class SendWork(NamedTuple):
    """Give these items to the process, in this order, behind what it has of the step."""

    rank: int
    seat: int
    step: int
    uid: int
    attempt: int
    items: tuple[Item, ...]
    gone: frozenset[str]
    """Rollouts of these items that are masked already."""
    opens: bool
    """The process has nothing of this step yet."""


class SendGo(NamedTuple):
    """Let these remote items begin: all who compute them have their payloads, or mask them."""

    rank: int
    seat: int
    step: int
    items: frozenset[int]
    gone: frozenset[str]


class SendSeal(NamedTuple):
    """Tell the process who meets."""

    rank: int
    seat: int
    seal: StepSeal


class SendRewind(NamedTuple):
    """Throw away the gradient of the step and all micro-batches of it: they are sent again."""

    rank: int
    seat: int
    step: int
    attempt: int


class SendDrop(NamedTuple):
    """Take the step away from the process. ``met``: other ranks have it in their weights; take those."""

    rank: int
    seat: int
    step: int
    met: bool


class Behind(NamedTuple):
    """Refuse to train on these weights: they lack steps that others have, and nobody trains on them again. All ranks go
    back to ``lowest`` together, or this one takes the weights of others; then it joins again and says so."""

    rank: int
    seat: int
    weights: int
    others: Mapping[int, int]

    @property
    def lowest(self) -> int:
        """The newest weights that all of them have had."""
        return min(self.weights, *self.others.values())


class SendEnd(NamedTuple):
    """Tell the process that there are no more steps for it."""

    rank: int
    seat: int


class Note(NamedTuple):
    """Write into the journal, before later orders leave, what is masked of the step, and who has acknowledged it."""

    step: int


class Ack(NamedTuple):
    """Forget the step: every rank has acknowledged it. ``gone`` was masked."""

    step: int
    gone: frozenset[str]


Order: TypeAlias = (
    SendWork | SendGo | SendSeal | SendRewind | SendDrop | SendEnd
    | Behind | Note | Ack
)  # fmt: skip

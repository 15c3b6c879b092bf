"""Errors: what can go wrong, and whose fault it is.

Most are the ones anyio and Python users already know; this module only adds what those cannot express::

    ValueError                    a bad value: a knob, a rollout, a trace
    |-- ConfigError               a knob, or a combination of knobs, that could deadlock or never fire
    |-- RolloutError              a rollout that cannot be accepted; the buffer is as it was
    |   `-- DuplicateRolloutError a rollout with this rollout_id is already held
    |-- TraceError                a length trace that cannot be read; names file and line
    anyio.WouldBlock              put_nowait() found the buffer full
    anyio.BusyResourceError
    `-- AlreadyInUseError         two trainers iterate one balancer, a rank connected twice
    anyio.ClosedResourceError     you closed it: put() after end(), anything after aclose()
    anyio.BrokenResourceError     a peer went away
    |-- RankLostError             a rank (or, seen from a rank, the controller) is gone; .rank .step .cause
    `-- WireError                 a peer sent bytes that are not a valid message: refused before use
    RefusedError                  a peer does not want this one; .reason says why, and is one of the errors above:
                                  "authentication", "protocol", "value" a ValueError, "busy" an AlreadyInUseError,
                                  "closed" a BrokenResourceError
    anyio.EndOfStream             the normal end of a link
    OSError
    `-- JournalError              the journal's disk is full (.errno ENOSPC: make room, put again) or failing

Every message says what happened, why, and what to do. Nothing is lost when one is raised: a rollout whose put failed
was not accepted, a batch whose delivery failed is still unacknowledged.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, TypeVar

from anyio import BrokenResourceError, BusyResourceError, ClosedResourceError, EndOfStream, WouldBlock

__all__ = [
    "AlreadyInUseError",
    "BrokenResourceError",
    "BusyResourceError",
    "ClosedResourceError",
    "ConfigError",
    "DuplicateRolloutError",
    "EndOfStream",
    "JournalError",
    "RankLostError",
    "RefusalReason",
    "RefusedError",
    "RolloutError",
    "TraceError",
    "WireError",
    "WouldBlock",
    "refused_error",
]


E = TypeVar("E", bound=BaseException)


class ConfigError(ValueError):
    """A knob, or a combination of knobs, was refused because it could deadlock, never fire, or make no sense."""


class RolloutError(ValueError):
    """A rollout was refused. It was not accepted and the buffer is as it was."""


class DuplicateRolloutError(RolloutError):
    """A rollout with the same ``rollout_id`` is already held; this one was not accepted.

    A producer that retries a put after an error may treat this as success: the first put was accepted.
    """


class TraceError(ValueError):
    """A length trace could not be read. The message names the file and, where there is one, the line."""


class AlreadyInUseError(BusyResourceError):
    """Something that one task, trainer or rank may use at a time is used by two."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)  # BusyResourceError would build a sentence of its own around an action


class RankLostError(BrokenResourceError):
    """A peer of the feed went away: died, was cut off, or broke the protocol.

    What had been sent to it and was not acknowledged is still held by the balancer.
    """

    def __init__(self, message: str, *, rank: int, step: int | None = None, cause: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        """DP rank whose link broke."""
        self.step = step
        """Step that was in flight on that link, or None if the link was idle."""
        self.cause = cause
        """Short reason, as reported by the transport."""


class WireError(BrokenResourceError):
    """A peer sent bytes that are not a valid message. They were refused before anything was allocated or run."""


RefusalReason: TypeAlias = Literal["authentication", "protocol", "value", "busy", "closed"]


class RefusedError(Exception):
    """A peer refused this one: when it asked to join, or later, for what it had sent. Asking again changes nothing.

    Raised the same over every transport. It is also what the mistake is, so ``except ValueError`` catches those that
    are yours: another token or version of the library, another ``dp_size``.
    """

    def __init__(self, text: str, reason: RefusalReason = "value") -> None:
        Exception.__init__(self, text)
        self.reason = reason
        """"authentication": the tokens differ. "protocol": the two ends have different versions of the library, or one
        has sent what may not come. "value": something else does not fit, such as ``dp_size``. "busy": this rank is
        connected already. "closed": the controller has closed its transport."""


class _RefusedValueError(RefusedError, ValueError): ...


class _RefusedBusyError(RefusedError, AlreadyInUseError): ...


class _RefusedClosedError(RefusedError, BrokenResourceError): ...


def refused_error(reason: RefusalReason, text: str) -> RefusedError:
    """The error that a refusal raises."""
    if reason == "busy":
        return _RefusedBusyError(text, reason)
    return _RefusedClosedError(text, reason) if reason == "closed" else _RefusedValueError(text, reason)


class JournalError(OSError):
    """The journal could not be written: nothing that was asked for was accepted. ``errno`` says why.

    ENOSPC, EDQUOT, EFBIG: the disk is full; make room, and put again. Anything else: the disk is failing, and this
    balancer takes no more.
    """


def to_raise(error: E) -> E:
    """A copy of an error that is kept. Raised itself, it would keep the frames of all that it was raised through, and
    with them whatever a trainer has in its own: a model, batches."""
    copy = type(error).__new__(type(error), *error.args)
    vars(copy).update(vars(error))
    copy.__cause__ = error.__cause__
    return copy

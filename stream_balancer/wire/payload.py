"""Bytes that travel behind a message, and where in the receiver's memory they belong; and how msgpack is read. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from stream_balancer.errors import WireError

Memory: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
"""``[size]`` uint8."""


class Payload(NamedTuple):
    """Bytes to be sent, in pieces, from where they lie."""

    total: int = 0
    """Bytes of memory that the receiver needs: with what it will fetch elsewhere."""
    runs: tuple[int, ...] = ()
    """Parts that come now: offset, size, offset, size, ..."""
    pieces: Any = ()
    """``[n]`` bytes each, in order, none empty; they must not change until they were sent. Or a function that returns
    them: then the thread that sends collects them, not the loop that plans."""

    @property
    def size(self) -> int:
        """Bytes that come now."""
        return sum(self.runs[1::2])

    def views(self) -> list[memoryview]:
        """Bytes of the pieces. Raises ValueError if they are more or fewer than the runs take."""
        pieces = self.pieces() if callable(self.pieces) else self.pieces
        views = [memoryview(piece) for piece in pieces]
        found = sum(map(len, views))
        # a rollout that was changed meanwhile would shift all that follows on this connection
        if found != self.size:
            raise ValueError(f"{found} bytes behind a message that announces {self.size}")
        return views

    @classmethod
    def of(cls, *pieces: Any) -> Payload:
        """All of it, in order."""
        views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        total = sum(map(len, views))
        return cls(total, (0, total) if total else (), views)


NOTHING = Payload()


def reader(kind: Any, what: str) -> Callable[[Any], Any]:
    """A function that reads values of this kind from msgpack. Raises WireError, which names ``what`` cannot be read."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(raw: Any) -> Any:
        try:
            return decode(raw)
        # nested lists that are deep enough overflow the decoder's stack
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise WireError(f"{what} cannot be read: {error}") from None

    return read

"""Requests of a producer that have no reply yet: their numbers rise, and their bytes here are bounded."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from stream_balancer.errors import WireError
from stream_balancer.transport.channel import unexpected
from stream_balancer.transport.request_ledger import Limits
from stream_balancer.wire.messages import Message

__all__ = ["Unanswered"]


class Unanswered:
    """Of one producer. The channel's thread adds, the event loop settles."""

    def __init__(self, limits: Limits) -> None:
        self.next_number = 0
        """The least that may come."""
        self._limits = limits
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}
        self._staged_bytes = 0

    def check_room(self, sizes: Sequence[int]) -> None:
        """Raise WireError if so many bytes may not come now."""
        with self._lock:
            staged = self._staged_bytes
        # one put may be larger than all that may be staged: it travels alone, or it never could
        bound = self._limits.staged_bytes - staged if staged else max(self._limits)
        if sum(sizes) > bound:
            raise WireError(
                f"it announces {sum(sizes)} bytes, but may stage {bound} now. Install one stream_balancer everywhere"
            )

    def check_sent(self, message: Message, number: int) -> None:
        """Raise WireError if no request of this number has come."""
        if number >= self.next_number:
            raise unexpected(message, f"while put number {self.next_number} is expected")

    def add(self, message: Message, number: int, size: int = 0) -> None:
        """One has come, with so many bytes. Raises WireError for a number that has come before."""
        if number < self.next_number:
            raise unexpected(message, f"while put number {self.next_number} is expected")
        self.next_number = number + 1  # one that has joined again goes on counting
        with self._lock:
            self._sizes[number] = size
            self._staged_bytes += size

    def settle(self, number: int) -> bool:
        """It has its reply. False if it had one before."""
        with self._lock:
            size = self._sizes.pop(number, None)
            self._staged_bytes -= size or 0
        return size is not None

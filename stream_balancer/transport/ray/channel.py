"""Ordered messages between an actor and those who call it. Knows Ray's calls and their errors, no rollout.

::

    Caller (any process)  --exchange(number, messages)-->  Peer (in the actor's event loop)
                          <-- what was answered by then --
                          --poll()------------------------>
                          <-- what came up since ---------  one call is always pending: its failure tells of the actor

An asynchronous actor starts calls in any order, so messages are numbered both ways and delivered in order. The actor
learns that a caller died from :class:`Lifeline`: an object that the caller owns and that never comes.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import anyio
import anyio.lowlevel

__all__ = ["Caller", "Inbox", "Peer"]

Message = tuple[Any, ...]
Reply = tuple[int, list[Message]]
"""(number of the first message, messages)."""
_OVER: Message = ("over",)
T = TypeVar("T")
_PASSES = 2  # of the event loop, until whoever was woken by a message has answered it


class Inbox(Generic[T]):
    """Puts numbered items in order."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, T] = {}

    def add(self, number: int, item: T) -> list[T]:
        """The items whose turn has come."""
        self._early[number] = item
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready


class Peer:
    """Somebody who calls the actor. Belongs to its event loop."""

    def __init__(self) -> None:
        self.handle: Callable[[Message], None] = lambda message: None
        """Called with each message, in order."""
        self.over = False
        """Nothing more is said to it."""
        self.on_finish: Callable[[], object] = lambda: None
        """Called once, when that becomes so."""
        self._inbox: Inbox[list[Message]] = Inbox()
        self._outbox: list[Message | Callable[[], Awaitable[Message]]] = []
        self._first = 0
        self._news = anyio.Event()
        self._answering = 0
        self._polls = 0
        self.released = anyio.Event()
        """Set when it need not be watched any more."""

    def put(self, message: Message | Callable[[], Awaitable[Message]]) -> None:
        """Have something told to it: a message, or what makes one when its turn comes. Never blocks."""
        if not self.over:
            self._outbox.append(message)
            self._news.set()

    def finish(self) -> None:
        """Nothing more will be said. Idempotent."""
        if not self.over:
            self.put(_OVER)
            self.over = True
            self.released.set()
            self.on_finish()

    async def exchange(self, number: int, messages: list[Message]) -> Reply:
        """Its messages in, what is answered at once out."""
        self._answering += 1
        try:
            for ready in self._inbox.add(number, messages):
                for message in ready:
                    self.handle(message)
            for _ in range(_PASSES):
                await anyio.lowlevel.checkpoint()
        finally:
            self._answering -= 1
            self._news.set()  # a poll that held back meanwhile looks again
        return await self._take()

    async def poll(self) -> Reply:
        """What there is to say, once there is something. A later call ends an earlier one."""
        self._polls += 1
        mine = self._polls
        self._news.set()  # an earlier one looks, and ends
        while mine == self._polls and (self._answering or not self._outbox) and not (self.over and not self._outbox):
            self._news = anyio.Event()
            await self._news.wait()
        return await self._take()

    async def _take(self) -> Reply:
        taken, self._outbox = self._outbox, []
        first, self._first = self._first, self._first + len(taken)
        return first, [item if isinstance(item, tuple) else await item() for item in taken]


class Caller:
    """The other end: calls an actor, from any thread."""

    def __init__(
        self, actor: Any, *, on_message: Callable[[Message], object], on_lost: Callable[[str, bool], object]
    ) -> None:
        """``on_message`` gets each message in order, ``on_lost(cause, for_good)`` is called once if the actor cannot be
        reached any more; both in Ray's own thread: they must not block."""
        self._actor = actor
        self._on_message, self._on_lost = on_message, on_lost
        self._peer = secrets.token_hex(8)
        self._lock = threading.RLock()  # a call to a dead actor has failed before it returns
        self._receiving = threading.RLock()
        self._inbox: Inbox[Message] = Inbox()
        self._next = 0
        self._pending: dict[Any, None] = {}
        self._over = self._heard = False
        self._lifeline: Any = None
        self.ended = threading.Event()
        """Nothing more comes."""

    def open(self, *hello: Any) -> None:
        """Say who this is. Returns at once."""
        self._lifeline = self._actor._hold.remote(self._peer)
        self.send((*hello, [self._lifeline]))
        self._poll()

    def send(self, *messages: Message) -> None:
        """Have messages delivered, in order. Does not wait for it."""
        with self._lock:
            if not self._over:
                number, self._next = self._next, self._next + 1
                self._await(self._actor._exchange.remote(self._peer, number, list(messages)), self._on_reply)

    def break_off(self) -> None:
        """Be gone without a word, as a killed process."""
        import ray

        self._over = True
        self.ended.set()
        ray.cancel(self._lifeline)

    def _poll(self) -> None:
        if not self._over:
            self._await(self._actor._poll.remote(self._peer), self._on_polled)

    def _await(self, ref: Any, then: Callable[[Reply], None]) -> None:
        def done(future: Any) -> None:
            self._pending.pop(future, None)
            try:
                reply = future.result()
            except BaseException as error:  # noqa: BLE001 - Ray's errors come in many kinds
                self._fail(error)
            else:
                then(reply)

        future = ref.future()
        self._pending[future] = None
        future.add_done_callback(done)

    def _on_polled(self, reply: Reply) -> None:
        self._on_reply(reply)
        self._poll()

    def _on_reply(self, reply: Reply) -> None:
        first, messages = reply
        self._heard = True
        with self._receiving:
            for number, message in enumerate(messages, first):
                for ready in self._inbox.add(number, message):
                    if ready == _OVER:
                        self._over = True
                        self.ended.set()
                    elif not self.ended.is_set():
                        self._on_message(ready)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
        self.ended.set()
        self._on_lost(cause_of(error), self._is_for_good(error))

    def _is_for_good(self, error: BaseException) -> bool:
        """An actor that will not be restarted: it said nothing, and Ray says that it is dead."""
        import ray

        return not self._heard and isinstance(error, ray.exceptions.ActorDiedError)


def cause_of(error: BaseException) -> str:
    """A Ray error in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__

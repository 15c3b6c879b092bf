"""The caller's end of a channel of actor calls, in a rank or a worker: it calls, and waits for what the calls return.

:mod:`channel` draws the conversation. Three kinds of threads come here: the sending one, the receiving one, and Ray's
own, which finishes futures. Ray is imported where it is called: whoever holds a handle of an actor has it.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from stream_balancer.errors import RefusedError, refused_error
from stream_balancer.transport.channel import Outgoing, PeerGone, Receiver, Sendable, refusal
from stream_balancer.transport.ray.channel import ChannelEnd, Inbox, Packed, Reply, cause_of, pack
from stream_balancer.wire.messages import Close, Join, Refused, Welcome

__all__ = ["CallingChannel"]

_encode = msgspec.msgpack.Encoder().encode
_answers: msgspec.msgpack.Decoder[Welcome | Refused] = msgspec.msgpack.Decoder(Welcome | Refused)
_ALONE = 2**20  # bytes; what is larger, or has an object in the store, travels in a call of its own
_REFUSAL_S = 1.0  # for the actor to hear why it is refused
_RETRY_S = 0.1  # between attempts to write into a full object store

logger = logging.getLogger("stream_balancer.transport")


class CallingChannel(ChannelEnd):
    """The end in a rank or a worker. One thread receives; one packs and calls, which may have to wait for room in the
    object store. A reply without buffers is received in Ray's thread: where workers pack all the time, each hand-over
    to another thread waits for Python's lock."""

    threads = True

    def __init__(
        self,
        actor: Any,
        request: Join,
        *,
        on_welcome: Callable[[Any], object] = lambda welcome: None,
        name: str = "sb-ray",
    ) -> None:
        """Ask to join, at once; a refusal is what ends the channel. ``actor``: a handle whose ``_join``, ``_exchange``,
        ``_poll`` and ``_hold`` lead to :class:`ActorChannels`. ``on_welcome(welcome)`` is called in the receiving
        thread."""
        super().__init__()
        self._actor, self._key, self._on_welcome = actor, secrets.token_hex(8), on_welcome
        self._changed = threading.Condition()
        self._receiving = threading.Lock()  # one call of the receiver at a time
        # One numbered call at a time: the receiving thread makes one, too, to say why it refuses the actor.
        self._sending = threading.Lock()
        self._outbox: deque[Sendable] = deque()
        self._arrived: deque[Callable[[], None]] = deque()
        self._unsent: list[Packed] = []
        self._inbox: Inbox[Packed] = Inbox()
        self._calls = 0
        self._pending: dict[Any, None] = {}  # futures live as long as somebody holds them
        self._joined = self._warned = False
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True) for run in (self._receive_all, self._send_all)
        ]
        # First of all: the actor watches it from the join on, and learns by it if this process dies.
        self._lifeline = actor._hold.remote(self._key)
        self._await(actor._join.remote(self._key, _encode(request), [self._lifeline]), self._on_joined)

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        for thread in self._threads:
            thread.start()

    def send(self, item: Sendable) -> None:
        with self._changed:
            if not self.over and not self._close_sent:
                self._outbox.append(item)
                self._changed.notify_all()

    def close(self, reason: str = "") -> None:
        with self._changed:
            self.send(Outgoing(Close(reason)))
            self._close_sent = True
            self._changed.notify_all()

    def wait_closed(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._broken or (self.over and not self._outbox), timeout_s)

    def abort(self) -> None:
        with self._changed:
            self._broken = self._broken or not self.over
            self._changed.notify_all()
        if self._receiver is None:
            self._cut()  # it was never started: no thread does
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()

    # in the receiving thread

    def _receive_all(self) -> None:
        try:
            while not self.over:
                with self._changed:
                    self._changed.wait_for(lambda: self._arrived or self.over)
                with self._receiving:
                    self._receive_arrived()
        except Exception as error:  # noqa: BLE001 - Ray's errors come in many kinds; so do a session's
            self._refuse(error)
            self._break(error)
        with self._changed:
            self._changed.notify_all()
        self._cut()

    def _refuse(self, error: Exception) -> None:
        refused = refusal(error)
        if refused is not None and self._joined:
            with suppress(Exception), self._sending:  # the actor may be dead, and answers with its own end
                self._actor._exchange.remote(self._key, self._calls, [pack(Outgoing(refused))]).future().result(
                    _REFUSAL_S
                )

    def _receive_arrived(self) -> None:
        while self._arrived and not self.over:
            self._arrived.popleft()()

    def _cut(self) -> None:
        if self._broken:
            with suppress(Exception):  # the actor may be dead
                _ray().cancel(self._lifeline)

    def _on_joined(self, answer: bytes) -> None:
        welcome = _answers.decode(answer)
        if isinstance(welcome, Refused):
            raise refused_error(welcome.reason, welcome.text)
        self._poll()  # from now on one is always there for the actor to answer, and to fail if the actor dies
        self._on_welcome(welcome)
        with self._changed:
            self._joined = True
            self._changed.notify_all()

    def _on_polled(self, reply: Reply) -> None:
        self._poll()
        self._on_reply(reply)

    def _on_reply(self, reply: Reply) -> None:
        first, messages = reply
        for number, packed in enumerate(messages, first):
            for ready in self._inbox.add(number, packed):
                if not self._broken and not self._close_received:
                    self._receive(ready)

    # in the sending thread

    def _send_all(self) -> None:
        while not self._broken:
            with self._changed:
                self._changed.wait_for(lambda: self.over or (self._joined and self._outbox))
            try:
                while (self._outbox or self._unsent) and not self._broken:
                    with self._sending:
                        self._send_some()
            except (_ray().exceptions.ObjectStoreFullError, _ray().exceptions.OutOfDiskError) as error:
                self._wait_for_room(error)
            except Exception as error:  # noqa: BLE001 - what cannot be sent ends the channel
                self._arrive(partial(_raise, error))
                return
            if self.over and not self._outbox:
                with self._changed:
                    self._changed.notify_all()
                return

    def _send_some(self) -> None:
        """What waits, in one call; what is large travels alone: the next one is packed while this one is taken in."""
        while self._outbox and not any(_is_large(packed) for packed in self._unsent):
            item = self._outbox[0]
            outgoing = item(self) if callable(item) else item
            if outgoing is not None:
                self._unsent.append(pack(outgoing))
            self._outbox.popleft()
        if self._unsent:
            self._await(self._actor._exchange.remote(self._key, self._calls, self._unsent), self._on_reply)
            self._calls, self._unsent = self._calls + 1, []

    def _wait_for_room(self, error: Exception) -> None:
        """What others let go of makes room in the store, here or elsewhere on this node."""
        if not self._warned:
            self._warned = True
            logger.warning("puts wait, because the object store of this node is full: %s", cause_of(error))
        with self._changed:
            self._changed.wait_for(lambda: self.over, _RETRY_S)

    # calls

    def _poll(self) -> None:
        self._await(self._actor._poll.remote(self._key), self._on_polled)

    def _await(self, ref: Any, then: Callable[[Any], None]) -> None:
        future = ref.future()
        self._pending[future] = None
        future.add_done_callback(partial(self._done, then))

    def _done(self, then: Callable[[Any], None], future: Any) -> None:
        """In Ray's own thread, which must not be kept."""
        self._pending.pop(future, None)
        is_first = not self._arrived
        self._arrived.append(partial(self._handle, then, future))
        if is_first and _is_small(future) and self._receiving.acquire(blocking=False):
            try:
                self._receive_arrived()
            except Exception as error:  # noqa: BLE001 - for the receiving thread, before all that has arrived since
                self._arrived.appendleft(partial(_raise, error))
            finally:
                self._receiving.release()
        with self._changed:
            if self._arrived or self.over:
                self._changed.notify_all()

    def _arrive(self, handle: Callable[[], None]) -> None:
        with self._changed:
            self._arrived.append(handle)
            self._changed.notify_all()

    def _handle(self, then: Callable[[Any], None], future: Any) -> None:
        try:
            reply = future.result()
        except BaseException as error:  # noqa: BLE001 - Ray's errors come in many kinds
            raise self._lost(error) from None
        then(reply)

    def _lost(self, error: BaseException) -> Exception:
        cause = getattr(error, "cause", None)  # what the actor has raised
        if isinstance(cause, RefusedError):
            return refused_error(cause.reason, str(cause))
        if isinstance(cause, ConnectionError) and not isinstance(cause, ConnectionResetError):
            return PeerGone(str(cause))
        if isinstance(error, _ray().exceptions.ActorDiedError) and not self._joined:
            return PeerGone(cause_of(error))  # it said nothing, and Ray does not start it again
        return ConnectionResetError(cause_of(error))  # dead, or started again: then it knows no channel


def _is_small(future: Any) -> bool:
    """A reply of messages without buffers."""
    reply = None if future.exception() else future.result()
    return isinstance(reply, tuple) and all(not arrays and not references for _, arrays, references in reply[1])


def _is_large(packed: Packed) -> bool:
    _, arrays, references = packed
    return bool(references) or sum(array.nbytes for array in arrays) >= _ALONE


def _raise(error: Exception) -> None:
    raise error


def _ray() -> Any:
    import ray

    return ray

"""Producers over sockets: who connects them, and what lets them in. The conversation is that of every channel.

::

    producer     its hub's thread joins (``joiner``, ``handshake``): JoinProducer, then a SocketChannel for its port
    controller   the acceptor's thread welcomes it: a SocketChannel for its session, one thread for all of them

Nothing waits for a time-out: a closed socket shows a dead process at once, TCP's keep-alive a dead machine in under a
minute, and a peer that is merely slow is waited for.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

from stream_balancer.errors import WireError
from stream_balancer.transport.event_loop import InLoop
from stream_balancer.transport.producer_port import ProducerPort
from stream_balancer.transport.producer_session import ProducerSession
from stream_balancer.transport.request_ledger import Limits
from stream_balancer.transport.sockets.acceptor import send_now
from stream_balancer.transport.sockets.channel import SocketChannel
from stream_balancer.transport.sockets.hub import Hub
from stream_balancer.transport.sockets.joiner import Joiner
from stream_balancer.transport.sockets.payloads import PayloadServer
from stream_balancer.wire.messages import JoinProducer, WelcomeProducer

__all__ = ["connect_producer", "welcome_producer"]


def welcome_producer(
    hub: Hub, sock: socket.socket, request: JoinProducer, limits: Limits, in_loop: InLoop, *, linger_s: float
) -> ProducerSession:
    """The session of a producer that has proven itself. In the hub's thread; raises OSError if it is gone."""
    send_now(sock, WelcomeProducer(*limits))
    channel = SocketChannel(hub, sock)
    session = ProducerSession(channel, request, limits, partial(_after_reading, hub, in_loop), linger_s=linger_s)
    channel.start(session)
    return session


def _after_reading(hub: Hub, in_loop: InLoop, function: Callable[[], object]) -> None:
    """Into the event loop once all that has come is read: woken for each put, the loop and the hub's thread would take
    turns."""
    hub.do(partial(in_loop, function))


def connect_producer(
    joiner: Joiner, label: str, *, linger_s: float, direct: bool = False, rejoin: bool = False
) -> ProducerPort:
    """A port that connects in its own thread, for as long as ``joiner`` tries. ``direct``: payloads stay here until a
    rank fetches them, from the joiner's ``host``. ``rejoin``: connect again to a controller that is lost. Raises
    ValueError for both: who loses a producer loses what it keeps."""
    if direct and rejoin:
        raise ValueError(
            "rejoin=True needs hand_over='balancer': what a producer keeps is lost to the controller with their "
            "connection. Drop one of them"
        )
    connection = _Connection(joiner, label, PayloadServer() if direct else None)
    port = connection.port = ProducerPort(
        linger_s=linger_s,
        kept=connection.payloads,
        problem=lambda: joiner.problem,
        hang_up=connection.close,
        reconnect=connection.open if rejoin else None,
    )
    connection.open()
    return port


class _Connection:
    """What connects a port, and the thread that does: one for each time."""

    port: ProducerPort
    hub: Hub | None = None

    def __init__(self, joiner: Joiner, label: str, payloads: PayloadServer | None) -> None:
        self.payloads = payloads
        self._joiner, self._label = joiner, label

    def open(self) -> None:
        """Begin to connect."""
        before = self.hub
        self.hub = hub = Hub(f"sb-producer-{self._label}", lambda: self._connect(hub, before), self._joiner.cancel)
        hub.start()

    def close(self) -> None:
        """Stop connecting, or end the connection."""
        if self.hub is not None:
            self.hub.close()

    def _connect(self, hub: Hub, before: Hub | None) -> bool:
        try:
            if before is not None:
                before.close()  # its thread has nothing left to do
            sock, welcome = self._joiner.join(self._request)
            if not isinstance(welcome, WelcomeProducer):
                raise WireError(f"the controller welcomes a producer with a {type(welcome).__name__} message")
        except Exception as error:  # noqa: BLE001 - stores raise RuntimeErrors of many kinds
            if self.payloads is not None:
                self.payloads.close()
            self.port.ended(error)
            return False
        if self.payloads is not None:
            self.payloads.serve(hub)
        self.port.opened(SocketChannel(hub, sock), welcome)
        return True

    def _request(self, own_host: str) -> JoinProducer:
        if self.payloads is None:
            return JoinProducer(self._label, producer_id=self.port.producer_id)
        owner = self.payloads.listen(self._joiner.host or own_host, self._label)
        return JoinProducer(self._label, owner, producer_id=self.port.producer_id)

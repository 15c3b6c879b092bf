"""Two ends of a connection that a test looks at, in one process or in two."""

from __future__ import annotations

import random
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Self

import msgspec
from guard import GUARD_S

from stream_balancer.net import movers
from stream_balancer.net.address import TcpDialer
from stream_balancer.net.connection import Connection
from stream_balancer.net.errors import ConnectionEnd
from stream_balancer.net.handshake import Handshake
from stream_balancer.net.listener import Listener
from stream_balancer.net.loops import Io
from stream_balancer.net.messages import (
    HEADER_BYTES,
    Call,
    Challenge,
    Envelope,
    Join,
    Message,
    Welcome,
    frame,
    read_envelope,
    read_header,
)  # fmt: skip
from stream_balancer.wire.payload import Memory, Payload, Pool

TOKEN = b"0123456789abcdef"
MOVERS = ["socket", "shared_memory", "torch_dist"]
NIL = msgspec.Raw(b"\xc0")


def join_of(*names: str, session: bytes = b"1" * 16) -> Join:
    return Join(b"", "producer", "one", session, names)


def call(number: int = 0) -> Call:
    return Call(number, 0, "put", NIL)


class Heard:
    """Handler that keeps what it is told."""

    def __init__(self) -> None:
        self.admitted: list[int] = []
        self.messages: list[tuple[Message, Memory | None]] = []
        self.ends: list[ConnectionEnd] = []
        self.on_receive: Callable[[Message], object] = lambda _: None
        self._news = threading.Condition()

    def admit(self, message: Message, total: int) -> None:
        self.admitted.append(total)

    def receive(self, message: Message, memory: Memory | None) -> None:
        with self._news:
            self.messages.append((message, memory))
            self._news.notify_all()
        self.on_receive(message)

    def ended(self, end: ConnectionEnd) -> None:
        with self._news:
            self.ends.append(end)
            self._news.notify_all()

    def wait(self, condition: Callable[[], object], timeout_s: float = GUARD_S) -> None:
        with self._news:
            # nothing comes after the end: a test that fails need not wait for its time to be over
            self._news.wait_for(lambda: condition() or self.ends, timeout_s)
            assert condition(), f"nothing comes; the end: {self.ends}"

    def wait_for(self, count: int) -> None:
        self.wait(lambda: len(self.messages) >= count)

    def wait_for_end(self) -> ConnectionEnd:
        self.wait(lambda: self.ends)
        return self.ends[0]


class End:
    """One end of a connection that is up."""

    def __init__(self, connection: Connection, heard: Heard) -> None:
        self.connection, self.heard = connection, heard

    def send(self, message: Message, payload: Payload) -> None:
        self.connection.send(message, payload)

    def wait_for_mover(self) -> None:
        """Until bulk bytes go its way."""
        wait_until(lambda: any(mover.ready for mover in self.connection.movers.values()))


class Network:
    """A listener and who joins it."""

    def __init__(self) -> None:
        self.io = Io.current()
        self.pool = Pool()
        self.accepted: list[End] = []
        self.failures: list[BaseException] = []
        self._news = threading.Condition()
        self.listeners: list[Listener] = []
        self._joined: list[End] = []
        self.limits = Welcome()
        self.on_arrived: Callable[[Join], object] = lambda _: None
        self.address = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self.listeners:
            listener.close()
        for end in (*self.accepted, *self._joined):
            end.connection.abort()

    def listen(self, **options: Any) -> str:
        listener = Listener("127.0.0.1", 0, TOKEN, self._arrived, pool=self.pool, **options)
        self.listeners.append(listener)
        self.address = listener.address
        return self.address

    def _arrived(self, connection: Connection, join: Join) -> None:
        self.on_arrived(join)
        names = movers.available(join.movers)
        end = End(connection, Heard())
        connection.handler = end.heard
        connection.let_in(msgspec.structs.replace(self.limits, movers=names))
        movers.attach(connection, names)
        with self._news:
            self.accepted.append(end)
            self._news.notify_all()

    def join(self, *names: str, address: str = "", token: bytes = TOKEN, tls: Any = None) -> End | BaseException:
        """The joining end, or why not."""
        found: list[End | BaseException] = []

        def welcomed(connection: Connection, welcome: Welcome) -> None:
            end = End(connection, Heard())
            connection.handler = end.heard
            movers.attach(connection, welcome.movers)
            tell(end)

        def tell(what: End | BaseException) -> None:
            with self._news:
                found.append(what)
                self._news.notify_all()

        where = address or self.address or self.listen()
        TcpDialer(where, token=token.decode(), tls=tls, pool=self.pool).dial(join_of(*names), welcomed, tell)
        with self._news:
            assert self._news.wait_for(lambda: found, GUARD_S), "neither joined nor failed"
        if isinstance(found[0], End):
            self._joined.append(found[0])
        return found[0]

    def meet(self, *names: str, **options: Any) -> tuple[End, End]:
        """The accepting end and the joining one, with their movers ready. "socket" is none."""
        number = len(self.accepted)
        joined = self.join(*(name for name in names if name != "socket"), **options)
        assert isinstance(joined, End), joined
        with self._news:
            assert self._news.wait_for(lambda: len(self.accepted) > number, GUARD_S)
        ends = self.accepted[number], joined
        if joined.connection.movers:
            for end in ends:
                end.wait_for_mover()
        return ends

    def in_thread(self, job: Callable[[], Any]) -> Any:
        """What a job returns that belongs to the I/O thread."""
        done: list[Any] = []
        event = threading.Event()
        self.io.do(lambda: (done.append(job()), event.set()))
        assert event.wait(GUARD_S)
        return done[0]


def wait_until(condition: Callable[[], object], timeout_s: float = GUARD_S) -> None:
    """For what other threads and processes do."""
    news = threading.Condition()
    with news:
        for _ in range(int(timeout_s / 0.005)):
            if condition():
                return
            news.wait(0.005)
    raise AssertionError("it never happens")


class RawPeer:
    """A joiner that sends what it likes."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.sock = socket.create_connection((host, int(port)), timeout=GUARD_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, raw: bytes) -> None:
        with suppress(OSError):  # it has been sent away already
            self.sock.sendall(raw)

    def hear(self) -> Envelope:
        """Raises ConnectionError at the end."""
        size, crc = read_header(self._exactly(HEADER_BYTES))
        return read_envelope(self._exactly(size), crc)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += (more := self.sock.recv(size - len(data)))
            if not more:
                raise ConnectionResetError
        return data

    def prove(self, handshake: Handshake | None = None) -> None:
        """In, up to Welcome."""
        handshake = handshake or Handshake(TOKEN, join_of(session=secrets.token_bytes(16)))
        self.send(frame(handshake.hello()))
        challenge = self.hear().message
        assert isinstance(challenge, Challenge)
        answer = handshake.hear(challenge)
        assert answer is not None
        self.send(frame(answer))


def mutations(raw: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Damaged copies: noise, flipped bytes, cut, with something in between, with a bad value."""
    rng = random.Random(seed)
    bad: Sequence[bytes] = [
        b"\xcf" + b"\xff" * 8, b"\xdd\xff\xff\xff\xff", b"\xc0", b"\x91" * 600, b"\xcb\x7f\xf8" + b"\0" * 6,
        b"\xdb\xff\xff\xff\xff", b"\xff",
    ]  # fmt: skip
    for _ in range(count):
        damaged, at = bytearray(raw), rng.randrange(len(raw))
        match rng.randrange(5):
            case 0:
                damaged = bytearray(rng.randbytes(rng.randrange(200)))
            case 1:
                for _ in range(rng.randrange(1, 8)):
                    damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            case 2:
                del damaged[at:]
            case 3:
                damaged[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                damaged[at : at + 1] = rng.choice(bad)
        yield bytes(damaged)

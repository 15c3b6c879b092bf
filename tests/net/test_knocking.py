"""The handshake, and who knocks without knowing it: other tokens, versions and protocols, hostile bytes, TLS."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from ends import TOKEN, End, Network, RawPeer, call, join_of, mutations, wait_until

from stream_balancer.errors import RefusedError, WireError
from stream_balancer.net import connection as connections
from stream_balancer.net import listener as listeners
from stream_balancer.net.handshake import Handshake
from stream_balancer.net.messages import (
    HEADER_BYTES,
    PROTOCOL,
    Call,
    Challenge,
    Close,
    Hello,
    Join,
    Message,
    Refused,
    Welcome,
    Work,
    check_runs,
    frame,
    read_envelope,
    read_header,
)  # fmt: skip
from stream_balancer.rollouts import Denominators, MiniBatchSize
from stream_balancer.wire.payload import Payload

SOAK = pytest.param(100_000, marks=pytest.mark.soak)
NONCE = b"n" * 16


# -- the handshake by itself -------------------------------------------------------------------------------------------


def shake(
    joiner: Handshake, acceptor: Handshake, change: Callable[[Message], Message] = lambda message: message
) -> None:
    """All of it; ``change`` is in between."""
    challenge = acceptor.hear(change(joiner.hello()))
    assert challenge is not None
    join = joiner.hear(change(challenge))
    assert join is not None
    assert acceptor.hear(change(join)) is None


def test_two_ends_that_know_the_token_meet() -> None:
    joiner, acceptor = Handshake(TOKEN, join_of("torch_dist")), Handshake(TOKEN)
    shake(joiner, acceptor)
    assert joiner.proven
    assert acceptor.proven
    assert acceptor.join == joiner.join
    assert acceptor.join is not None
    assert acceptor.join.movers == ("torch_dist",)


@pytest.mark.parametrize("who", ["joiner", "acceptor"])
def test_another_token_is_refused_by_who_sees_it_first(who: str) -> None:
    with pytest.raises(RefusedError, match="another token") as caught:
        shake(Handshake(TOKEN, join_of()), Handshake(b"another"))
    assert caught.value.reason == "authentication"
    assert isinstance(caught.value, ValueError)


CHANGES: list[tuple[type[Message], dict[str, Any], str]] = [
    (Hello, {"protocol": PROTOCOL + 1}, "Install the same version"),
    (Hello, {"nonce": b""}, "a nonce of 0 bytes"),
    (Hello, {"nonce": NONCE}, "another token"),
    (Challenge, {"nonce": NONCE}, "another token"),
    (Challenge, {"proof": b""}, "another token"),
    (Join, {"proof": b"p" * 32}, "another token"),
    (Join, {"name": "two"}, "another token"),
    (Join, {"about": msgspec.Raw(b"\x01")}, "another token"),
]


@pytest.mark.parametrize(("kind", "fields", "text"), CHANGES)
def test_what_somebody_in_between_changes_is_noticed(kind: type[Message], fields: dict[str, Any], text: str) -> None:
    def change(message: Message) -> Message:
        return msgspec.structs.replace(message, **fields) if isinstance(message, kind) else message

    with pytest.raises((WireError, RefusedError), match=text):
        shake(Handshake(TOKEN, join_of()), Handshake(TOKEN), change)


@pytest.mark.parametrize("message", [call(), Close(), Welcome(), join_of(), Challenge(NONCE, b"")])
def test_nothing_else_may_come_in_a_handshake(message: Message) -> None:
    with pytest.raises(WireError, match=f"a {type(message).__name__} message in the handshake"):
        Handshake(TOKEN).hear(message)


def test_an_answer_that_was_given_to_one_is_of_no_use_to_another() -> None:
    said: list[Message] = []
    acceptor = Handshake(TOKEN)
    shake(Handshake(TOKEN, join_of()), acceptor, lambda message: said.append(message) or message)  # type: ignore[func-returns-value]
    again = Handshake(TOKEN)
    again.hear(said[0])
    with pytest.raises(RefusedError, match="another token"):
        again.hear(said[-1])


# -- on a port ---------------------------------------------------------------------------------------------------------


def test_the_oldest_stranger_makes_room(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "MAX_STRANGERS", 3)
    address = network.listen()
    there, here = network.meet()
    strangers = [RawPeer(address) for _ in range(4)]
    with pytest.raises(ConnectionError):
        strangers[0].hear()
    for peer in strangers[2:]:
        peer.prove()
        assert isinstance(peer.hear().message, Welcome)
    here.send(call(), Payload())
    there.heard.wait_for(1)
    for peer in strangers:
        peer.sock.close()


def test_a_flood_is_let_in_slowly_when_no_descriptor_is_left(
    network: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listeners, "_FULL_S", 0.05)
    network.listen()
    listener = network.listeners[0]
    real = listener._sock

    class Full:
        refusals = iter(range(3))
        fileno, close, getsockname = real.fileno, real.close, real.getsockname

        def accept(self) -> Any:
            for _ in self.refusals:
                raise OSError(24, "Too many open files")
            return real.accept()

    monkeypatch.setattr(listener, "_sock", Full())
    assert isinstance(network.join(), End)
    assert caplog.text.count("Raise the limit of open files") == 3


def test_a_crowd_fills_no_log(network: Network, caplog: pytest.LogCaptureFixture) -> None:
    address = network.listen()
    for _ in range(50):
        with RawPeer(address) as peer:
            peer.send(b"GET / HTTP/1.1\r\n")
            assert isinstance(peer.hear().message, Refused)
    assert "was sent away: not a message of this protocol" in caplog.text
    assert len(caplog.records) == 10


# -- hostile bytes -----------------------------------------------------------------------------------------------------

GOOD = [
    frame(Call(3, 1, "put", msgspec.Raw(b"\x93\x01\x02\x03")), 1024, (0, 512, 576, 64), 2, (1, 2)),
    frame(
        Work(
            step=1,
            attempt=2,
            ranks=(0, 3),
            place=1,
            needs_commit=True,
            load=1.5,
            sizes=Denominators(1, 2, 3, 4),
            mini_batches=(MiniBatchSize(1, 0.5, 2, 3, 4, 5),),
            header=msgspec.Raw(b"\x80"),
        )
    ),
    frame(Join(b"p" * 32, "rank", "x", NONCE, ("shared_memory",), msgspec.Raw(b"\x81\xa4rank\x00"))),
]


@pytest.mark.parametrize("count", [2000, SOAK])
def test_damaged_messages_are_refused_and_cost_no_memory(count: int) -> None:
    refused = 0
    tracemalloc.start()
    for good in GOOD:
        for body in mutations(good[HEADER_BYTES:], count, 1):
            try:
                read_envelope(body, zlib.crc32(body))
            except WireError:
                refused += 1
        for raw in mutations(good, count // 10, 2):
            with suppress(WireError):
                size, crc = read_header(raw[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))
                read_envelope(raw[HEADER_BYTES : HEADER_BYTES + size], crc)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6
    assert refused > count


@pytest.mark.parametrize(
    ("total", "runs"), [(10, (0,)), (10, (0, 0)), (10, (4, 7)), (10, (4, 2, 5, 1)), (2**61, (2**61, 2**61))]
)
def test_runs_that_make_no_sense_are_refused(total: int, runs: tuple[int, ...]) -> None:
    with pytest.raises(WireError):
        check_runs(total, runs)


def test_a_message_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(ValueError, match="at most"):
        frame(Call(0, 0, "put", msgspec.Raw(msgspec.msgpack.encode(b"0" * 2**26))))


@pytest.mark.parametrize("count", [2000, SOAK])
@pytest.mark.parametrize("proven", [False, True])
def test_hostile_bytes_on_a_live_port_end_one_connection_only(network: Network, proven: bool, count: int) -> None:
    there, here = network.meet()
    good = frame(call(), 1024, (0, 512, 576, 64)) + bytes(576) if proven else frame(Hello(PROTOCOL, NONCE))
    for number, raw in enumerate(mutations(good, count, 4)):
        with RawPeer(network.address) as peer:
            if proven:
                peer.prove()
            peer.send(raw)
        if number % 500 == 0:
            here.send(call(number), Payload.of(b"still here"))
    here.send(call(), Payload())
    there.heard.wait(lambda: there.heard.messages and there.heard.messages[-1][0] == call())
    assert not there.heard.ends
    wait_until(lambda: all(end.connection.over for end in network.accepted[1:]))
    for end in network.accepted[1:]:  # nothing but what is whole was delivered
        assert all(memory is None or memory.size <= 1024 for _, memory in end.heard.messages)


def test_a_stranger_cannot_have_memory_allocated(network: Network) -> None:
    with RawPeer(network.listen()) as peer:
        peer.send(frame(call(), 2**40, (0, 2**40)))
        refused = peer.hear().message
    assert isinstance(refused, Refused)
    with RawPeer(network.address) as peer:
        peer.send(GOOD[0][:4] + (connections._BEFORE_PROOF_BYTES + 1).to_bytes(4, "little") + bytes(4))
        refused = peer.hear().message
        assert isinstance(refused, Refused)
        assert "are taken" in refused.text


def test_who_has_much_to_say_of_itself_is_let_in(network: Network) -> None:
    """A producer with ten thousand slots, or a rank that holds many steps."""
    network.listen()
    about = msgspec.Raw(msgspec.msgpack.encode([(number, 1, 100) for number in range(20_000)]))
    joiner = Handshake(TOKEN, msgspec.structs.replace(join_of(), about=about))
    with RawPeer(network.address) as peer:
        peer.prove(joiner)
        assert isinstance(peer.hear().message, Welcome)


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The acceptor's, and the joiner's that trusts it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder: Path = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key", folder / "certificate"
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *name, "-keyout", key, "-out"]
    subprocess.run([*command, certificate], check=True, capture_output=True)
    acceptor = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    acceptor.load_cert_chain(certificate, key)
    return acceptor, ssl.create_default_context(cafile=str(certificate))


def test_tls_carries_everything(network: Network, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    network.listen(tls=contexts[0])
    there, here = network.meet(tls=contexts[1])
    data = np.random.default_rng(1).integers(0, 256, 12_000_000, dtype=np.uint8)
    for number in range(30):
        here.send(call(number), Payload.of(data[: 400_000 * number]))
        there.send(call(number), Payload.of(data[number : number + 5]))
    there.heard.wait_for(30)
    here.heard.wait_for(30)
    for number in range(1, 30):
        memory, back = there.heard.messages[number][1], here.heard.messages[number][1]
        assert memory is not None
        assert back is not None
        assert (memory == data[: 400_000 * number]).all()
        assert (back == data[number : number + 5]).all()
    here.connection.close("enough")
    assert there.heard.wait_for_end().text == "enough"


def test_what_tls_has_read_already_comes_once_a_paused_connection_goes_on(
    network: Network, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    """Three messages in one record, which the selector does not see any more."""
    address = network.listen(tls=contexts[0])
    with RawPeer(address) as peer:
        peer.sock = contexts[1].wrap_socket(peer.sock, server_hostname="127.0.0.1")
        peer.prove()
        wait_until(lambda: network.accepted)
        [there] = network.accepted
        there.heard.on_receive = lambda _: there.connection.pause()
        peer.send(frame(call(0)) + frame(call(1)) + frame(call(2)))
        for number in range(3):
            there.heard.wait_for(number + 1)
            network.in_thread(there.connection.resume)
    assert [message for message, _ in there.heard.messages] == [call(0), call(1), call(2)]


@pytest.mark.parametrize("with_tls", ["acceptor", "joiner"])
def test_tls_at_one_end_only_is_said(
    network: Network, contexts: tuple[ssl.SSLContext, ssl.SSLContext], with_tls: str
) -> None:
    network.listen(tls=contexts[0] if with_tls == "acceptor" else None)
    error = network.join(tls=contexts[1] if with_tls == "joiner" else None)
    assert isinstance(error, (WireError, ConnectionError)), error
    assert "TLS" in str(error) or "peer" in str(error)


def test_a_certificate_that_is_not_trusted_is_said(
    network: Network, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    network.listen(tls=contexts[0])
    error = network.join(tls=ssl.create_default_context())
    assert isinstance(error, WireError)
    assert "CERTIFICATE_VERIFY_FAILED" in str(error)

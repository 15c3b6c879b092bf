"""A gloo pair: two processes in a torch.distributed group of their own, which meet over an authenticated connection.

gloo's ends find each other through a c10d store and listen on ports of their own, on which gloo reads whatever comes.
So the store is one whose two values go over the connection that both have proven themselves on (:class:`_Exchange`);
the first message on the pair, either way, is a proof that only the other end of that connection can make; and once the
pair is up, the kernel drops whoever else comes to gloo's port (:func:`_shut_out`).

No wait of gloo's can be ended from outside, and for a peer that never connects it is most of a minute. So every wait is
made on the authenticated connection, which ends when the peer dies or when it is shut down here; gloo is let in once
what it waits for has happened ::

    connecting end   PairAddress ---->  <---- PairAddress   listening end
                     gloo connects: the kernel accepts for the other one, which need not wait yet
                     PairReady -------------------------->  gloo finds the connection there
                     <-------------------------- PairReady
    member 0         proof, PairReady ----------------->    member 1
                     <----------------- proof, PairReady
                     PairReady ------------------------>
"""

from __future__ import annotations

import ctypes
import hmac
import secrets
import socket
import struct
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, Work

from stream_balancer.errors import WireError
from stream_balancer.transport.descriptors import keep_sockets_from_children, packed_ends, sockets_at
from stream_balancer.transport.gloo.packets import Pending
from stream_balancer.transport.handshake import pack, proof_of
from stream_balancer.transport.sockets.joiner import receive_message
from stream_balancer.wire.messages import PairAddress, PairReady

__all__ = ["GlooPair", "gloo", "meet"]

FOR_EVER = timedelta(days=3650)  # timedelta.max overflows in gloo
PAIR_TIMEOUT_S = 10.0  # both are known to be there and take milliseconds; later waits have their own limit: none
GLOO_TIMEOUT_S = 2.0  # gloo waits five times as long for a connection; a failed pair is built again
HOLD_S = 5.0
"""How long a listening end waits to hear that the other one has connected. Then it goes in: gloo may choose ends by
another rule than :func:`_listens` knows."""
_SPARE_TAG, _TAG = 7, 1
_PROOF_BYTES = 32
_IPV4_END_BYTES = 8  # family, port, host
gloo = cast("Any", dist).ProcessGroupGloo  # its options are missing from torch's type stubs


class _Work:
    """A posted gloo operation."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> None:
        """Block for ever if need be; RuntimeError if the pair broke."""
        self._work.wait(FOR_EVER)


class GlooPair:
    """Two processes in a gloo group of their own."""

    def __init__(self, store: Store, me: Literal[0, 1], hostname: str) -> None:
        options = gloo._Options()
        options._timeout = timedelta(seconds=GLOO_TIMEOUT_S)
        options._devices = [gloo.create_device(hostname=hostname)]
        options._threads = 1
        self._store = store  # the group keeps only its C++ half
        self._group = gloo(store, me, 2, options)
        self._peer = 1 - me
        self._poisoned = False

    def send(self, tensor: Tensor) -> object:
        return self._group.send([tensor], self._peer, _TAG)

    def receive(self, tensor: Tensor) -> Pending:
        return _Work(self._group.recv([tensor], self._peer, _TAG))

    def poison(self) -> None:
        """An expired wait closes the pair; nothing else wakes a thread that waits in gloo."""
        if not self._poisoned:
            self._poisoned = True
            self.wait_broken(0.001)

    def wait_broken(self, timeout_s: float) -> None:
        with suppress(RuntimeError):
            self._group.recv([torch.zeros(1)], self._peer, _SPARE_TAG).wait(timedelta(seconds=timeout_s))

    def send_proof(self, mine: bytes) -> Work:
        """The pair's first message; wait for what is returned once the other end has checked it."""
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        return cast("Work", self._group.send([sent], self._peer, _TAG))

    def check_proof(self, theirs: bytes) -> None:
        """Wait for the other's. Raises RuntimeError unless it is ``theirs``."""
        received = torch.zeros(_PROOF_BYTES, dtype=torch.uint8)
        self._group.recv([received], self._peer, _TAG).wait(timedelta(seconds=PAIR_TIMEOUT_S))
        if not hmac.compare_digest(received.numpy().tobytes(), theirs):
            self.poison()
            raise RuntimeError("somebody else has connected to the pair")


def meet(sock: socket.socket, me: Literal[0, 1], *, token: bytes, hostname: str) -> GlooPair:
    """The pair with who is at the other end of ``sock``, which has been authenticated and is about to call this too.

    Blocks for milliseconds; a ``sock`` that is shut down, or whose other end dies, ends it. ``hostname``: where this
    end listens. Raises OSError or RuntimeError if it did not work out, which a new connection may; WireError if the
    other end says something else.
    """
    store = _Exchange(sock, me)
    pair = GlooPair(store, me, hostname)
    store.notify_ready()  # connected
    _shut_out(store.addresses[me])
    keep_sockets_from_children(store.addresses[0] + store.addresses[1])
    nonces = store.nonces[0], store.nonces[1]
    mine, theirs = (proof_of(token, b"pair", bytes([side]), *nonces) for side in (me, 1 - me))
    if me == 0:  # speaks first, so that it takes the pair for built only once member 1 does
        sent = pair.send_proof(mine)
        store.notify_ready()
        store.wait_ready(2)
        pair.check_proof(theirs)
        store.notify_ready()
    else:
        store.wait_ready(2)
        pair.check_proof(theirs)
        sent = pair.send_proof(mine)
        store.notify_ready()
        store.wait_ready(3)
    sent.wait(timedelta(seconds=PAIR_TIMEOUT_S))
    return pair


class _Exchange(Store):
    """As much of a c10d store as gloo uses: each side sets its address, and waits for the other's."""

    def __init__(self, sock: socket.socket, me: Literal[0, 1]) -> None:
        super().__init__()
        self._sock, self._me = sock, me
        self._num_ready = 0  # PairReady messages that have come
        self.addresses: dict[int, bytes] = {}
        self.nonces: dict[int, bytes] = {me: secrets.token_bytes(16)}

    def set(self, key: str, value: Any) -> None:
        """Called by gloo, with what the other side needs."""
        self.addresses[self._me] = bytes(value)
        self._sock.sendall(pack(PairAddress(bytes(value), self.nonces[self._me])))

    def wait(self, keys: list[str], timeout: timedelta = FOR_EVER) -> None:
        """Called by gloo, for each side's key."""
        for key in keys:
            self.get(key)

    def get(self, key: str) -> bytes:
        """Called by gloo: ``0/<side>``."""
        side = int(key.rpartition("/")[2])
        if side not in self.addresses:
            message = receive_message(self._sock)
            if not isinstance(message, PairAddress) or side == self._me:
                raise WireError(f"a {type(message).__name__} message came instead of the address of the pair")
            self.addresses[side], self.nonces[side] = message.address, message.nonce
            if _listens(self.addresses[self._me], message.address):
                self._hold()
        return self.addresses[side]

    def notify_ready(self) -> None:
        """One step of this end's is done. Raises OSError."""
        self._sock.sendall(pack(PairReady()))

    def wait_ready(self, steps: int) -> None:
        """Until so many steps of the other end's are done. Raises OSError, WireError."""
        while self._num_ready < steps:
            message = receive_message(self._sock)
            if not isinstance(message, PairReady):
                raise WireError(f"a {type(message).__name__} message came while a pair was built")
            self._num_ready += 1

    def _hold(self) -> None:
        """Until the other end has connected; but for ``HOLD_S`` at most."""
        timeout_s = self._sock.gettimeout()
        self._sock.settimeout(HOLD_S)
        try:
            self._sock.recv(1, socket.MSG_PEEK)  # the other end's PairReady, or its end
        except TimeoutError:
            return
        finally:
            self._sock.settimeout(timeout_s)
        self.wait_ready(1)


def _listens(mine: bytes, theirs: bytes) -> bool:
    """Whether gloo will wait for the other end to connect: it does at the lower address, and of one address at the
    lower port, as the system's integer. ``mine``, ``theirs``: what gloo calls the ends. False if that is not known."""
    with suppress(OSError):
        for fd in sockets_at(mine):  # gloo's listening socket, whose address is somewhere in ``mine``
            end = packed_ends(fd)[0]
            at = mine.find(end)
            if at < 0:  # the descriptor was closed meanwhile, and is another socket's now
                continue
            return _order(end) < _order(theirs[at : at + len(end)])
    return False


def _order(end: bytes) -> tuple[bytes, int]:
    """``end``: family, port, IPv6's flow label, host, as a ``sockaddr`` begins."""
    host = end[4:] if len(end) == _IPV4_END_BYTES else end[8:]
    return host, int.from_bytes(end[2:4], sys.byteorder)


# --- who else comes to gloo's port --------------------------------------------------------------------------------

_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)  # one BPF instruction: keep 0 bytes of every packet


def _shut_out(address: bytes) -> None:
    """Have the kernel drop every further connection to gloo's listening port, which stays open as long as the pair.

    gloo accepts everybody there for ever and keeps what they send; a few hundred connections use up this process's
    descriptors, upon which gloo ends the process. ``address``: what gloo called its end. Where the kernel knows no
    such filter, the port stays as gloo made it.
    """
    program = ctypes.create_string_buffer(_DROP_ALL)
    attach = struct.pack("HL", 1, ctypes.addressof(program))
    for fd in sockets_at(address):
        with suppress(OSError):
            sock = socket.socket(fileno=fd)
            try:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, attach)
            finally:
                sock.detach()

"""The codec for bytes on the wire and on a disk: puts, work for ranks, checkpoints, journals.

A header in msgpack says what there is, and both ends compute from it where the bytes lie (:mod:`.header`); one end
collects them without a copy (:mod:`.encode`), and the other makes views of them (:mod:`.decode`). No socket,
thread or clock.
"""

from stream_balancer.wire.decode import Decoded, Wanted, decode, decode_rollouts
from stream_balancer.wire.encode import bytes_of, encode, encode_rollouts, payload_of
from stream_balancer.wire.header import Owner
from stream_balancer.wire.payload import Encoded
from stream_balancer.wire.remote import Handle, Leases, RemoteRollout

__all__ = [
    "Decoded", "Encoded", "Handle", "Leases", "Owner", "RemoteRollout", "Wanted", "bytes_of", "decode",
    "decode_rollouts", "encode", "encode_rollouts", "payload_of",
]  # fmt: skip

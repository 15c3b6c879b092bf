"""Messages between the demo's processes, lines of JSON: a task down a child's stdin, messages up its stdout."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from stream_balancer.demo.options import DemoOptions
from stream_balancer.types import Reason

__all__ = ["Dispatched", "Message", "Put", "RolloutSpec", "StepDone", "Task", "Trained", "decode", "encode"]


class RolloutSpec(msgspec.Struct, frozen=True):
    """A rollout to be generated."""

    rollout_id: str
    group_id: str
    """Prompt it was sampled from."""
    prompt_tokens: int
    """>= 1; not trained on."""
    output_tokens: int
    """>= 1; generating them takes a worker ``output_tokens / tokens_per_second``."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output together."""
        return self.prompt_tokens + self.output_tokens


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Task of a child process: be the controller, or one trainer rank, in one run."""

    rank: int | None
    """Trainer rank; None for the controller."""
    policy: str
    """``BalancerConfig.policy`` of this run."""
    options: DemoOptions
    """The demo's knobs (``trace`` left out: only the parent reads it)."""
    store_port: int
    """Where the parent's store, the meeting point, listens."""
    token: str = ""
    """What the feed's processes must know, and nobody else does: the store is open to every user of this machine."""
    longest: int = 1
    """Tokens of the longest rollout: what a rank warms up with."""
    specs: tuple[RolloutSpec, ...] = ()
    """The rollouts, in the order in which workers pick them up. Only the controller gets them."""


class Put(msgspec.Struct, frozen=True, tag=True):
    """Controller: one rollout was accepted by the balancer."""

    rollout_id: str
    checksum: int
    """CRC-32 of its tokens, see ``worker.checksum``."""
    num_tokens: int


class Dispatched(msgspec.Struct, frozen=True, tag=True):
    """Controller: one batch left."""

    step: int
    reason: Reason
    delays_s: tuple[float, ...]
    """Seconds from acceptance to dispatch, of each of its rollouts."""
    loads: tuple[float, ...]
    """Predicted work per rank, in the cost model's unit."""


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """Rank: one step was trained."""

    rank: int
    step: int
    compute_s: float
    """CPU seconds of forward and backward on the training thread."""
    num_tokens: int
    micro_batches: int
    loss: float
    """This rank's part of the step's mean loss per trained token: the sum over ranks is the step's loss."""
    trained: tuple[tuple[str, int], ...]
    """``(rollout_id, checksum)`` of every rollout trained on in this step, padding copies left out."""


class Trained(msgspec.Struct, frozen=True, tag=True):
    """Rank: the feed has ended."""

    rank: int
    parameters_checksum: int
    """CRC-32 of the final parameters: the same on every rank, or the gradients were not shared."""


Message: TypeAlias = Put | Dispatched | StepDone | Trained

_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def encode(message: Message | Task) -> bytes:
    """One line of JSON, newline included."""
    return msgspec.json.encode(message) + b"\n"


def decode(line: bytes) -> Message:
    """The message in one line. Raises ``msgspec.DecodeError`` (or ``ValidationError``) for anything else."""
    return _decoder.decode(line)

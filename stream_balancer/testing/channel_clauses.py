"""Clauses of the channels' contract: order, admission before memory, refusals, closing, losses, waiting.

``open_pair()`` is an async context manager over the two ends of a fresh channel, neither of which has been started.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager

import anyio
import torch
from torch import Tensor

from stream_balancer.errors import RefusedError, WireError
from stream_balancer.testing.harness import until
from stream_balancer.testing.recording import Recorder, source_of
from stream_balancer.transport.channel import Channel, Outgoing, PeerClosed, Receiver, Source
from stream_balancer.wire.messages import Accepted, Message, Payloads, PutRefused, Taken

__all__ = ["CLAUSES", "CLAUSE_TIMEOUT_S", "Opener"]

CLAUSE_TIMEOUT_S = 8.0  # a guard against hangs; below every keep-alive and linger, whose end must not be waited for
BIG = 20 * 2**20  # bytes: more than any transport sends in one piece

Opener = Callable[[], AbstractAsyncContextManager[tuple[Channel, Channel]]]


def _random(size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _numbers(recorder: Recorder) -> list[int]:
    return [message.total for message in recorder.messages if isinstance(message, Taken)]


async def _abort(channel: Channel) -> None:
    with anyio.CancelScope(shield=True):
        if channel.threads:
            await anyio.to_thread.run_sync(channel.abort, limiter=anyio.CapacityLimiter(1))
        else:
            channel.abort()


def _start(ends: tuple[Channel, Channel], *receivers: Receiver) -> tuple[Channel, Channel]:
    for end, receiver in zip(ends, receivers, strict=True):
        end.start(receiver)
    return ends


async def messages_arrive_in_order(open_pair: Opener) -> None:
    """Small ones, ones that are larger than any packet, and ones with buffers, both ways at once."""
    sent: list[Message] = []
    for number in range(60):
        sent.append(Taken(number))
        if number % 7 == 0:
            sent.append(PutRefused(number, "other", "x" * (37 * number)))
        if number % 11 == 0:
            sent.append(Payloads(number))
    async with open_pair() as ends:
        recorders = Recorder(), Recorder()
        for end in _start(ends, *recorders):
            for message in sent:
                buffers = [_random(size, size) for size in (1, 70_000, 64)] if isinstance(message, Payloads) else []
                end.send(Outgoing(message, [source_of(buffer) for buffer in buffers]))
        for recorder in recorders:
            await recorder.arrived(len(sent))
            assert recorder.messages == sent
            for message, buffers_of in zip(recorder.messages, recorder.buffers, strict=True):
                expected = [_random(size, size).numpy().tobytes() for size in (1, 70_000, 64)]
                assert buffers_of == (expected if isinstance(message, Payloads) else [])


async def admission_comes_before_memory(open_pair: Opener) -> None:
    """``admit`` is asked first, gets the sizes, and says how much is allocated, which may be more than comes."""
    async with open_pair() as ends:
        recorder = Recorder(spare=100)
        one, _ = _start(ends, Recorder(), recorder)
        data = _random(5000)
        one.send(Outgoing(Payloads(0), [source_of(data), source_of(data[:3])]))
        await recorder.arrived(1)
        assert recorder.events in (["admit", "allocate 5100", "allocate 103", "receive"], ["admit", "receive"])
        assert recorder.buffers == [[data.numpy().tobytes(), data[:3].numpy().tobytes()]]


class _Refusing(Recorder):
    def admit(self, message: Message, sizes: Sequence[int]) -> Sequence[int]:
        if sizes:
            raise WireError("not now")
        return super().admit(message, sizes)


async def what_is_refused_is_not_allocated(open_pair: Opener) -> None:
    """What ``admit`` raises ends both ends; no byte was allocated, nothing delivered."""
    async with open_pair() as ends:
        sender, recorder = Recorder(), _Refusing()
        one, _ = _start(ends, sender, recorder)
        one.send(Outgoing(Taken(1)))
        one.send(Outgoing(Payloads(0), [source_of(_random(2**20))]))
        one.send(Outgoing(Taken(2)))
        error = await recorder.end()
        assert isinstance(error, WireError), error
        await _knows_why(sender, "not now")
        assert recorder.messages == [Taken(1)]
        assert not any(event.startswith("allocate") for event in recorder.events), "allocated what was refused"


async def _knows_why(refused: Recorder, why: str) -> None:
    error = await refused.end()
    assert isinstance(error, RefusedError), f"it does not know that it was refused: {error!r}"
    assert (error.reason, why in str(error)) == ("protocol", True), error


async def what_a_receiver_raises_ends_the_channel(open_pair: Opener) -> None:
    """The receiver gets its own error back, and its peer learns what it was refused for."""
    async with open_pair() as ends:
        sender, recorder = Recorder(), Recorder()
        one, _ = _start(ends, sender, recorder)

        def fail(_: Message) -> None:
            raise WireError("this may not come")

        recorder.on_message = fail
        one.send(Outgoing(Taken(1)))
        assert "this may not come" in str(await recorder.end())
        await _knows_why(sender, "this may not come")


async def a_message_is_whole_or_not_there(open_pair: Opener) -> None:
    """A source that fails half-way ends the channel with its own error; what was before it has arrived."""
    async with open_pair() as ends:
        sender, recorder = Recorder(), Recorder()
        one, _ = _start(ends, sender, recorder)

        def fill(buffer: Tensor) -> Iterator[int]:
            yield BIG // 2
            raise ValueError("rollout 'r7' cannot be packed")

        one.send(Outgoing(Taken(1)))
        await recorder.arrived(1)
        one.send(Outgoing(Payloads(0), [Source(BIG, fill)]))
        one.send(Outgoing(Taken(2)))
        error = await sender.end()
        assert isinstance(error, ValueError), error
        assert not isinstance(await recorder.end(), PeerClosed)
        assert recorder.messages == [Taken(1)], "half of a message was delivered"


async def a_callable_is_called_when_its_turn_comes(open_pair: Opener) -> None:
    """With the channel it goes into, in which it may itself send, also instead of making a message; if it raises, its
    own error ends the channel."""
    async with open_pair() as ends:
        sender, recorder = Recorder(), Recorder()
        one, _ = _start(ends, sender, recorder)
        called_with: list[Channel] = []

        def make(channel: Channel) -> Outgoing:
            called_with.append(channel)
            return Outgoing(Taken(2))

        def send_instead(channel: Channel) -> None:
            channel.send(Outgoing(Taken(4)))

        def fail(channel: Channel) -> Outgoing:
            raise ValueError("rollout 'r7' cannot be packed")

        one.send(Outgoing(Taken(1)))
        one.send(make)
        one.send(Outgoing(Taken(3)))
        one.send(send_instead)
        await recorder.arrived(4)
        assert called_with == [one]
        one.send(fail)
        error = await sender.end()
        assert isinstance(error, ValueError), error
        assert not isinstance(await recorder.end(), PeerClosed)
        assert _numbers(recorder) == [1, 2, 3, 4]


async def a_close_comes_after_what_was_sent(open_pair: Opener) -> None:
    """From either end, with its reason, and answered at once; what is sent later is dropped."""
    for closing in range(2):
        async with open_pair() as ends:
            recorders = Recorder(), Recorder()
            _start(ends, *recorders)
            one, recorder, other = ends[closing], recorders[1 - closing], recorders[closing]
            data = _random(BIG)
            one.send(Outgoing(Payloads(0), [source_of(data)]))
            one.send(Outgoing(Taken(1)))
            one.close("done for today")
            one.close()
            one.send(Outgoing(Taken(2)))
            error = await recorder.end()
            assert isinstance(error, PeerClosed), error
            assert str(error) == "done for today"
            assert recorder.messages == [Payloads(0), Taken(1)]
            assert recorder.buffers[0] == [data.numpy().tobytes()]
            assert isinstance(await other.end(), PeerClosed), "who closed was not told that the peer has closed too"
            await _abort(ends[closing])
            await _abort(ends[1 - closing])


async def both_may_close_at_once(open_pair: Opener) -> None:
    """Neither waits for the other, and neither sees a loss."""
    async with open_pair() as ends:
        recorders = Recorder(), Recorder()
        for end in _start(ends, *recorders):
            end.send(Outgoing(Taken(1)))
            end.close()
        for recorder in recorders:
            assert isinstance(await recorder.end(), PeerClosed)
        for end in ends:
            if end.threads:
                await anyio.to_thread.run_sync(end.wait_closed, CLAUSE_TIMEOUT_S)


async def a_loss_is_noticed(open_pair: Opener) -> None:
    """An end that is gone without a word is a loss at the other, from either side; sending into it is harmless."""
    for dying in range(2):
        async with open_pair() as ends:
            recorders = Recorder(), Recorder()
            _start(ends, *recorders)
            ends[dying].send(Outgoing(Taken(0)))
            await recorders[1 - dying].arrived(1)
            await _abort(ends[dying])
            error = await recorders[1 - dying].end()
            assert not isinstance(error, PeerClosed), "a loss looks like a graceful close"
            assert str(error), "a loss without a cause"
            for end in ends:
                end.send(Outgoing(Taken(1)))
                end.close()


async def an_abort_leaves_no_thread(open_pair: Opener) -> None:
    """Of neither end; also of one that was never started, and a second time."""
    before = set(threading.enumerate())
    async with open_pair() as ends:
        one, other = _start(ends, Recorder(), Recorder())
        one.send(Outgoing(Payloads(0), [source_of(_random(BIG))]))
        await _abort(one)
        await _abort(one)
        await _abort(other)
        left = [
            thread
            for end in ends
            if end.threads
            for thread in set(threading.enumerate()) - before
            if thread.name.startswith("sb-")
        ]
        assert not left, f"threads live on: {left}"


async def sending_never_waits(open_pair: Opener) -> None:
    """Not for a peer that does not read; and a reply does not overtake or nest in the message that it answers."""
    async with open_pair() as ends:
        sender, recorder = Recorder(), Recorder()
        one, other = _start(ends, sender, recorder)
        gate = threading.Event()
        nested: list[int] = []

        def answer(message: Message) -> None:
            if other.threads:
                gate.wait(CLAUSE_TIMEOUT_S)
            nested.append(+1)
            other.send(Outgoing(Accepted((len(nested),))))
            nested.append(-1)

        recorder.on_message = answer
        for number in range(50):
            one.send(Outgoing(Taken(number)))
        for _ in range(3):
            one.send(Outgoing(Payloads(0), [source_of(_random(2**20))]))
        gate.set()
        await sender.arrived(53)
        assert nested == [+1, -1] * 53, "a message was delivered while another one was"
        assert _numbers(recorder) == list(range(50))


async def memory_is_kept_until_it_is_sent(open_pair: Opener) -> None:
    """Though nobody else keeps it; and not much longer."""
    async with open_pair() as ends:
        recorder = Recorder()
        one, _ = _start(ends, Recorder(), recorder)
        data = _random(BIG)
        expected, died = data.numpy().tobytes(), weakref.ref(data)
        sent: list[bool] = []
        one.send(Outgoing(Payloads(0), [source_of(data, sent=lambda: sent.append(True))]))
        del data
        for _ in range(20):  # what was let go would be written over here
            torch.full((BIG // 8,), 7, dtype=torch.uint8)
        await recorder.arrived(1)
        assert recorder.buffers == [[expected]]

        def is_gone() -> bool:
            gc.collect()
            return died() is None

        await until(is_gone)
        await until(lambda: sent == [True])


CLAUSES: tuple[Callable[[Opener], Awaitable[None]], ...] = (
    messages_arrive_in_order,
    admission_comes_before_memory,
    what_is_refused_is_not_allocated,
    what_a_receiver_raises_ends_the_channel,
    a_message_is_whole_or_not_there,
    a_callable_is_called_when_its_turn_comes,
    a_close_comes_after_what_was_sent,
    both_may_close_at_once,
    a_loss_is_noticed,
    an_abort_leaves_no_thread,
    sending_never_waits,
    memory_is_kept_until_it_is_sent,
)
"""What every channel must do, one function each."""

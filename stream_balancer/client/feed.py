"""The rank's side: an iterator over its steps, with tensors on the device. ``for`` or ``async for``.

::

    for step in sb.RankFeed("tcp://127.0.0.1:29400", rank=3, dp_size=8):
        for micro_batch in step: ...
        end = step.finish()                 # see client/step
        ...

A plain loop leaves ``finish()`` out. The request for the next step says that the last step is in the weights, and
acknowledges it; an early exit from the loop does not. A trainer that saves less often acknowledges at the save::

    for step in sb.RankFeed(..., auto_ack=False):
        train(step)
        if time_to_save(step):
            save(feed.state_dict())
            sb.barrier()
            step.ack()                      # this step and every earlier step

After a restart the feed gives the steps that the weights lack (``next_step=``).
"""

from __future__ import annotations

import math
import os
import ssl
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import anyio.lowlevel
import torch
from msgspec.structs import replace

from stream_balancer.client.device import Stopwatch, Uploader, pinned
from stream_balancer.client.payloads import Fetcher
from stream_balancer.client.port import Port
from stream_balancer.client.seats import Seat, seat_in
from stream_balancer.client.step import Step
from stream_balancer.core.staleness import newer_version
from stream_balancer.errors import BrokenResourceError, ClosedResourceError, RankLostError
from stream_balancer.facade import OfOneProcess, event_loop_here, refuse_in_event_loop, run
from stream_balancer.net import movers as ways
from stream_balancer.net.address import TcpDialer, current_world
from stream_balancer.net.messages import About
from stream_balancer.statistics import Statistics
from stream_balancer.steps.state import Weights
from stream_balancer.wire.payload import Pool
from stream_balancer.wire.statistics import decode_statistics

# of one message; far above text, far below a trainer's host memory
_DEFAULT_MAX_BATCH_BYTES = 4 * 2**30


class RankFeed(OfOneProcess):
    """Iterates over one rank's steps, in order, each exactly once. ``for`` and ``async for`` (asyncio, trio).

    Tensors of a step stay valid while you hold them: the feed reuses their memory after the last of its tensors is
    freed. Drop them with the step, so that the feed stays within ``depth + 1`` steps of memory. Example:
    ``RankFeed("tcp://10.0.0.1:29400", rank=3, dp_size=8, depth=2)`` holds 3 steps: one in use, two ready.

    The iteration ends when the last step is acknowledged; with ``auto_ack=False`` it ends when the last step was given,
    and the feed leaves with the last ``step.ack()``.

    The iteration raises RankLostError if the controller is lost, or other ranks have a step in their weights that this
    rank lacks; RefusedError if the controller refuses this rank or its reports; AlreadyInUseError if two threads
    iterate one feed; ConfigError for an unknown host, and for a loop without ``finish()`` where steps may change;
    WireError if another program listens at the address; ClosedResourceError after :meth:`close`.
    """

    _in_another_process = "make it where the rank trains: RankFeed(address, rank=..., dp_size=...)"

    def __init__(
        self,
        source: Any = None,
        *,
        rank: int | None = None,
        dp_size: int | None = None,
        depth: int = 2,
        auto_ack: bool = True,
        next_step: int | Mapping[str, int] = 0,
        mesh: Any = None,
        dp_dim: str | Sequence[str] = "dp",
        device: str | torch.device = "cpu",
        max_batch_bytes: int = _DEFAULT_MAX_BATCH_BYTES,
        incarnation: int | None = None,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        name: str = "stream_balancer",
        movers: Sequence[str] | None = None,
        rejoin: bool = False,
        connect_timeout_s: float | None = None,
        linger_s: float = 5.0,
    ) -> None:
        """Connect in the background, without a wait.

        ``source``: ``"tcp://host:port"`` of a controller, a c10d Store, None for the store, rank and world size of the
        initialised torch.distributed world, or the result of ``sb.testing.MemoryNetwork.connect``. ``depth``: steps
        ready besides the step in use: a rank holds ``depth + 1`` at most. ``auto_ack``: the request for the next step
        acknowledges the last one; otherwise :meth:`Step.ack` does, and unacknowledged steps hold up no later step.
        ``next_step``: content of the weights, as :meth:`state_dict` returned it at the save, or the number of the first
        step that they lack; 0 for new weights. The request for the first step acknowledges the steps before: call
        :meth:`set_version` earlier. ``mesh``: a DeviceMesh in place of ``rank`` and ``dp_size``; processes that differ
        only along dimensions other than ``dp_dim`` (tensor, context, pipeline parallel) get the same steps, and all of
        them iterate. ``dp_dim`` may name several dimensions (HSDP). ``device``: destination of tensors; copies overlap
        with the step before. ``incarnation``: number of earlier starts of this rank (default:
        TORCHELASTIC_RESTART_COUNT, or 0).

        ``token``, ``name``: the transport's (default: the environment's ``STREAM_BALANCER_TOKEN``). ``tls``: encrypts
        the connection. ``movers``: ways for bytes, from ``"shared_memory"`` and ``"torch_dist"``; the socket if no
        mover is available. ``rejoin``: a lost controller is started again, under the same address or in the same store.
        Then its loss raises no error: the feed warns, waits for the next controller, and goes on.
        ``connect_timeout_s``: seconds for the first connection (default: no limit, with repeated warnings).
        ``linger_s``: most seconds that :meth:`close` waits for the controller's answer.
        """
        if depth < 1:
            raise ValueError(f"depth must be >= 1, not {depth}: with no room for a step none could ever be sent")
        weights = _weights(next_step)
        if incarnation is None:
            # torchelastic counts the starts of workers: a new process has a higher number than a late old one
            incarnation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._device = torch.device(device)
        uploader = None if self._device.type == "cpu" else Uploader(self._device)
        if hasattr(source, "who"):
            if mesh is not None or rank is not None or dp_size is not None:
                raise ValueError("rank=, dp_size= and mesh= are said where the network is connected to")
            dialer, rejoin = source, source.rejoin
            who = replace(source.who, max_batch_bytes=max_batch_bytes)
            fetcher = Fetcher(lambda owner: source.elsewhere(owner.address))
        else:
            source, seat = _seat(source, rank, dp_size, mesh, dp_dim)
            pool = Pool() if uploader is None else Pool(allocate=pinned)
            dialer = TcpDialer(source, token=token, name=name, tls=tls, pool=pool)
            fetcher = Fetcher(lambda owner: TcpDialer(owner.address, token=owner.token.decode()))
            if movers is None:
                movers = () if tls is not None else ("shared_memory",) if isinstance(source, str) else ("torch_dist",)
            # an accelerator reads only memory that this process pinned
            if uploader is not None:
                movers = [one for one in movers if one != "shared_memory"]
            who = About(
                incarnation=incarnation, depth=depth, max_batch_bytes=max_batch_bytes, **seat._asdict()
            )  # fmt: skip
        self._port = Port(
            dialer,
            who,
            fetcher,
            weights=weights,
            uploader=uploader,
            rejoin=rejoin,
            movers=ways.available(movers or (), again=who.incarnation > 0),
            connect_timeout_s=connect_timeout_s,
            linger_s=linger_s,
        )
        self._auto_ack, self._loaded = auto_ack, weights.next_step
        self._hand: Step | None = None
        self._ended = False
        self._version: int | None = None
        # a dropped feed leaves, and tells the controller; the end of a process is heard without this
        weakref.finalize(self, self._port.close).atexit = False

    @property
    def rank(self) -> int:
        """Number of this DP rank."""
        return self._port.who.rank

    @property
    def auto_ack(self) -> bool:
        """The request for the next step acknowledges the last one."""
        return self._auto_ack

    @property
    def waiting_s(self) -> float:
        """Seconds that the trainer has waited until now; 0.0 while it works."""
        since = self._port.waiting_since
        return 0.0 if since is None else time.monotonic() - since

    # the iteration

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        """The next step. Blocks until there is one; Ctrl-C ends the wait, and the next call gives the step."""
        refuse_in_event_loop("`for` over a RankFeed", "There, use `async for`")
        step = run(self._take_next)
        if step is None:
            if self._is_through:
                self.close()
            raise StopIteration
        step.given = True
        return step

    def __aiter__(self) -> AsyncIterator[Step]:
        return self

    async def __anext__(self) -> Step:
        """As ``next()``, without blocking the event loop. A cancelled call takes no step."""
        await anyio.lowlevel.checkpoint()
        step = await self._take_next()
        if step is None:
            if self._is_through:
                await self.aclose()
            raise StopAsyncIteration
        step.given = True
        return step

    async def _take_next(self) -> Step | None:
        """The next step, or None at the end."""
        if self._ended:
            return None
        if self._hand is not None and self._hand.given:
            # outside the lock, since this waits for the device
            self._hand.read_clocks()
            with self._port.lock:
                self._conclude(ack=self._auto_ack)
        # after Ctrl-C the hand may hold a step that was not given
        if self._hand is None:
            await self._port.wait_for(self._look)
        return self._hand

    def _conclude(self, *, ack: bool) -> None:
        """Conclude the step in hand: it is in the weights. The port's lock is held."""
        hand = self._hand
        if hand is not None:
            hand.conclude()
            self._hand = None
            if ack:
                self._port.held.ack(hand.step)

    def _look(self) -> bool | None:
        """True if there is a step in hand, or the end has come. The port's lock is held."""
        port, held = self._port, self._port.held
        if held.behind is not None:
            raise RankLostError(
                port.why_behind, rank=self.rank, step=held.behind, cause="other ranks have trained without it"
            )
        # acknowledged here, not in the first join: that would overtake an earlier set_version()
        if self._loaded and held.term >= 0:
            held.ack(self._loaded - 1)
            self._loaded = 0
        oldest = held.oldest()
        if oldest is not None:
            self._hand = Step(port, oldest, self.acknowledge_through, self.waiting_s)
            return True
        self._ended = held.is_ended and not held.steps
        return self._ended or None

    # acknowledgements and checkpoints

    @property
    def _is_through(self) -> bool:
        """Every given step is acknowledged."""
        return self._port.held.acked >= self._port.held.weights.next_step - 1

    def acknowledge_through(self, step: int) -> None:
        """Acknowledge ``step`` and every earlier step: :meth:`Step.ack` for code that kept only the number. From any
        thread, never blocks, idempotent. Raises like :meth:`Step.ack`."""
        port, held, hand = self._port, self._port.held, self._hand
        if hand is not None and hand.step <= step:
            hand.read_clocks()
        with port.lock:
            if hand is not None and hand.step <= step and hand.is_mine:
                self._check_open("step.ack()")
                hand.conclude()
            if min(step, held.weights.next_step - 1) > held.acked:
                self._check_open("step.ack()")
                held.ack(step)
            leaves = self._ended and self._is_through
        port.flush()
        if leaves:
            port.close()

    def state_dict(self) -> dict[str, int]:
        """Content of the weights, to be saved with them: ``{"next_step": n, "attempt": a}``, all steps before n, the
        last one in attempt a. Call it after the optimizer step. The step in hand counts once its micro-batches were
        given."""
        with self._port.lock:
            used = None if self._hand is None else self._hand.weights
            return (used or self._port.held.weights)._asdict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Tell the feed that the weights were replaced by those of ``state``, from here or another rank: the feed gives
        no step again that they contain. With ``auto_ack=False`` these steps stay unacknowledged, since another rank's
        weights are no checkpoint: call ``step.ack()`` or ``acknowledge_through(next_step - 1)`` later. Raises
        ValueError if the weights lack a step that this feed has concluded: open a new feed."""
        weights, port = _weights(state), self._port
        with port.lock:
            if weights.next_step < port.held.weights.next_step:
                raise ValueError(
                    f"load_state_dict(): the weights lack step {weights.next_step}, which this feed was through with. "
                    f"Open a new feed for them: RankFeed(..., next_step={weights.next_step})"
                )
            port.held.load(weights)
            if self._auto_ack:
                port.held.ack(weights.next_step - 1)
        port.flush()

    # the balancer, from here

    @property
    def version(self) -> int | None:
        """The newest policy version, set here or passed on by the controller; None before the first."""
        known = [one for one in (self._version, self._port.session.version) if one is not None]
        return max(known, default=None)

    def set_version(self, version: int) -> None:
        """Announce a policy version, as :meth:`StreamBalancer.set_version`. Call it after the optimizer step and before
        the request for the next step. From any thread, never blocks.

        One rank may announce it, or every rank the same. A version below :attr:`version`, as of an older checkpoint,
        only warns. Raises ClosedResourceError on a closed feed; the iteration raises the loss of the controller.
        """
        self._check_open("set_version()")
        newer = newer_version(self.version, version)
        if newer is not None:
            self._version = newer
            self._port.session.tell("set_version", [newer])

    def end(self) -> None:
        """End the run, as :meth:`StreamBalancer.end`: producers' puts raise ClosedResourceError, waiting rollouts are
        drained, then the iteration ends on all ranks. From any thread, never blocks, may be called twice."""
        self._check_open("end()")
        self._port.session.tell("end")

    def _check_open(self, method: str) -> None:
        if self._port.closed:
            raise ClosedResourceError(
                f"{method} on a feed that is closed: call it before. What was not acknowledged is delivered again"
            )

    def statistics(self, *, timeout_s: float | None = None) -> Statistics:
        """As :meth:`StreamBalancer.statistics`, from the controller; blocks for a round trip. Raises TimeoutError after
        ``timeout_s``, RankLostError on the loss of the controller, ClosedResourceError on a closed feed, ValueError for
        statistics above 1 MiB."""
        refuse_in_event_loop("statistics() of a feed", "There, await feed.async_statistics()")
        return run(self.async_statistics, timeout_s)

    async def async_statistics(self) -> Statistics:
        """:meth:`statistics`, without blocking the event loop."""
        self._check_open("statistics()")
        try:
            answered = await self._port.session.ask("statistics")
        except BrokenResourceError as error:
            raise RankLostError(str(error), rank=self.rank, cause=str(error)) from None
        return decode_statistics(bytes(answered.value))

    # time

    @contextmanager
    def timed(self, device: str | torch.device | None = None) -> Iterator[None]:
        """Time this rank's own compute for the step in hand: forward and backward, without the wait for other ranks in
        a collective. Several uses in a step add up.

        ``CalibratedCost`` learns from these seconds, and ``statistics()`` measures idle time with them. Without them a
        step lasts from its receipt to the next request, and all ranks look alike once they have met. With DDP, time
        micro-batches under ``no_sync()``. ``device``: where the work runs (default: the feed's device); an
        accelerator's clock is read at the request for the next step.
        """
        stopwatch = Stopwatch(self._device if device is None else torch.device(device))
        with stopwatch:
            yield
        if self._hand is not None:
            self._hand.computed(stopwatch.seconds)

    def add_compute_s(self, seconds: float) -> None:
        """As :meth:`timed`, for a trainer with a clock. Raises ValueError unless seconds are a finite number >= 0."""
        if not 0 <= seconds < math.inf:
            raise ValueError(f"add_compute_s() takes seconds >= 0, not {seconds!r}")
        if self._hand is not None:
            self._hand.computed(lambda: seconds)

    # leaving

    def close(self) -> None:
        """Leave: tell the controller, and release resources. Unacknowledged steps will be delivered again. Waits up to
        ``linger_s`` seconds for the controller's answer, except in an event loop: there, use :meth:`aclose`.
        Idempotent."""
        self._port.close()
        if event_loop_here() is None:
            run(self._port.session.aclose)

    async def aclose(self) -> None:
        """:meth:`close`, without blocking the event loop."""
        self._port.close()
        await self._port.session.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _seat(
    source: Any, rank: int | None, dp_size: int | None, mesh: Any, dp_dim: str | Sequence[str]
) -> tuple[Any, Seat]:
    """The controller's address and this process's place: from the arguments, then from the initialised
    torch.distributed world."""
    if mesh is not None:
        if rank is not None or dp_size is not None:
            raise ValueError("give RankFeed either mesh= or rank= and dp_size=: the mesh says both")
        return current_world()[0] if source is None else source, seat_in(mesh, dp_dim)
    if source is None:
        source, world_rank, world_size = current_world()
        rank = world_rank if rank is None else rank
        dp_size = world_size if dp_size is None else dp_size
    if rank is None or dp_size is None:
        raise ValueError(
            "RankFeed needs rank= and dp_size=, or mesh=, unless it runs inside an initialised torch.distributed world"
        )
    if not (isinstance(rank, int) and isinstance(dp_size, int) and 0 <= rank < dp_size):
        raise ValueError(f"rank and dp_size must be ints, and 0 <= rank < dp_size, not {rank!r} and {dp_size!r}")
    return source, Seat(rank, dp_size, 0, 1)


def _weights(state: int | Mapping[str, int]) -> Weights:
    """Content of weights, from a number or from :meth:`RankFeed.state_dict`. Raises ValueError for anything else."""
    found: tuple[Any, ...] = (
        (state.get("next_step"), state.get("attempt", 0)) if isinstance(state, Mapping) else (state, 0)
    )
    if any(type(one) is not int or one < 0 for one in found):
        raise ValueError(
            f"the weights are described by a feed's state_dict(), or by the number of the first step that they lack "
            f"(an int >= 0; 0 for new weights), not by {state!r}"
        )
    return Weights(*found)

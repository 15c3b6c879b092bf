"""Pictures of a balancer, one line of JSON each; where balancers that publish are found, and recordings.

No torch and no event loop here: the viewer starts at once.
"""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

__all__ = ["InFlight", "LengthRow", "NextBatch", "RankRow", "Status", "attach", "folder", "publishing", "recording"]

SUFFIX = ".sock"
_FOLDER_MODE = 0o700
_CONNECT_TIMEOUT_S = 2.0
_MOST_LINE_BYTES = 2**24  # 4,096 ranks are 1 MB


class LengthRow(msgspec.Struct, frozen=True):
    """Waiting rollouts of one length: from ``least`` tokens to below twice that."""

    least: int
    rollouts: int
    oldest_s: float


class NextBatch(msgspec.Struct, frozen=True):
    """Batch that would leave now, with predicted loads."""

    rollouts: int
    tokens: int
    imbalance: float
    unavoidable_imbalance: float


class InFlight(msgspec.Struct, frozen=True):
    """A batch that was dispatched and is not yet acknowledged."""

    step: int
    reason: str
    rollouts: int
    tokens: int
    imbalance: float


class RankRow(msgspec.Struct, frozen=True):
    """One DP rank."""

    rank: int
    busy_s: float
    idle_s: dict[str, float]
    """By cause."""
    last_step_s: float | None = None
    queue: int | None = None
    """Shares it was sent and has not acknowledged; None unless ``serve()`` runs."""
    state: str = ""
    """"step 7" (it has that, or it is on the way), "waiting", "not connected", "lost: ..."; "" unless ``serve()``
    runs."""


class Status(msgspec.Struct, frozen=True):
    """A balancer at one moment."""

    time_s: float
    """Seconds since 1970."""
    pid: int
    name: str
    dp_size: int
    batch_size: int
    window: int
    deadline_s: float | None
    policy: str
    ended: bool
    waiting: int
    waiting_tokens: int
    oldest_wait_s: float
    lengths: list[LengthRow]
    blocked_puts: int
    reserved: int
    accepted: int
    acknowledged: int
    dispatched_tokens: int
    evicted: dict[str, int]
    batches: dict[str, int]
    idle_fraction: float | None
    unavoidable_idle_fraction: float | None
    measured_idle_fraction: float | None
    """None where nothing is known yet."""
    next_batch: NextBatch | None
    in_flight: list[InFlight]
    ranks: list[RankRow]
    waits_for: str
    """What dispatching waits for, in a sentence."""
    warnings: list[str]

    def line(self) -> bytes:
        """As one line of JSON."""
        return _ENCODER.encode(self) + b"\n"


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Status)


def folder() -> Path:
    """The private folder of this user's sockets, made if it is not there. Raises OSError if it is not private."""
    run = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(run) / "stream_balancer" if run else Path(tempfile.gettempdir()) / f"stream_balancer-{os.getuid()}"
    path.mkdir(mode=_FOLDER_MODE, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(
            f"{path} must be a folder of your own that nobody else may enter (chmod 700): sockets in it say what your "
            "training does. Remove it, or set XDG_RUNTIME_DIR"
        )
    return path


def publishing() -> list[Path]:
    """Sockets of the balancers that publish now, oldest first. Removes what dead processes have left."""
    found = []
    for path in sorted(folder().glob(f"*{SUFFIX}"), key=lambda p: p.stat().st_mtime):
        try:
            _connect(path).close()
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            continue
        else:
            found.append(path)
    return found


def attach(path: Path) -> Iterator[Status]:
    """Pictures as they come, until the balancer is gone. Raises OSError if nobody listens there, ValueError for what
    is no picture."""
    with _connect(path) as connection, connection.makefile("rb") as lines:
        connection.settimeout(None)
        yield from _read(lines, str(path))


def recording(path: Path) -> Iterator[Status]:
    """The pictures of a file, one a line. Raises OSError, and ValueError with the line for what is no picture."""
    with path.open("rb") as lines:
        yield from _read(lines, str(path))


def _read(lines: object, where: str) -> Iterator[Status]:
    number = 0
    while line := lines.readline(_MOST_LINE_BYTES):  # type: ignore[attr-defined]
        number += 1
        if not line.endswith(b"\n"):
            return  # cut off in the middle: the writer was killed
        try:
            yield _DECODER.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"{where}, line {number}, is no picture of a balancer: {error}") from None


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_CONNECT_TIMEOUT_S)
    try:
        connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    return connection

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
from typing import Any

import msgspec

__all__ = ["SUFFIX", "RankRow", "Status", "fetch", "folder", "recording"]

SUFFIX = ".sock"
_FOLDER_MODE = 0o700
_TIMEOUT_S = 60.0
_MOST_LINE_BYTES = 2**24  # 4,096 ranks are 1 MB


class RankRow(msgspec.Struct, frozen=True):
    """One DP rank, besides what ``statistics`` says of it."""

    state: str = ""
    """"step 7" (it has that, or it is on the way), "waiting", "not connected", "lost: ..."; "" unless ``serve()``
    runs."""
    queue: int | None = None
    """Rank batches it was sent and has not acknowledged; None unless ``serve()`` runs."""
    last_step_s: float | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A balancer at one moment."""

    time_s: float
    """Seconds since 1970."""
    pid: int
    name: str
    config: dict[str, Any]
    """The knobs that are shown."""
    ended: bool
    waits_for: str
    """What dispatching waits for, in a sentence."""
    statistics: dict[str, Any]
    """``sb.Statistics``; None where nothing is known yet."""
    lengths: list[tuple[int, int, float]]
    """Waiting rollouts by length: from so many tokens to below twice that; rollouts; seconds the oldest has waited."""
    next_batch: dict[str, Any] | None
    """Batch that would leave now: rollouts, tokens, imbalance, unavoidable_imbalance (predicted)."""
    in_flight: list[dict[str, Any]]
    """Batches dispatched and not yet acknowledged: step, reason, rollouts, imbalance."""
    ranks: list[RankRow]
    warnings: list[str]

    def line(self) -> bytes:
        """As one line of JSON."""
        return msgspec.json.encode(self) + b"\n"


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


def fetch(path: Path) -> Status:
    """The picture of this moment. Raises OSError if nobody answers there, ValueError for what is no picture."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(str(path))
        try:
            with connection.makefile("rb") as lines:
                return next(_read(lines, path))
        except TimeoutError:
            raise TimeoutError(
                f"{path}: no answer for {_TIMEOUT_S:g} s: the balancer's event loop is held up"
            ) from None
        except StopIteration:
            raise ConnectionResetError(f"{path}: the balancer went away before it answered") from None


def recording(path: Path) -> Iterator[Status]:
    """The pictures of a file, one a line. Raises OSError, and ValueError with the line for what is no picture."""
    with path.open("rb") as lines:
        yield from _read(lines, path)


def _read(lines: Any, where: Path) -> Iterator[Status]:
    number = 0
    while (line := lines.readline(_MOST_LINE_BYTES)).endswith(b"\n"):  # otherwise cut off: the writer was killed
        number += 1
        try:
            yield _DECODER.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"{where}, line {number}, is no picture of a balancer: {error}") from None

"""The journal: what a durable put costs, how fast a crash is recovered from, and what other stores make of the same.

64 concurrent putters, rollouts of 1,000 tokens (21 kB of columns), one commit and one real fsync for all who wait.
``stores`` runs that workload on the journal's database (SQLite), on LMDB, and on a file that is only appended to, with
the same bytes; ``damage`` changes bytes of what a crash left, and opens it again. Run it on a real disk:
``python bench/journal.py [--folder DIR] [--json] [--parts throughput,recovery,stores,damage]``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import anyio
import numpy as np
import torch
from _common import Rows, arguments

import stream_balancer as sb
from stream_balancer.host.journal.log import WAL_BYTES, Log
from stream_balancer.host.records import HeldRollout, rollout_key, row_name, write_row

NUM_PUTTERS = 64
NUM_TOKENS = 1000
WINDOW_ROLLOUTS = 1024  # held at a time, in the comparison of stores


def make_rollout(number: int, num_tokens: int = NUM_TOKENS) -> sb.Rollout:
    """21 bytes a token: ids, log-probabilities of two policies, an advantage, a mask."""
    floats = torch.full((num_tokens,), float(number % 97))
    tokens = {
        "input_ids": torch.arange(number, number + num_tokens),
        "logprobs": floats,
        "ref_logprobs": floats,
        "advantages": floats,
        "loss_mask": torch.ones(num_tokens, dtype=torch.bool),
    }
    return sb.Rollout(tokens=tokens, scalars={"reward": 1.0}, rollout_id=f"rollout-{number}", version=number // 512)


def kind_of_disk(folder: Path) -> str:
    """File system and device, from the longest mount point above; memory is no disk."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    above = [m for m in mounts if folder.is_relative_to(m[1])]
    device, _, kind, *_ = max(above, key=lambda m: len(m[1]))
    if kind in ("tmpfs", "ramfs"):
        raise SystemExit(f"{folder} is {kind}: fsync does nothing there. Give a --folder on a disk")
    return f"{kind} on {device}"


def fsync_seconds(folder: Path, num_bytes: int, repeats: int = 200) -> float:
    """Median seconds of one write of so many bytes and its fdatasync: the floor of a commit."""
    data, times = os.urandom(num_bytes), []
    fd = os.open(folder / "floor", os.O_CREAT | os.O_WRONLY)
    for _ in range(repeats):
        start = time.perf_counter()
        os.write(fd, data)
        os.fdatasync(fd)
        times.append(time.perf_counter() - start)
    os.close(fd)
    (folder / "floor").unlink()
    return statistics.median(times)


# -- the balancer with its journal -------------------------------------------------------------------------------------


async def put_all(folder: Path, count: int) -> dict[str, float]:
    """Through ``await put`` to dispatch and acknowledgement."""
    shutil.rmtree(folder, ignore_errors=True)
    rollouts = [make_rollout(number) for number in range(count)]
    todo = iter(rollouts)
    times: list[float] = []
    config = sb.BalancerConfig(dp_size=8, batch_size=256)
    async with sb.StreamBalancer(config, journal=folder) as balancer, anyio.create_task_group() as tasks:

        async def work() -> None:
            for rollout in todo:
                start = time.perf_counter()
                await balancer.put(rollout)
                times.append(time.perf_counter() - start)

        async def train() -> None:
            async for _ in balancer.batches():
                pass

        tasks.start_soon(train)
        start = time.perf_counter()
        async with anyio.create_task_group() as workers:
            for _ in range(NUM_PUTTERS):
                workers.start_soon(work)
        seconds = time.perf_counter() - start
        balancer.end()
    times.sort()
    return {"rate": count / seconds, "median": times[len(times) // 2], "p99": times[len(times) * 99 // 100]}


def throughput(rows: Rows, folder: Path, repeats: int) -> None:
    """Puts per second, medians."""
    for name, size in (("4 kB", 4096), (f"{NUM_PUTTERS} x 21 kB", NUM_PUTTERS * 21_000)):
        rows.add(f"write + fdatasync of {name}", 1e3 * fsync_seconds(folder, size), "ms")
    for backend in ("asyncio", "trio"):
        runs = [anyio.run(put_all, folder / "journal", 20_000, backend=backend) for _ in range(repeats)]
        name = f"durable puts of 1,000 tokens, {NUM_PUTTERS} putters, {backend}"
        rows.add(name, statistics.median(run["rate"] for run in runs), "rollouts/s", 5000, at_least=True)
        for key in ("median", "p99"):
            rows.add(f"one put, {key}, {backend}", 1e3 * statistics.median(run[key] for run in runs), "ms")
        left = sum(path.stat().st_size for path in (folder / "journal").iterdir())
        rows.add(f"folder after 20,000 puts (430 MB), {backend}", left / 1e6, "MB")


def recovery(rows: Rows, folder: Path, num_tokens: int = NUM_TOKENS, count: int = 100_000) -> None:
    """Seconds from opening a journal of ``count`` waiting rollouts to a balancer that holds them."""
    shutil.rmtree(folder / "journal", ignore_errors=True)
    log = Log(folder / "journal")
    log.open()
    for first in range(0, count, 1000):
        waiting: list[tuple[int, str, bytes | bytearray]] = []
        for number in range(first, min(first + 1000, count)):
            rollout = make_rollout(number, num_tokens)
            key = rollout_key(rollout.rollout_id)
            held = HeldRollout(rollout, time.time(), 0)
            waiting.append((number, key, write_row(row_name(number, key), [held])))
        log.commit(waiting)
        log.copy_wal()
    log.close()
    size = (folder / "journal" / "journal.db").stat().st_size

    async def enter() -> float:
        start = time.perf_counter()
        config = sb.BalancerConfig(dp_size=8, batch_size=256, capacity=2 * count, max_skips=None)
        async with sb.StreamBalancer(config, journal=folder / "journal") as balancer:
            assert balancer.statistics().waiting == count
            return time.perf_counter() - start

    name = f"recovery of {count:,} waiting rollouts of {num_tokens:,} tokens ({size / 1e9:.2f} GB)"
    rows.add(name, anyio.run(enter), "s")
    shutil.rmtree(folder / "journal")


# -- stores ------------------------------------------------------------------------------------------------------------


class Store(Protocol):
    """One commit: these are added, those are done. All durable on return."""

    def commit(self, added: list[tuple[int, bytes]], removed: list[int]) -> None: ...
    def close(self) -> None: ...


class Journal:
    """The journal's own database: rows with an index and a checksum."""

    def __init__(self, folder: Path) -> None:
        self._log = Log(folder)
        self._log.open()

    def commit(self, added: list[tuple[int, bytes]], removed: list[int]) -> None:
        rows = [(number, str(number), zlib.crc32(data).to_bytes(4) + data) for number, data in added]
        self._log.commit(rows, removed)
        if self._log.wal_bytes > WAL_BYTES:
            self._log.copy_wal()

    def close(self) -> None:
        self._log.close()


class Appended:
    """A file, from which nothing is ever removed: the floor."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._fd = os.open(folder / "file", os.O_CREAT | os.O_WRONLY)

    def commit(self, added: list[tuple[int, bytes]], _: list[int]) -> None:
        os.write(self._fd, b"".join([data for _, data in added]))
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class Lmdb:
    """One database of big values; sync at every commit."""

    def __init__(self, folder: Path) -> None:
        import lmdb

        self._env = lmdb.open(str(folder), map_size=8 * 2**30, subdir=True)

    def commit(self, added: list[tuple[int, bytes]], removed: list[int]) -> None:
        with self._env.begin(write=True) as transaction:
            for number, data in added:
                transaction.put(number.to_bytes(8, "big"), data, append=True)
            for number in removed:
                transaction.delete(number.to_bytes(8, "big"))

    def close(self) -> None:
        self._env.close()


STORES: dict[str, Callable[[Path], Store]] = {"journal": Journal, "LMDB": Lmdb, "append only": Appended}


def store_rate(make: Callable[[Path], Store], folder: Path, payloads: list[bytes], count: int) -> tuple[float, float]:
    """Rollouts per second into a store that 64 putters share, a window of them held; bytes of the folder at the end."""
    shutil.rmtree(folder, ignore_errors=True)
    store = make(folder)
    start = time.perf_counter()
    for first in range(0, count, NUM_PUTTERS):
        added = [(n, payloads[n % len(payloads)]) for n in range(first, first + NUM_PUTTERS)]
        gone = first - WINDOW_ROLLOUTS
        store.commit(added, list(range(gone, gone + NUM_PUTTERS)) if gone >= 0 else [])
    seconds = time.perf_counter() - start
    store.close()
    return count / seconds, sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def stores(rows: Rows, folder: Path, repeats: int) -> None:
    """The stores by themselves, in turn."""
    payloads = [bytes(write_row("", [HeldRollout(make_rollout(n), 0.0, 0)])) for n in range(256)]
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in STORES}
    for _ in range(repeats):
        for name, make in STORES.items():
            runs[name].append(store_rate(make, folder / "store", payloads, 64 * 300))
    for name, of in runs.items():
        rate, size = (statistics.median(column) for column in zip(*of, strict=True))
        rows.add(f"{name}: {NUM_PUTTERS} rollouts a commit, encoded before", rate, "rollouts/s")
        rows.add(f"{name}: on the disk with 1,024 held (22 MB)", size / 1e6, "MB")
    shutil.rmtree(folder / "store")


# -- damage ------------------------------------------------------------------------------------------------------------

NUM_RECORDS = 1000


def content(number: int) -> bytes:
    """256 bytes that tell which record they are."""
    return number.to_bytes(4, "big") * 64


def fill(make: Callable[[Path], Store], folder: Path) -> None:
    """Commits of a small record each, then SIGKILL."""
    store = make(folder)
    for number in range(NUM_RECORDS):
        store.commit([(number, content(number))], [])
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """Its result from a forked process, or None if that died."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(out)
        try:
            os.write(into, json.dumps(function(*args)).encode())
        finally:
            os._exit(0)
    os.close(into)
    with open(out) as said:
        text = said.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def read_journal(folder: Path) -> tuple[dict[int, bytes], bool]:
    """Rows whose checksum is right, and whether damage was noticed."""
    log = Log(folder)
    torn_bytes, lost_commits = log.open()
    rows = list(log.db.execute("select number, data from rows"))
    found = {number: data[4:] for number, data in rows if zlib.crc32(data[4:]).to_bytes(4) == data[:4]}
    told = bool(lost_commits or torn_bytes or len(found) < len(rows))
    log.close()
    return found, told


def read_lmdb(folder: Path) -> tuple[dict[int, bytes], bool]:
    """What LMDB gives, and whether it complained."""
    import lmdb

    found: dict[int, bytes] = {}
    try:
        with lmdb.open(str(folder), map_size=8 * 2**30) as env, env.begin() as transaction:
            for key, data in transaction.cursor():
                found[int.from_bytes(key, "big")] = bytes(data)
    except lmdb.Error:
        return found, True
    return found, False


READERS: dict[str, Callable[[Path], tuple[dict[int, bytes], bool]]] = {
    "journal": read_journal,
    "LMDB": read_lmdb,
}


def look(name: str, folder: Path) -> tuple[int, int, bool]:
    """Records that are intact, records that are wrong, and whether the store complained."""
    try:
        found, told = READERS[name](folder)
    except Exception:  # noqa: BLE001 - whatever it is, it is a complaint
        return 0, 0, True
    intact = sum(data == content(number) for number, data in found.items())
    return intact, len(found) - intact, told


def damage(rows: Rows, folder: Path, places: int = 512) -> None:
    """One byte changed in a copy of what SIGKILL left, which is then opened: over the last 4 KiB of each file, and over
    all of it."""
    base, copy = folder / "base", folder / "copy"
    for name in READERS:
        shutil.rmtree(base, ignore_errors=True)
        in_child(fill, STORES[name], base)
        for path in sorted(base.iterdir()):
            size = path.stat().st_size
            if path.name in ("lock", "lock.mdb") or size < 4096:
                continue
            for where, first in (("last 4 KiB", size - 4096), ("whole", 0)):
                offsets = np.linspace(first, size - 1, places).astype(int).tolist()
                damaged(rows, f"{name}: a byte of {path.name} changed, {where}", base, copy / path.name, offsets)
        shutil.rmtree(base)
    shutil.rmtree(copy, ignore_errors=True)


def damaged(rows: Rows, name: str, base: Path, damaged: Path, offsets: list[int]) -> None:
    """What a store makes of each damage."""
    noticed = missing = wrong = died = 0
    fewest = NUM_RECORDS
    for offset in offsets:
        shutil.rmtree(damaged.parent, ignore_errors=True)
        shutil.copytree(base, damaged.parent)
        with damaged.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0xFF]))
        seen = in_child(look, name.partition(":")[0], damaged.parent)
        if seen is None:
            died += 1
            continue
        intact, changed, told = seen
        noticed += told
        missing += intact + changed < NUM_RECORDS and not told
        wrong += changed > 0 and not told
        fewest = min(fewest, intact)
    silently: dict[str, Any] = {
        "records_missing_silently": missing,
        "records_wrong_silently": wrong,
        "process_died": died,
    }
    unit = f"of {len(offsets)} noticed"
    rows.add(name, noticed, unit, fewest_intact_records=fewest, records=NUM_RECORDS, **silently)


PARTS: dict[str, Callable[[Rows, Path, int], None]] = {
    "throughput": throughput,
    "recovery": lambda rows, folder, _: recovery(rows, folder),
    "stores": stores,
    "damage": lambda rows, folder, _: damage(rows, folder),
}


def main() -> None:
    options = arguments(__doc__, parts=",".join(PARTS), folder=None, repeats=3)
    rows = Rows(options.json, options.results)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name).resolve()
        rows.text(kind_of_disk(folder))
        for part in options.parts.split(","):
            PARTS[part](rows, folder, options.repeats)


if __name__ == "__main__":
    main()

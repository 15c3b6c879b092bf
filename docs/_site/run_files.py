"""The table of docs/run_files.md: which files of the package a plain run executes, and how much of them.

    python docs/_site/run_files.py          # runs a balancer, a worker and two ranks, and writes the page anew

A file counts where the run has called one of its functions; importing it does not.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout, whichever is installed
PACKAGE = ROOT / "stream_balancer"
PAGE = ROOT / "docs" / "run_files.md"
BEGIN, END = "<!-- the table: docs/_site/run_files.py -->", "<!-- its end -->"


def lines_of(path: Path) -> int:
    """Lines of a file, blank ones and comments included."""
    return path.read_text().count("\n")


def functions_of(path: Path) -> dict[int, int]:
    """First line of each function, decorators included, and how many lines it has."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            found[first] = (node.end_lineno or first) - first + 1
    return found


def plain_run() -> dict[str, set[int]]:
    """First lines of the functions that a plain run calls, by file: a worker puts 32 rollouts over TCP, and two ranks
    train on them, each in a thread here."""
    import stream_balancer as sb

    parts = (sb.BalancerConfig, sb.StreamBalancer, sb.TorchTransport, sb.serve, sb.connect, sb.RankFeed, sb.Rollout)
    assert all(parts)  # imported now: functions that a module calls while it is imported are no part of the run
    called: dict[str, set[int]] = defaultdict(set)

    def note(frame: FrameType, event: str, _: Any) -> None:
        code: CodeType = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)) and code.co_name != "<module>":
            called[os.path.relpath(code.co_filename, PACKAGE)].add(code.co_firstlineno)

    threading.setprofile(note)
    try:
        _run()
    finally:
        threading.setprofile(None)
    return called


def _run() -> None:
    import anyio
    import torch

    import stream_balancer as sb

    address: list[str] = []
    ready = threading.Event()

    async def control() -> None:
        config = sb.BalancerConfig(dp_size=2, batch_size=8)
        listening = sb.TorchTransport.listen(dp_size=2)
        async with sb.StreamBalancer(config, num_producers=1) as balancer, listening as transport:
            address.append(transport.address)
            ready.set()
            await sb.serve(balancer, transport)

    def work() -> None:
        with sb.connect(address[0]) as producer:
            for length in range(1, 33):
                producer.put(sb.Rollout(tokens={"input_ids": torch.arange(length)}))
            producer.end()

    def train(rank: int) -> None:
        for batch in sb.RankFeed(address[0], rank=rank, dp_size=2):
            for micro_batch in batch.micro_batches:
                micro_batch.packed()

    threads = [threading.Thread(target=anyio.run, args=(control,), daemon=True)]
    threads[0].start()
    ready.wait(20)
    threads += [threading.Thread(target=work, daemon=True)]
    threads += [threading.Thread(target=train, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(20)
        if thread.is_alive():
            raise RuntimeError("the run did not end in 20 s")


def table(called: dict[str, set[int]]) -> str:
    """Markdown: a row for each folder, with its files."""
    rows: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for name, found in sorted(called.items()):
        path = PACKAGE / name
        functions = functions_of(path)
        run = sum(lines for first, lines in functions.items() if first in found)
        folder = Path(name).parent.as_posix()
        rows["" if folder == "." else folder].append((path.stem, lines_of(path), run))
    lines = ["| folder | lines of these files | lines of the functions called | files: lines |", "|---|---|---|---|"]
    for folder, files in sorted(rows.items()):
        named = ", ".join(f"`{name}` {number}" for name, number, _ in files)
        lines.append(f"| `{folder or 'stream_balancer'}` | {_sum(files, 1):,} | {_sum(files, 2):,} | {named} |")
    every = [one for files in rows.values() for one in files]
    total = sum(map(lines_of, PACKAGE.rglob("*.py")))
    number = len(list(PACKAGE.rglob("*.py")))
    all_of_it = f"**{len(every)} files** | **{_sum(every, 1):,}** | **{_sum(every, 2):,}**"
    lines.append(f"| {all_of_it} | the package has {number} files, {total:,} lines |")
    return "\n".join(lines)


def _sum(files: Iterable[tuple[str, int, int]], which: int) -> int:
    return sum(int(one[which]) for one in files)


def main() -> None:
    """Write the table into the page."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(plain_run())}\n{END}{after}")


if __name__ == "__main__":
    main()

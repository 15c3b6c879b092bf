"""``torchrun ... restarts_rank.py EXAMPLE train FOLDER``: a rank of examples/torchrun_restarts.py that writes down its
process, and the rollouts that every step gave it."""

import os
import runpy
import sys
from pathlib import Path

import stream_balancer as sb

del sys.argv[0]
folder, rank = Path(sys.argv[2]), os.environ["RANK"]
(folder / f"rank{rank}.pid").write_text(str(os.getpid()))
log = (folder / f"rank{rank}.steps").open("a")
begin = sb.RankFeed.__next__


def noted(feed: sb.RankFeed) -> sb.Step:
    """What the feed gives, written down."""
    step = begin(feed)
    log.write(" ".join([str(step.step), *(one.rollout_id for one in step.rollouts if not one.is_padding)]) + "\n")
    log.flush()
    return step


sb.RankFeed.__next__ = noted  # type: ignore[assignment,method-assign]
runpy.run_path(sys.argv[0], run_name="__main__")

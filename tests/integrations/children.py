"""Processes that end when whoever started them does, however that comes."""

from __future__ import annotations

import shutil
from pathlib import Path


def ending_with_us(*command: str | Path) -> list[str]:
    """This command, which is killed when the thread that started it is gone; where there is no setpriv, it is not."""
    setpriv = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
    return [*setpriv, *map(str, command)]

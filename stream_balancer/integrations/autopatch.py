"""OpenRLHF and ROLL with our partition, started by this module in the place of themselves; no line of theirs changes.

::

    python -m stream_balancer.integrations.autopatch openrlhf.cli.train_ppo_ray --actor.num_nodes 1 ...
    python -m stream_balancer.integrations.autopatch examples/start_rlvr_pipeline.py --config_name ...

``get_seqlen_balanced_partitions`` is patched when its module is loaded: in this process, and in every worker of the Ray
job that it starts.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from stream_balancer.integrations.partitions import patch

__all__ = ["install", "with_install"]

_HOMES = ("openrlhf.utils.seqlen_balancing", "roll.utils.functionals")
_HERE = "stream_balancer.integrations.autopatch"  # __name__ is __main__ where this is run


class _WhenLoaded(MetaPathFinder):
    """Patches a home right after it ran, before anybody can import the function by name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in _HOMES else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Patch the trainers' partition when it is loaded. In every process that partitions, before it imports them: name
    it as ``worker_process_setup_hook`` where you write Ray's runtime environment yourself."""
    # before the finders that would load it unpatched
    sys.meta_path.insert(0, _WhenLoaded())


def with_install(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Ray's runtime environment with :func:`install` in each worker. Raises ValueError if there is another hook."""
    asked = dict(runtime_env or {})
    hook = asked.setdefault("worker_process_setup_hook", f"{_HERE}.install")
    if hook != f"{_HERE}.install":
        raise ValueError(f"Ray's workers have the setup hook {hook!r} already: call {_HERE}.install() in it")
    return asked


def main() -> None:
    """Run a module or a file, with the arguments that follow it."""
    if len(sys.argv) < 2:
        sys.exit(f"usage: python -m {_HERE} MODULE_OR_FILE [ARGUMENTS]")
    _, program, *arguments = sys.argv
    install()
    os.environ["RAY_RUNTIME_ENV_HOOK"] = f"{_HERE}.with_install"  # ray.init asks it
    sys.argv = [program, *arguments]
    if program.endswith(".py"):
        # as Python does for a file
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

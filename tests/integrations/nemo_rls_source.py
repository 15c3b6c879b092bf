"""test_nemo_rl.py on NeMo-RL's own classes: ``python tests/integrations/nemo_rls_source.py PATH_OF_A_CHECKOUT``.

PyPI's nemo-rl is a placeholder, so `make test-integrations` runs those tests on stand-ins. Here the sampler's protocol
and factory and KVBatchMeta are the real ones; what stands beside them and what needs a
GPU (two packages' ``__init__``, the replay buffer, NVML) is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest


def without_init(name: str, source: Path) -> None:
    """A package whose modules can be imported, but whose ``__init__`` does not run."""
    package = ModuleType(name)
    package.__path__ = [str(source.joinpath(*name.split(".")))]
    sys.modules[name] = package


if __name__ == "__main__":
    source = Path(sys.argv[1]).resolve()
    sys.path[:0] = [str(source), str(Path(__file__).resolve().parents[2])]
    for name in ("nemo_rl.algorithms", "nemo_rl.algorithms.async_utils"):
        without_init(name, source)
    beside = ModuleType("nemo_rl.algorithms.async_utils.replay_buffer")
    beside.TQReplayBuffer = object  # type: ignore[attr-defined]
    sys.modules[beside.__name__] = beside
    sys.modules.setdefault("pynvml", ModuleType("pynvml"))
    tests = Path(__file__).with_name("test_nemo_rl.py")
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", str(tests), *sys.argv[2:]]))

"""The TorchSpec example's mixin before a controller with TorchSpec's pool and dispatch."""

from __future__ import annotations

import importlib.util
import random
import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import example as always
from hypothesis import given, settings
from hypothesis import strategies as st

PATH = Path(__file__).parents[2] / "examples" / "torchspec_dispatch.py"
spec = importlib.util.spec_from_file_location("torchspec_dispatch", PATH)
assert spec is not None
assert spec.loader is not None
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


class Controller:
    """What of AsyncTrainingController the mixin meets (TorchSpec, commit 6dda2bf)."""

    def __init__(self, dp_size: int, per_rank: int) -> None:
        self.dp_size, self.batch_id = dp_size, 0
        self.dispatch_batch_size = dp_size * per_rank
        self.sample_pool: deque[Any] = deque()
        self._pool_lock = threading.Lock()
        self.dispatched: list[list[list[Any]]] = []

    def try_dispatch_batch(self) -> bool:
        with self._pool_lock:
            if len(self.sample_pool) < self.dispatch_batch_size:
                return False
            results = [self.sample_pool.popleft() for _ in range(self.dispatch_batch_size)]
        self.dispatched.append(self._partition_results(results))
        self.batch_id += 1
        return True

    def _partition_results(self, results: list[Any]) -> list[list[Any]]:
        return [results[rank :: self.dp_size] for rank in range(self.dp_size)]


class Balanced(example.BalancedDispatch, Controller):  # type: ignore[misc,name-defined]
    pass


@settings(max_examples=10)
@always(4, 4, 0, 4)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**16), st.integers(1, 4))
def test_all_are_dispatched_once_in_equal_counts_and_nobody_waits_for_ever(
    dp_size: int, per_rank: int, seed: int, ahead: int
) -> None:
    controller, rng = Balanced(dp_size, per_rank), random.Random(seed)
    count, steps = controller.dispatch_batch_size, 11
    for step in range(steps):
        while len(controller.sample_pool) < count * ahead:
            name = f"{step}/{len(controller.sample_pool)}/{rng.random()}"
            shapes = {"input_ids": (1, int(rng.lognormvariate(5, 1)) + 1)}
            controller.sample_pool.append(SimpleNamespace(mooncake_key=name, tensor_shapes=shapes))
        assert controller.try_dispatch_batch()
    went = [[result.mooncake_key for share in shares for result in share] for shares in controller.dispatched]
    keys = [key for names in went for key in names] + [result.mooncake_key for result in controller.sample_pool]
    assert len(keys) == len(set(keys))
    assert all(len(share) == per_rank for shares in controller.dispatched for share in shares)
    waited = [step - int(key.partition("/")[0]) for step, names in enumerate(went) for key in names]
    assert max(waited) <= 8

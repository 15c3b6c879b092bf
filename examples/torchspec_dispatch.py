"""Balanced dispatch for TorchSpec (draft-model training): `python examples/torchspec_dispatch.py` compares, without it.

Its controller is a Ray actor; put the mixin before its class and make that the actor (torchspec/controller/setup.py):

    plain = AsyncTrainingController.__ray_metadata__.modified_class
    AsyncTrainingController = ray.remote(type("Balanced", (BalancedDispatch, plain), {}))
"""

from typing import Any

import numpy as np

from stream_balancer import planning


class BalancedDispatch:
    """Of the pool's samples those go that balance best over the ranks; nobody is passed over more than 8 times."""

    def try_dispatch_batch(self: Any) -> bool:
        """TorchSpec takes from the left end of the pool: put the chosen there."""
        skips = self.__dict__.setdefault("skips_of", {})
        with self._pool_lock:
            pool, count = list(self.sample_pool), self.dispatch_batch_size
            if len(pool) > count:
                chosen = planning.choose(
                    [length(result) for result in pool],
                    dp_size=self.dp_size,
                    batch_size=count,
                    max_skips=8,
                    skips=[skips.get(result.mooncake_key, 0) for result in pool],
                    equal_rollouts=True,
                    step=self.batch_id,
                ).tolist()
                left = [result for i, result in enumerate(pool) if i not in chosen]
                self.skips_of = {r.mooncake_key: skips.get(r.mooncake_key, 0) + 1 for r in left}
                self.sample_pool = type(self.sample_pool)([pool[i] for i in chosen] + left)
        return bool(super().try_dispatch_batch())  # type: ignore[misc]

    def _partition_results(self: Any, results: list[Any]) -> list[list[Any]]:
        """TorchSpec deals round-robin; a rank still gets as many samples as any other."""
        shares = planning.split([length(result) for result in results], self.dp_size, equal_rollouts=True)
        return [[results[i] for i in share] for share in shares]


def length(result: Any) -> int:
    """Tokens of a sample: of its input_ids, or of hidden states ``[..., tokens, width]`` where only those were kept."""
    shapes = result.tensor_shapes or {}
    if "input_ids" in shapes:
        return int(shapes["input_ids"][-1])
    # engines that keep no tensor say no length: such samples are alike
    return max((int(shape[-2]) for shape in shapes.values() if len(shape) > 1), default=1)


if __name__ == "__main__":
    lengths = np.random.default_rng(0).lognormal(7, 1, 64).astype(int)
    for name, shares in {
        "round-robin": [np.arange(rank, 64, 8) for rank in range(8)],
        "balanced": planning.split(lengths, 8, equal_rollouts=True),
    }.items():
        loads = [int(lengths[share].sum()) for share in shares]
        print(f"{name}: the slowest of 8 ranks has {max(loads) / np.mean(loads) - 1:.1%} more than the mean")

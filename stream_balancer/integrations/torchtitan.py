"""torchtitan's RL experiment: which samples of a step share a row of its Batcher.

::

    from stream_balancer.integrations.torchtitan import patch

    patch()                                     # in the controller's process, before it builds its Batcher

Rows are padded to ``seq_len``, and ranks meet at every micro-batch: fewer rows are less work, and what differs between
two rows is their attention. Nothing of torchtitan is imported but in :func:`patch`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from stream_balancer.integrations._plans import laid_out

__all__ = ["patch"]

_HOMES = ("torchtitan.rl.components.batcher", "torchtitan.experiments.rl.components.batcher")  # main; 0.3.0


def patch() -> Callable[[], None]:
    """Put our plan behind ``Batcher``, for all of them: the same samples in as few rows as fit them, dealt so that the
    ranks' rows of a micro-batch have alike sums of squared lengths. With fewer samples than ranks its own way remains.
    Returns a function that puts torchtitan's back."""
    batcher = _home().Batcher
    theirs = batcher._assign_training_samples_to_rows

    def ours(self: Any, training_samples: list[Any]) -> list[list[Any]]:
        # its rows hold what it packs, which is less than a sample's tokens
        lengths = [max(self.num_tokens_to_pack(sample), 1) for sample in training_samples]
        work = [float(length) ** 2 for length in lengths]
        plan = laid_out(lengths, work, self._dp_degree, self.seq_len, sync="micro_batch")
        if plan is None:
            return theirs(self, training_samples)  # type: ignore[no-any-return]
        # it deals rows to the ranks in turn
        return [[training_samples[i] for i in row] for of_ranks in zip(*plan, strict=True) for row in of_ranks]

    def put_back() -> None:
        batcher._assign_training_samples_to_rows = theirs

    batcher._assign_training_samples_to_rows = ours
    return put_back


def _home() -> Any:
    """The module of ``Batcher``. Raises ImportError, naming where it was looked for."""
    for name in _HOMES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or " "):
                raise  # it is there, and something that it needs is not
    raise ImportError(f"this torchtitan has no {' and no '.join(_HOMES)}, where its RL experiment packs samples")

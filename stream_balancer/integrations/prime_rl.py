"""prime-rl: its packing of a step's samples into micro-batches and ranks.

::

    # my_orchestrator.py, in the place of the command `orchestrator`
    from prime_rl.entrypoints.orchestrator import main
    from stream_balancer.integrations.prime_rl import patch

    patch()
    main()

prime-rl fills micro-batches first and deals them to ranks so that rank totals are alike. Its trainer shards parameters,
so its ranks meet at every micro-batch: here those of the same index are made alike. Only the plan is ours: each
micro-batch is made by prime-rl's own function. Nothing of prime-rl is imported but in :func:`patch`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from stream_balancer.integrations._plans import laid_out
from stream_balancer.integrations.partitions import replace

__all__ = ["patch"]


def patch() -> Callable[[], None]:
    """Put our plan behind prime-rl's ``prepare_batch``, in every module loaded so far that has it: same arguments, same
    answer, work by its own ``bin_cost``. In the process of the orchestrator, before it trains. Returns a function that
    puts prime-rl's back.

    prime-rl's plan remains where ours does not apply: with images, whose micro-batches must meet at the same index of
    every rank; with routed experts on some samples only; and with too few samples for as many micro-batches on each
    rank, where prime-rl adds micro-batches without loss.
    """
    # by its name: a type checker need not find prime-rl
    batch = importlib.import_module("prime_rl.trainer.batch")
    theirs = batch.prepare_batch

    def prepare_batch(
        rollouts: list[Any],
        seq_len: int,
        num_train_workers: int,
        bin_cost: Callable[[Sequence[int]], int],
        pad_to_multiple_of: int = 1,
    ) -> list[list[Any]]:
        lengths = [min(len(sample.token_ids), seq_len) for sample in rollouts]  # longer ones are truncated
        work = [bin_cost([length]) for length in lengths]
        plan = laid_out(lengths, work, num_train_workers, seq_len, sync="micro_batch")
        plain = all(sample.mm_kwargs is None for sample in rollouts)
        either = len({sample.routed_experts is None for sample in rollouts}) == 1
        if plan is None or not (plain and either):
            return theirs(rollouts, seq_len, num_train_workers, bin_cost, pad_to_multiple_of)  # type: ignore[no-any-return]

        def made(micro_batch: Sequence[int]) -> Any:
            # one worker and samples that fit one micro-batch: its own plan has no choice left
            (one,) = theirs([rollouts[i] for i in micro_batch], seq_len, 1, bin_cost, pad_to_multiple_of)[0]
            return one

        return [[made(micro_batch) for micro_batch in of_rank] for of_rank in plan]

    return replace(batch, "prepare_batch", prepare_batch)

"""Rollouts for tests: small, valid, and recognisable wherever they turn up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from stream_balancer.rollouts import Rollout, Version


def make_rollout(
    num_tokens: int,
    rollout_id: str | None = None,
    *,
    group_id: str | None = None,
    version: Version | None = None,
    advantage: float = 1.0,
    prompt_tokens: int = 0,
    cost: float | None = None,
    seed: int | None = None,
    minimal: bool = False,
) -> Rollout:
    """A valid rollout with the columns GRPO uses: ``input_ids`` int64, ``logprobs`` float32, ``loss_mask`` bool, all
    ``[L]``.

    :param num_tokens: L, prompt included.
    :param rollout_id: its name; a fresh random one if None.
    :param advantage: its one scalar.
    :param prompt_tokens: the first so many tokens get ``loss_mask`` False and ``logprobs`` 0.0.
    :param seed: seeds token ids (below 1000) and log-probabilities; None = token ids 0..L-1, cheap and readable.
    :param minimal: only the required column, no scalar: the cheapest valid rollout.
    """
    given: dict[str, Any] = {"group_id": group_id, "version": version, "cost": cost}
    if rollout_id is not None:
        given["rollout_id"] = rollout_id
    ids = torch.arange(num_tokens)
    if minimal:
        return Rollout(tokens={"input_ids": ids}, **given)
    logprobs = torch.full((num_tokens,), -0.5)
    if seed is not None:
        rng = np.random.default_rng(seed)
        ids = torch.from_numpy(rng.integers(0, 1000, num_tokens))
        logprobs = torch.from_numpy(-rng.exponential(1.0, num_tokens).astype(np.float32))
    mask = torch.arange(num_tokens) >= prompt_tokens
    tokens = {"input_ids": ids, "logprobs": logprobs * mask, "loss_mask": mask}
    return Rollout(tokens=tokens, scalars={"advantage": advantage}, **given)


def make_rollouts(
    lengths: Sequence[int], *, prefix: str = "r", siblings: int | None = None, minimal: bool = False
) -> Iterator[Rollout]:
    """Rollouts of the given lengths (tokens), named ``r0, r1, ...`` in order.

    :param siblings: if given, every so many neighbours share a ``group_id`` (``g0, g1, ...``).
    """
    for index, length in enumerate(lengths):
        group_id = None if siblings is None else f"g{index // siblings}"
        yield make_rollout(int(length), f"{prefix}{index}", group_id=group_id, minimal=minimal)

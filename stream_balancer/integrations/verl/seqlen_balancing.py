"""verl's micro-batch former, with its signature and conventions, on ``stream_balancer.planning``; its partitioner is
the one that several trainers share (``integrations.partitions``).

Written against verl 0.9.1. How much work a length is stays verl's answer (``calculate_workload`` of the installed verl,
or what you put in its place). Every rank of a process group must call the same implementation: the collectives
differ (one all_reduce instead of three and one more per retry).
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stream_balancer.integrations._plans import UnplannableError, packed

logger = logging.getLogger("stream_balancer.verl")


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """verl's function of this name: a TensorDict cut into micro-batches of at most `max_token_len` tokens.

    Args:
        batch: a TensorDict with jagged ``input_ids``, or with ``attention_mask`` ``[B, S]``.
        max_token_len: most tokens in a micro-batch; at least the longest row (padding counted, as in verl).
        dp_group: ranks that must agree on the number of micro-batches. Needs one all_reduce of three numbers.
        num_batches_divided_by: the number is a multiple of this (virtual pipelines).
        same_micro_num_in_dp: False: no agreement, `dp_group` is not used.
        min_num_micro_batch: at least so many.
        use_dynamic_bsz_balance: the smaller micro-batches at both ends, where a pipeline fills and drains; otherwise
            the heaviest first.
        force_group_size: so many consecutive rows stay together. A group longer than `max_token_len` is alone in its
            micro-batch, and a warning is logged (as verl's main branch has it; 0.9.1 refuses it).

    Returns:
        The micro-batches, and the positions in `batch` of each one's rows. The least number of micro-batches that was
        found on the rank that needs most.

    Raises:
        UnplannableError: a ValueError, and an AssertionError as verl's. B is no multiple of `force_group_size`, a row
            is wider than `max_token_len`, or more micro-batches are needed than there are groups; of the last two all
            ranks of `dp_group` raise together: none is left waiting in a collective.
    """
    from verl.utils import tensordict_utils

    lengths, widest = _lengths(batch)
    if len(lengths) % force_group_size:
        raise UnplannableError(f"Batch size {len(lengths)} must be divisible by force_group_size {force_group_size}")
    tokens = _numbers(lengths).astype(np.int64).reshape(-1, force_group_size).sum(axis=1)
    work = workload(lengths).reshape(-1, force_group_size).sum(axis=1)
    every = num_batches_divided_by or 1
    if widest <= max_token_len < tokens.max():
        logger.warning(
            "%d of %d forced groups exceed max_token_len=%d (the longest has %d tokens): each is alone in its "
            "micro-batch. Raise max_token_len to be sure of the memory",
            int((tokens > max_token_len).sum()),
            tokens.size,
            max_token_len,
            int(tokens.max()),
        )
    bins = packed(tokens, work, max_token_len, multiple_of=every)
    needs = _Needs(max(tokens.size + 1 if bins is None else len(bins), min_num_micro_batch or 1), tokens.size, widest)
    agreed = needs
    if dp_group is not None and same_micro_num_in_dp and dist.is_initialized():
        agreed = _agree(needs, dp_group)
    number = -(-agreed.micro_batches // every) * every
    # after the collective, so that nobody waits in one for a rank that has raised
    _check(agreed, number, max_token_len)
    if bins is None or len(bins) != number:
        bins = packed(tokens, work, max_token_len, multiple_of=number)
    assert bins is not None
    # the position breaks ties: ranks that cut alike must order alike
    bins.sort(key=lambda one: (work[one].sum(), one[0]), reverse=True)
    if use_dynamic_bsz_balance:
        bins = bins[::2][::-1] + bins[1::2]
    rows = np.arange(len(lengths)).reshape(-1, force_group_size)
    positions = [rows[one].ravel().tolist() for one in bins]
    return [tensordict_utils.index_select_tensor_dict(batch, one) for one in positions], positions


class _Needs(NamedTuple):
    """Needs of a rank, or of the ranks of a group together."""

    micro_batches: int
    groups: int
    widest: int


def _agree(needs: _Needs, group: dist.ProcessGroup) -> _Needs:
    """The neediest rank's numbers (the least number of groups), the same on every rank: one all_reduce."""
    from verl.utils.device import get_device_name

    device = "cpu" if dist.get_backend(group) == dist.Backend.GLOO else get_device_name()
    numbers = torch.tensor(needs, dtype=torch.int64, device=device)
    # the least number of groups, by the same maximum: one all_reduce instead of two
    numbers[1].neg_()
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    micro_batches, groups, widest = numbers.tolist()
    return _Needs(micro_batches, -groups, widest)


def _check(agreed: _Needs, number: int, max_token_len: int) -> None:
    """Raise on every rank if one rank cannot do it."""
    if agreed.widest > max_token_len:
        raise UnplannableError(
            f"max_token_len must be greater than the sequence length. Got {max_token_len=} and max_seq_len="
            f"{agreed.widest} on the rank with the widest rows"
        )
    if number > agreed.groups:
        raise UnplannableError(
            "Cannot satisfy max_token_len while keeping forced groups atomic and using the same micro-batch count "
            f"across DP ranks: {number} micro-batches are needed, but a rank has only {agreed.groups} groups. Raise "
            "max_token_len, or lower min_num_micro_batch or num_batches_divided_by"
        )


def _lengths(batch: Any) -> tuple[Tensor, int]:
    """[B] tokens of each row, and the widest row, padding counted."""
    input_ids = batch["input_ids"]
    if input_ids.is_nested:
        lengths = input_ids.offsets().diff()
        return lengths, int(lengths.max())
    mask = batch["attention_mask"]
    return mask.sum(dim=1), int(mask.shape[-1])


def workload(lengths: Any) -> np.ndarray[Any, Any]:
    """[n] float64: verl's answer to how much work each of ``[n]`` lengths is."""
    from verl.utils.seqlen_balancing import calculate_workload

    return _numbers(calculate_workload(torch.as_tensor(lengths, dtype=torch.int64)))


def _numbers(values: Tensor) -> np.ndarray[Any, Any]:
    # verl's workload may be int64, and lie on an accelerator
    return values.cpu().numpy().astype(np.float64)

"""A rank's feed as a ``torch.utils.data`` dataset, so that a loop written for DataLoader needs nothing new.

::

    dataset = RolloutDataset(sb.RankFeed("tcp://10.0.0.1:29400", rank=3, dp_size=8))
    for item in DataLoader(dataset, batch_size=None):           # the balancer has made the batches
        losses = cross_entropy(model(item["input_ids"]), item["targets"], reduction="none")
        loss = (losses * item["loss_mask"]).sum() / item["global_num_loss_tokens"]
        loss.backward()
        if item["is_last_micro_batch"]:
            optimizer.step(); optimizer.zero_grad()

Asking for a micro-batch says "done with the one before", and asking for the first of a step acknowledges the step
before: that is true of ``DataLoader(num_workers=0)`` and a plain loop. It is false of a loader that looks one batch
ahead, so those are refused here with what to do instead; with ``RankFeed(auto_ack=False)`` the loop says what it
trained on: :meth:`RolloutDataset.acknowledge`.

Only dicts are made here: what a batch is and when it comes is the feed's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torch.utils.data import IterableDataset, get_worker_info

import stream_balancer as sb

__all__ = ["Layout", "RolloutDataset"]

Layout = Callable[[sb.rollouts.MicroBatch], Mapping[str, Any]]
"""How a micro-batch becomes named tensors: ``sb.rollouts.MicroBatch.packed``, ``sb.rollouts.MicroBatch.nested``,
``functools.partial(sb.rollouts.MicroBatch.padded, padding_side="left")``, or your own. The columns of these layouts
stand at their own token, not at the token before, which predicts it."""

_SHIFTED = functools.partial(sb.rollouts.MicroBatch.packed, shift=True)

_SAYS_OF_THE_STEP = (
    "step",
    "global_num_rollouts",
    "global_num_tokens",
    "global_num_loss_tokens",
    "global_num_executions",
)
_IN_A_WORKER = (
    "RolloutDataset needs num_workers=0: its sockets belong to this process, and RankFeed(depth=...) already receives "
    "the next shares beside the step"
)


class RolloutDataset(IterableDataset[dict[str, Any]]):
    """Yields this rank's micro-batches as dicts, each exactly once, in order. Use ``DataLoader(dataset,
    batch_size=None)`` on every rank, with ``num_workers=0``.

    A dict holds what ``layout`` makes (``input_ids``, your other columns and scalars, ``loss_mask``,
    ``rollout_weights``, ``execution_weights``, ``execution_loss_tokens``, and of a packed micro-batch ``cu_seqlens``,
    ``max_seqlen``, ``position_ids``). By default that is ``packed(shift=True)``: each row has the ``targets``,
    ``loss_mask`` and other columns of the token that follows. And these ints:

    * ``step``; ``micro_batch``, from 0; ``is_last_micro_batch`` (bool): step the optimizer after this one;
    * ``global_num_rollouts``, ``global_num_tokens``, ``global_num_loss_tokens``, ``global_num_executions``: divide the
      *sum* of your loss by one of them (times dp_size under DDP and FSDP, which average gradients).

    The position is the dataset's: an iterator left early (an epoch's end) loses nothing, the next goes on there. Once
    the rollouts have ended, iterating again yields nothing.

    Raises, from the iteration: what :class:`~stream_balancer.RankFeed` raises; RuntimeError in a DataLoader worker, or
    under a loader that looks ahead; ValueError if a column has the name of one of the entries above.
    """

    def __init__(self, feed: sb.RankFeed, *, layout: Layout = _SHIFTED) -> None:
        """``feed``: the rank's own; ``RankFeed(device=...)`` brings the tensors to an accelerator. ``layout``: see
        :data:`Layout`."""
        self._feed = feed
        self._layout = layout
        self._share: Any = None
        self._place = 0
        self._ended = False

    def acknowledge(self, item: Mapping[str, Any]) -> None:
        """Your weights, or your checkpoint, contain this dict and all before it. For ``RankFeed(auto_ack=False)``.

        A step is acknowledged with its last micro-batch and not before: a crash in between delivers it again, whole.
        From any thread, never blocks, idempotent. Raises ClosedResourceError if the feed was closed before.
        """
        self._feed.acknowledge_through(item["step"] if item["is_last_micro_batch"] else item["step"] - 1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if get_worker_info() is not None:
            raise RuntimeError(_IN_A_WORKER)
        return self

    def __next__(self) -> dict[str, Any]:
        if self._share is None:
            self._share, self._place = self._next_share(), 0
        item = self._item(self._share, self._place)
        self._place += 1  # only now: if layout= raised, the next call gives the same micro-batch
        if item["is_last_micro_batch"]:
            self._share = None  # its buffer is used again once the loop has let go of the tensors
        return item

    def __getstate__(self) -> NoReturn:
        raise TypeError(_IN_A_WORKER)

    def _next_share(self) -> Any:
        _refuse_looking_ahead(self._feed.auto_ack)
        if self._ended:
            raise StopIteration
        try:
            return next(self._feed)
        except StopIteration:
            self._ended = True
            raise

    def _item(self, share: Any, index: int) -> dict[str, Any]:
        rows = self._layout(share.micro_batches[index])
        ours = _beside(rows) | {name: getattr(share, name) for name in _SAYS_OF_THE_STEP}
        ours["micro_batch"] = index
        ours["is_last_micro_batch"] = index == len(share.micro_batches) - 1
        # position_ids may be a column, too: then the layout gives that one back
        if both := rows.keys() & (ours.keys() - {"position_ids"}):
            raise ValueError(
                f"the rollouts have columns or scalars named {sorted(both)}, which RolloutDataset gives itself. Rename "
                "them, or leave them out in layout="
            )
        return dict(rows.items()) | ours  # not dict(rows): a TensorDict iterates over its rows


_BESIDE = (
    *("rollout_weights", "execution_weights", "execution_loss_tokens", "position_ids"),
    *("attention_mask", "lengths"),  # of padded columns
    *("cu_seqlens", "max_seqlen"),  # of others, whose lengths are a tuple
)


def _beside(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors that a layout of MicroBatch carries beside its columns."""
    if not hasattr(rows, "rollout_weights"):
        return {}
    found = {name: getattr(rows, name, ()) for name in _BESIDE}
    return {name: value for name, value in found.items() if not isinstance(value, tuple)}


# --- loaders that look ahead ------------------------------------------------------------------------------------------


def _refuse_looking_ahead(auto_ack: bool) -> None:
    """Refuse to be called by a loader that asks for a batch before the one in hand was trained on: it would
    acknowledge what is not trained yet, and wait for rollouts that may need the step it holds back. O(depth of the
    stack), once a step."""
    # a loader says nowhere that it looks ahead: who calls shows it
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == "accelerate.data_loader":
            raise RuntimeError(
                "this DataLoader went through accelerator.prepare(), which looks one batch ahead and deals out rank "
                "0's batches to every rank. Prepare model and optimizer only: each rank's loader has its own share; "
                "RankFeed(device=accelerator.device) brings it to the device"
            )
        if auto_ack and module.endswith("pytorch.loops.fetchers") and _prefetches(frame.f_locals.get("self")):
            raise RuntimeError(
                "Lightning fetches one batch ahead of training_step(self, batch). Write training_step(self, "
                "dataloader_iter) with batch, _, _ = next(dataloader_iter), which does not; or give RankFeed "
                "auto_ack=False and call dataset.acknowledge(batch) in on_train_batch_end"
            )
        frame = frame.f_back  # type: ignore[assignment]


def _prefetches(fetcher: object) -> bool:
    """A Lightning data fetcher that looks ahead, which it does where the loader's length is not known."""
    return type(fetcher).__name__ == "_PrefetchDataFetcher" and getattr(fetcher, "length", None) is None

"""The batch: what a step trains on, by rank. :mod:`.micro_batch` has what a rank runs at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from stream_balancer.field_docs import documented
from stream_balancer.rollouts.micro_batch import MicroBatch
from stream_balancer.rollouts.rollout import Rollout

Reason: TypeAlias = Literal["window", "deadline", "age", "drain"]
"""Why a batch left: the window filled, the oldest rollout had waited ``deadline_s``, rollouts were about to go stale,
or ``end()`` drained what was left."""


class Denominators(NamedTuple):
    """Numbers that a loss over some rollouts may be divided by. Padding copies are not counted."""

    rollouts: int
    tokens: int
    loss_tokens: int
    executions: int


class MiniBatchSize(NamedTuple):
    """How much of a step one of its mini-batches is."""

    micro_batches: int
    """Micro-batches of this rank."""
    load: float
    """Load of this rank, as :attr:`RankBatch.load`."""
    rollouts: int
    """Over all ranks, and so are the following: what its loss is divided by. Padding copies are not counted."""
    tokens: int
    loss_tokens: int
    executions: int


class OneRank:
    """Names for a trainer that follow from one rank's part of a step: shared by :class:`RankBatch` and a feed's
    steps."""

    __slots__ = ()

    # a dataclass would take a property of its base for the default value of a field
    if TYPE_CHECKING:

        @property
        def step(self) -> int: ...
        @property
        def rank(self) -> int: ...
        @property
        def dp_size(self) -> int: ...
        @property
        def micro_batches(self) -> tuple[MicroBatch, ...]: ...
        @property
        def load(self) -> float: ...
        @property
        def denominators(self) -> Denominators: ...
        @property
        def mini_batch_sizes(self) -> tuple[MiniBatchSize, ...]: ...

    @property
    def global_num_rollouts(self) -> int:
        """Rollouts in the step over all ranks, padding copies not counted."""
        return self.denominators.rollouts

    @property
    def global_num_tokens(self) -> int:
        """Tokens in the step over all ranks, padding copies not counted."""
        return self.denominators.tokens

    @property
    def global_num_loss_tokens(self) -> int:
        """Tokens with a non-zero ``loss_mask`` in the step over all ranks, each rollout's first one left out: nothing
        predicts it."""
        return self.denominators.loss_tokens

    @property
    def global_num_executions(self) -> int:
        """Executions in the step over all ranks: rollouts with one ``execution_id`` (and group) count as one."""
        return self.denominators.executions

    @property
    def mini_batches(self) -> tuple[OneRank, ...]:
        """Pieces that are an optimizer step each: this rank's part of ``mini_batches`` pieces of the
        step, which all ranks have in the same order. The ``global_`` denominators of each are its own, over all ranks.

        Acknowledge the rank batch, after the last of them. O(micro-batches).
        """
        made, stop = [], 0
        for size in self.mini_batch_sizes:
            start, stop = stop, stop + size.micro_batches
            made.append(
                RankBatch(
                    step=self.step,
                    rank=self.rank,
                    dp_size=self.dp_size,
                    micro_batches=self.micro_batches[start:stop],
                    load=size.load,
                    denominators=Denominators(size.rollouts, size.tokens, size.loss_tokens, size.executions),
                )
            )
        # a step in one piece is its only mini-batch
        return tuple(made) or (self,)

    def epochs(self, num_epochs: int) -> Iterator[OneRank]:
        """All mini-batches, so many times over. Every epoch begins with another one, which is the same on all ranks.

        Raises ValueError for a number below 1.

        Examples:
            >>> rollouts = [Rollout(tokens={"input_ids": [n] * n}) for n in (1, 2, 3)]
            >>> sizes = (MiniBatchSize(1, 3.0, 2, 3, 3, 2), MiniBatchSize(1, 3.0, 1, 3, 3, 1))
            >>> whole = RankBatch(
            ...     step=0, rank=0, dp_size=1, load=6.0, mini_batch_sizes=sizes,
            ...     micro_batches=(MicroBatch.of(rollouts[:2]), MicroBatch.of(rollouts[2:])),
            ...     denominators=Denominators(rollouts=3, tokens=6, loss_tokens=6, executions=3),
            ... )
            >>> [mini_batch.global_num_rollouts for mini_batch in whole.epochs(2)]
            [2, 1, 1, 2]
        """
        if num_epochs < 1:
            raise ValueError(f"epochs() takes a number of epochs >= 1, not {num_epochs!r}")
        mini_batches = self.mini_batches
        number = len(mini_batches)
        # turned, not shuffled: ranks meet in each optimizer step, and must have the same order without a word
        return (mini_batches[(epoch + place) % number] for epoch in range(num_epochs) for place in range(number))

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """Rollouts of this rank, micro-batch by micro-batch; padding copies (``is_padding``) included."""
        return tuple(chain.from_iterable(mb.rollouts for mb in self.micro_batches))

    @property
    def num_rollouts(self) -> int:
        """Rollouts on this rank, padding copies included. O(micro-batches)."""
        return sum(len(mb.lengths) for mb in self.micro_batches)

    @property
    def num_tokens(self) -> int:
        """Tokens on this rank, padding copies included. O(micro-batches)."""
        return sum(mb.num_tokens for mb in self.micro_batches)


@documented
@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RankBatch(OneRank):
    """Rank batch: the micro-batches of one rank in one step, or in one of its mini-batches.

    Every rank of a step has the same number of micro-batches, unless ``micro_batches.equal_number`` is False. No
    micro-batch is empty. Numbers of rollouts and tokens differ from rank to rank, so a mean of the ranks' means is
    wrong: divide the *sum* of the loss by one of the ``global_`` denominators.
    """

    step: int
    """Step number, from 0, the same on every rank."""
    rank: int
    """DP rank that trains on it."""
    dp_size: int
    """DP ranks in the step."""
    micro_batches: tuple[MicroBatch, ...]
    """In the order they should run."""
    load: float
    """Predicted work, in the cost model's unit, with the overhead of its micro-batches."""
    denominators: Denominators
    """Denominators of the step over all ranks, read as the ``global_`` numbers."""
    mini_batch_sizes: tuple[MiniBatchSize, ...] = ()
    """Sizes of the mini-batches that ``micro_batches`` has one after the other; empty where the step is in one
    piece."""

    # there for who acknowledges a mini-batch, or the balancer's own batch, as a feed's step: to be told how
    def ack(self) -> None:
        """Acknowledgement, which only a step of a :class:`RankFeed` has: see :meth:`Step.ack`. Raises ValueError."""
        raise ValueError(
            f"batch.ack(): this part of step {self.step} is no step of a RankFeed. A mini-batch is acknowledged with "
            "its whole step, after the last of them: call ack() of that. In a loop over the balancer itself, call "
            "balancer.acknowledge(step)"
        )

    def __repr__(self) -> str:
        return (
            f"RankBatch(step={self.step}, rank={self.rank}/{self.dp_size}, num_rollouts={self.num_rollouts}, "
            f"num_tokens={self.num_tokens}, micro_batches={len(self.micro_batches)})"
        )


@documented
@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Batch:
    """Batch: the rank batches of one step, planned once."""

    step: int
    """Step number, from 0."""
    reason: Reason
    """Why it left now."""
    ranks: tuple[RankBatch, ...]
    """[dp_size] ``ranks[k]`` is what DP rank ``k`` trains on."""
    num_rollouts: int
    """Rollouts over all ranks, padding copies not counted."""
    num_tokens: int
    """Tokens over all ranks, padding copies not counted."""
    finish: float
    """Predicted time of the step, in the unit of ``loads``: the heaviest of them; where ranks meet at every micro-batch
    the sum of the costliest of each index, and in mini-batches the sum of theirs; with a padded cost, padding
    counted."""
    lower_bound: float
    """No assignment of these rollouts to ranks and micro-batches can finish earlier."""
    oldest_wait_s: float = 0.0
    """Seconds that its oldest rollout had waited when it left; 0.0 in a batch restored from a checkpoint."""
    num_padding: int = 0
    """Padding copies of weight zero, each a micro-batch that would be empty: a step has fewer rollouts than ranks, or a
    rank fewer than micro-batches."""
    incomplete_groups: tuple[str, ...] = ()
    """``group_id`` of groups sent before all their siblings had come."""

    @property
    def loads(self) -> tuple[float, ...]:
        """``load`` of each rank batch."""
        return tuple([one.load for one in self.ranks])

    @property
    def num_executions(self) -> int:
        """Executions over all ranks: rollouts with one ``execution_id`` (and group) count as one."""
        return self.ranks[0].global_num_executions

    @property
    def imbalance(self) -> float:
        """``finish`` over the mean load, minus one: 0.0 is perfect. Ranks idle ``imbalance / (1 + imbalance)`` of the
        step."""
        return _above_mean(self.finish, self.loads)

    @property
    def unavoidable_imbalance(self) -> float:
        """The part no assignment of these rollouts can remove: ``lower_bound`` over the mean load, minus one."""
        return _above_mean(self.lower_bound, self.loads)

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """All rollouts, rank by rank, padding copies included."""
        return tuple(chain.from_iterable(rank_batch.rollouts for rank_batch in self.ranks))

    def __repr__(self) -> str:
        return (
            f"Batch(step={self.step}, reason={self.reason!r}, num_rollouts={self.num_rollouts}, "
            f"num_tokens={self.num_tokens}, imbalance={self.imbalance:.4f})"
        )


def _above_mean(value: float, loads: tuple[float, ...]) -> float:
    mean = sum(loads) / len(loads)
    return max(value / mean - 1.0, 0.0) if mean > 0 else 0.0

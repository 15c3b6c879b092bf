"""What travels: rollouts in, batches out.

Frozen values, checked where they are made, so that a worker that builds a bad rollout gets the error at its own line
and nothing unsendable ever reaches a batch. Nothing here waits, decides or sends. ``values`` has the checks,
``tensors`` the layouts of a micro-batch.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from stream_balancer import tensors
from stream_balancer.errors import RolloutError
from stream_balancer.field_docs import documented
from stream_balancer.values import (
    PADDING_PREFIX,
    SUPPORTED_DTYPES,
    Version,
    by_name,
    check_disjoint,
    check_tokens,
    join,
    plain_bool,
    plain_cost,
    plain_metadata,
    plain_name,
    plain_number,
    plain_tensor,
    plain_version,
)

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = [
    "SUPPORTED_DTYPES",
    "Batch",
    "EvictReason",
    "ExecutionSize",
    "MicroBatch",
    "RankBatch",
    "Reason",
    "Rollout",
    "Version",
]

Reason: TypeAlias = Literal["window", "deadline", "age", "drain"]
"""Why a batch left: the window filled, the oldest rollout had waited ``deadline_s``, rollouts were about to go stale,
or ``end()`` drained what was left."""

EvictReason: TypeAlias = Literal["stale", "lost", "filtered", "abandoned"]
"""Why a rollout was given up instead of dispatched: it was too old, the producer that held its tokens is gone,
``accept=`` turned it down, or :meth:`StreamBalancer.abandon_group` gave its group up."""


def _new_id() -> str:
    return uuid.uuid4().hex


class _Nothing(dict[str, Any]):
    """The empty mapping of all rollouts without scalars, tensors or metadata: three dicts of their own would be a
    quarter of what a rollout weighs beside its payload."""

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a Rollout is frozen: give scalars, tensors and metadata when you make it")

    __setitem__ = setdefault = update = __ior__ = _refuse

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[()]]:
        return dict, ()


_NOTHING = _Nothing()


def _nothing() -> Mapping[str, Any]:
    return _NOTHING


@documented
@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Rollout:
    """Finished rollout (trajectory, sample): its per-token columns and what belongs to it.

    Columns may be given as torch tensors, numpy arrays or sequences of numbers; they are kept as torch tensors
    **without a copy** where possible, so do not write to them afterwards. Numpy scalars and subclasses of str, int,
    float and bytes become the plain value, and metadata is copied. Raises :class:`RolloutError` (a ValueError) that
    names the field for anything that could not be dispatched, sent or saved later: no tokens, columns of different
    lengths, an unsupported dtype, a non-finite cost.
    """

    tokens: Mapping[str, Tensor]
    """Per-token columns ``[L, ...]``. ``input_ids`` ``[L]`` (any integer dtype) is required; ``loss_mask`` ``[L]``, if
    present, marks the tokens that are trained on (non-zero = trained); ``BalancerConfig(loss_mask_column=...)`` where
    it has another name."""
    scalars: Mapping[str, float | int] = field(default_factory=_nothing)
    """One number each: advantage, reward."""
    tensors: Mapping[str, Tensor] = field(default_factory=_nothing)
    """Tensors of any shape that are not per-token: pixel values, image grids."""
    metadata: Mapping[str, Any] = field(default_factory=_nothing)
    """JSON-like: str, int (64 bit), float, bool, None, bytes, and lists and str-keyed dicts of these, at most 64 deep.
    Tuples become lists. A str called ``stratum`` names the environment or data set; see ``stratum_shares``."""
    rollout_id: str = field(default_factory=_new_id)
    """Unique name; a fresh random one by default. At most 512 bytes of UTF-8."""
    group_id: str | None = None
    """Group (GRPO): siblings sampled from one prompt have the same."""
    execution_id: str | None = None
    """Execution: the run of an agent that this rollout is a sample of, where compaction, sub-agents or step-wise
    training make several samples of one. Unique within its group. Put all samples of an execution in one ``put_group``.
    None = the rollout is an execution by itself."""
    version: Version | None = None
    """Policy version the rollout was sampled with, or ``(oldest, newest)``; None = unknown, never stale."""
    cost: float | None = None
    """Work to train on it, in the cost model's unit, where it does not follow from the length (images), at most 1e100;
    None = ask the cost model."""
    is_padding: bool = False
    """True for a stand-in of weight zero, which the balancer made for a micro-batch that would be empty. Its
    ``loss_mask`` and ``rollout_weights`` are zero in every layout. Never set it yourself."""
    num_tokens: int = field(init=False)
    """L, in tokens."""
    num_loss_tokens: int = field(init=False)
    """Tokens with a non-zero ``loss_mask``; L if there is no such column; 0 for a padding copy."""

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        what = "rollout_id"  # the field that an error below is about; a message is formatted only if there is one
        try:
            put("rollout_id", plain_name(self.rollout_id))
            what = "tokens"
            put("tokens", by_name(self.tokens, self._plain_tensor))
            what = ""
            put("num_tokens", check_tokens(self.tokens))
            # most rollouts leave these three out, and a put should not pay for checking empty dicts
            if self.tensors is not _NOTHING:
                what = "tensors"
                put("tensors", by_name(self.tensors, self._plain_tensor) or _NOTHING)
            if self.scalars is not _NOTHING:
                what = "scalars"
                put("scalars", by_name(self.scalars, plain_number) or _NOTHING)
                check_disjoint(self.tokens, self.scalars)
            if self.metadata is not _NOTHING:
                what = "metadata"
                put("metadata", plain_metadata(self.metadata) or _NOTHING)
            if self.group_id is not None:
                what = "group_id"
                put("group_id", plain_name(self.group_id))
            if self.execution_id is not None:
                what = "execution_id"
                put("execution_id", plain_name(self.execution_id))
            if self.version is not None:
                what = "version"
                put("version", plain_version(self.version))
            if self.cost is not None:
                what = "cost"
                put("cost", plain_cost(self.cost))
            if self.is_padding is not False:
                what = "is_padding"
                put("is_padding", plain_bool(self.is_padding))
            if not self.is_padding and self.rollout_id.startswith(PADDING_PREFIX):
                what = "rollout_id"
                raise RolloutError(f"must not begin with {PADDING_PREFIX!r}: so the balancer names its padding copies")
        except RolloutError as error:
            whose = "" if what == "rollout_id" else f"rollout {self.rollout_id!r}: "
            raise RolloutError(f"{whose}{join(what, error)}") from None
        put("num_loss_tokens", self._count_loss_tokens())  # once, here: every step's denominators are sums of these

    @staticmethod
    def _plain_tensor(value: object) -> Tensor:
        return plain_tensor(value)

    def _count_loss_tokens(self) -> int:
        if self.is_padding:
            return 0
        mask = self.tokens.get("loss_mask")
        return self.num_tokens if mask is None else int(torch.count_nonzero(mask))

    @property
    def min_version(self) -> int | None:
        """Oldest policy version any of its tokens was sampled with; None if unknown."""
        return self.version[0] if isinstance(self.version, tuple) else self.version

    @property
    def stratum(self) -> str | None:
        """What it was sampled from (environment, data set): its ``metadata["stratum"]``; None without one."""
        return self.metadata.get("stratum")

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors (columns and ``tensors``), metadata not counted. O(number of columns)."""
        num_bytes: int = 0
        for tensor in self.tokens.values():  # plain loops: every put comes here
            num_bytes += tensor.nbytes
        for tensor in self.tensors.values():
            num_bytes += tensor.nbytes
        return num_bytes

    def with_loss_mask(self, column: str) -> Rollout:
        """The same, with this column called ``loss_mask``: it says which tokens are trained on. Shares the tensors."""
        tokens = {"loss_mask" if name == column else name: values for name, values in self.tokens.items()}
        return replace(self, tokens=tokens)

    def padding_copy(self, rollout_id: str) -> Rollout:
        """A stand-in of weight zero, for a micro-batch that would be empty: one token, zero in every column; scalars
        and metadata as here.

        A rollout with ``tensors`` is copied whole: images belong to the tokens that stand for them.
        """
        if self.tensors:
            tokens = dict(self.tokens)
            if "loss_mask" in tokens:
                tokens["loss_mask"] = torch.zeros_like(tokens["loss_mask"])
            return replace(self, tokens=tokens, rollout_id=rollout_id, execution_id=None, is_padding=True)
        return Rollout(
            tokens={name: _one_of_zeros(column) for name, column in self.tokens.items()},
            scalars=self.scalars,
            metadata=self.metadata,
            rollout_id=rollout_id,
            group_id=self.group_id,
            version=self.version,
            is_padding=True,
        )

    def __repr__(self) -> str:
        return (
            f"Rollout({self.rollout_id!r}, num_tokens={self.num_tokens}, columns={sorted(self.tokens)}"
            + (f", group_id={self.group_id!r}" if self.group_id is not None else "")
            + (f", execution_id={self.execution_id!r}" if self.execution_id is not None else "")
            + (f", version={self.version}" if self.version is not None else "")
            + (", is_padding=True" if self.is_padding else "")
            + ")"
        )


class ExecutionSize(NamedTuple):
    """How much of an execution a step holds, over all ranks."""

    samples: int
    """Its rollouts."""
    loss_tokens: int
    """Their tokens with a non-zero ``loss_mask``."""


@documented
@dataclass(frozen=True, eq=False, slots=True)
class MicroBatch:
    """Micro-batch: rollouts that go through the model together, on one rank. Lay them out with one of the four methods.

    Examples:
        >>> micro_batch = MicroBatch.of([Rollout(tokens={"input_ids": ids}) for ids in ([11, 12], [21, 22, 23], [31])])
        >>> micro_batch
        MicroBatch(num_rollouts=3, num_tokens=6)
        >>> packed = micro_batch.packed()
        >>> packed["input_ids"]  # [T]
        tensor([11, 12, 21, 22, 23, 31])
        >>> packed.cu_seqlens, packed.position_ids  # [n+1], [T]
        (tensor([0, 2, 5, 6], dtype=torch.int32), tensor([0, 1, 0, 1, 2, 0]))
        >>> micro_batch.padded(pad_values={"input_ids": -1})["input_ids"]  # [n, L_max]
        tensor([[11, 12, -1],
                [21, 22, 23],
                [31, -1, -1]])
        >>> [row.tolist() for row in micro_batch.nested()["input_ids"].unbind()]  # [n, j]
        [[11, 12], [21, 22, 23], [31]]
    """

    rollouts: Sequence[Rollout]
    """The rollouts, in the order of every layout. On a rank these are views of the received buffer, made when asked
    for."""
    lengths: tuple[int, ...]
    """Tokens per rollout, ``n`` of them."""
    flat: Callable[[], tensors.FlatColumns]
    """What the layouts start from. On a rank: views of the received buffer, nothing copied. On the controller:
    concatenated on use."""
    execution_sizes: tuple[ExecutionSize, ...] | None = None
    """[n] of the execution of each rollout, in the step; None where each is an execution by itself."""

    @classmethod
    def of(
        cls,
        rollouts: Sequence[Rollout],
        lengths: tuple[int, ...] | None = None,
        execution_sizes: tuple[ExecutionSize, ...] | None = None,
    ) -> MicroBatch:
        """A micro-batch over rollouts at hand (``lengths``: their tokens, where known); their columns are concatenated
        when a layout is asked for."""
        if lengths is None:
            lengths = tuple(r.num_tokens for r in rollouts)
        return cls(rollouts, lengths, partial(_concatenate, rollouts, execution_sizes), execution_sizes)

    @property
    def num_tokens(self) -> int:
        """T: tokens without padding."""
        return sum(self.lengths)

    def packed(self, *, scalar_dtype: torch.dtype = torch.float32) -> tensors.Packed:
        """Flat ``[T, ...]`` columns, ``position_ids [T]``, ``cu_seqlens`` int32 ``[n+1]``, ``max_seqlen``.

        Always has a ``loss_mask`` (ones where the rollouts brought none; zeros for padding copies). On a rank no
        token is copied. Scalars become ``[n]`` of ``scalar_dtype``, here and in the other layouts: float32, so that a
        float32 loss stays one; torch.int64 where ints above 2^24 must stay exact.
        """
        return tensors.packed(self.flat(), scalar_dtype=scalar_dtype)

    def padded(
        self,
        *,
        padding_side: Literal["left", "right"] = "right",
        pad_values: Mapping[str, float | int | bool] | None = None,
        multiple_of: int = 1,
        scalar_dtype: torch.dtype = torch.float32,
    ) -> tensors.Padded:
        """``[n, L_max, ...]`` columns and ``attention_mask``, padded on the chosen side. Copies every token once."""
        return tensors.padded(
            self.flat(),
            padding_side=padding_side,
            pad_values=pad_values,
            multiple_of=multiple_of,
            scalar_dtype=scalar_dtype,
        )

    def nested(self, *, scalar_dtype: torch.dtype = torch.float32) -> tensors.Nested:
        """Torch jagged nested tensors ``[n, j, ...]`` over the flat columns; no token is copied on a rank."""
        return tensors.nested(self.flat(), scalar_dtype=scalar_dtype)

    def tensordict(self, *, scalar_dtype: torch.dtype = torch.float32) -> TensorDict:
        """A ``TensorDict`` of jagged columns and scalars, batch size ``[n]``. Needs the ``tensordict`` extra."""
        return tensors.tensordict(self.flat(), scalar_dtype=scalar_dtype)

    def __repr__(self) -> str:
        return f"MicroBatch(num_rollouts={len(self.lengths)}, num_tokens={self.num_tokens})"


@documented
@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RankBatch:
    """Rank batch: the micro-batches of one rank in one step.

    Every rank of a step has the same number of micro-batches (its own with ``micro_batch_counts="free"``), none of them
    empty. Numbers of rollouts and tokens differ from rank to rank, so a mean of the ranks' means is wrong: divide the
    *sum* of the loss by one of the ``global_`` denominators.
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
    """Predicted work, in the cost model's unit, with the overhead of its micro-batches; divided by the rank's speed
    where ``speeds`` are given."""
    global_num_rollouts: int
    """Rollouts in the step over all ranks, padding copies not counted."""
    global_num_tokens: int
    """Tokens in the step over all ranks, padding copies not counted."""
    global_num_loss_tokens: int
    """Tokens with a non-zero ``loss_mask`` in the step over all ranks."""
    global_num_executions: int
    """Executions in the step over all ranks: rollouts with one ``execution_id`` (and group) count as one."""
    on_ack: Callable[[], None] | None = field(default=None, repr=False)
    """Set by the :class:`RankFeed` it came from."""

    def ack(self) -> None:
        """Acknowledge this batch and every earlier one of its feed: committed, and not to be delivered again.

        For ``RankFeed(auto_ack=False)``, at an optimizer step or a checkpoint; otherwise before leaving a loop early.
        From any thread, never blocks, idempotent. Raises ClosedResourceError if the feed was closed before, ValueError
        for a batch that did not come from a feed.
        """
        if self.on_ack is None:
            raise ValueError(
                f"batch.ack(): this rank batch of step {self.step} did not come from a RankFeed. Where you iterate the "
                "balancer itself, call balancer.acknowledge(step)"
            )
        self.on_ack()

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """This rank's rollouts, micro-batch by micro-batch; padding copies (``is_padding``) included."""
        return tuple(chain.from_iterable(mb.rollouts for mb in self.micro_batches))

    @property
    def num_rollouts(self) -> int:
        """Rollouts on this rank, padding copies included. O(micro-batches)."""
        return sum(len(mb.lengths) for mb in self.micro_batches)

    @property
    def num_tokens(self) -> int:
        """Tokens on this rank, padding copies included. O(micro-batches)."""
        return sum(mb.num_tokens for mb in self.micro_batches)

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
    loads: tuple[float, ...]
    """``load`` of each rank batch."""
    lower_bound: float
    """No assignment of these rollouts to the ranks can have a smaller heaviest load (cost model's unit)."""
    oldest_wait_s: float = 0.0
    """Seconds that its oldest rollout had waited when it left; 0.0 in a batch restored from a checkpoint."""
    num_padding: int = 0
    """Padding copies of weight zero, each a micro-batch that would be empty: a step has fewer rollouts than ranks, or a
    rank fewer than micro-batches."""
    incomplete_groups: tuple[str, ...] = ()
    """``group_id`` of groups sent before all their siblings had come."""

    @property
    def num_executions(self) -> int:
        """Executions over all ranks: rollouts with one ``execution_id`` (and group) count as one."""
        return self.ranks[0].global_num_executions

    @property
    def imbalance(self) -> float:
        """Heaviest load over the mean load, minus one: 0.0 is perfect. Ranks idle ``imbalance / (1 + imbalance)`` of
        the step."""
        return _excess(max(self.loads), sum(self.loads) / len(self.loads))

    @property
    def avoidable_imbalance(self) -> float:
        """The part of ``imbalance`` a better assignment might remove: heaviest load over ``lower_bound``, minus one."""
        return _excess(max(self.loads), self.lower_bound)

    @property
    def unavoidable_imbalance(self) -> float:
        """The part no assignment of these rollouts can remove: ``lower_bound`` over the mean load, minus one."""
        return _excess(self.lower_bound, sum(self.loads) / len(self.loads))

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """All rollouts, rank by rank, padding copies included."""
        return tuple(chain.from_iterable(rank_batch.rollouts for rank_batch in self.ranks))

    def __repr__(self) -> str:
        return (
            f"Batch(step={self.step}, reason={self.reason!r}, num_rollouts={self.num_rollouts}, "
            f"num_tokens={self.num_tokens}, imbalance={self.imbalance:.4f})"
        )


def cheapest_to_copy(rollouts: Iterable[Rollout]) -> Rollout:
    """The rollout whose :meth:`Rollout.padding_copy` costs least: one without ``tensors``, else the shortest. The first
    of several, so that a plan that is read back has the same copies."""
    return min(rollouts, key=lambda rollout: rollout.num_tokens if rollout.tensors else 0)


def _one_of_zeros(column: Tensor) -> Tensor:
    """``[1, ...]``. Of a column that lies with its producer, here: there is nothing to fetch."""
    return column.new_zeros((1, *column.shape[1:]), device="cpu" if column.is_meta else column.device)


def _excess(value: float, base: float) -> float:
    return max(value / base - 1.0, 0.0) if base > 0 else 0.0


def _concatenate(rollouts: Sequence[Rollout], execution_sizes: tuple[ExecutionSize, ...] | None) -> tensors.FlatColumns:
    """Flat columns of rollouts at hand. Copies every token once. O(T)."""
    first = rollouts[0]
    return tensors.FlatColumns(
        tokens={name: torch.cat([r.tokens[name] for r in rollouts]) for name in first.tokens},  # [T, ...]
        lengths=tuple(r.num_tokens for r in rollouts),
        scalars={name: [r.scalars[name] for r in rollouts] for name in first.scalars},
        weights=torch.tensor([0.0 if r.is_padding else 1.0 for r in rollouts], dtype=torch.float32),  # [n]
        executions=execution_sizes or [(1, r.num_loss_tokens) for r in rollouts],
    )

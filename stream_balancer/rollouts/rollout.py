"""The rollout: what a worker puts.

Checked where it is made, so that a worker that builds a bad one gets the error at its own line and nothing unsendable
ever reaches a batch. :mod:`stream_balancer.values` has the checks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NoReturn, Self, TypeAlias

import torch
from torch import Tensor

from stream_balancer.errors import RolloutError
from stream_balancer.field_docs import documented
from stream_balancer.values import (
    PADDING_PREFIX,
    Version,
    by_name,
    join,
    num_nonzero,
    plain_columns,
    plain_cost,
    plain_metadata,
    plain_name,
    plain_number,
    plain_tensor,
    plain_version,
    version_of,
)

EvictReason: TypeAlias = Literal["stale", "lost", "filtered", "abandoned", "late"]
"""Why a rollout was given up instead of dispatched: it was too old, the producer that held its tokens is gone,
``accept=`` turned it down, or :meth:`StreamBalancer.abandon_group` gave its group up."""


_spare_ids: list[str] = []
os.register_at_fork(after_in_child=_spare_ids.clear)


def _new_id() -> str:
    try:
        return _spare_ids.pop()
    except IndexError:
        # many at once: the system call takes longer than all else of an id
        many = os.urandom(1024).hex()
        _spare_ids.extend(many[at : at + 32] for at in range(0, len(many), 32))
        return _new_id()


class _Nothing(dict[str, Any]):
    """The empty mapping of all rollouts without scalars, tensors or metadata: three dicts of their own would be a
    quarter of what a rollout weighs beside its payload."""

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a Rollout is frozen: give scalars, tensors and metadata when you make it")

    __setitem__ = setdefault = update = __ior__ = _refuse
    __hash__ = object.__hash__  # type: ignore[assignment]  # a dataclass takes no default that has none

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[()]]:
        return dict, ()


_NOTHING = _Nothing()
_put = object.__setattr__
"""As a frozen dataclass's own ``__init__`` sets its fields."""


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
    present, marks the tokens that are trained on (non-zero = trained; the first one never is, since nothing predicts
    it); ``BalancerConfig(loss_mask_column=...)`` where it has another name. ``versions`` ``[L]``, if present, is the
    policy version that sampled each token, in integers; negative where no policy did (prompts, answers of tools)."""
    scalars: Mapping[str, float | int] = _NOTHING
    """Numbers by name: advantage, reward."""
    tensors: Mapping[str, Tensor] = _NOTHING
    """Tensors of any shape that are not per-token: pixel values, image grids."""
    metadata: Mapping[str, Any] = _NOTHING
    """JSON-like: str, int (64 bit), float, bool, None, bytes, and lists and str-keyed dicts of these, at most 64 deep.
    Tuples become lists."""
    rollout_id: str = field(default_factory=_new_id)
    """Unique name; a fresh random one by default. At most 512 bytes of UTF-8."""
    group_id: str | None = None
    """Group (GRPO): siblings sampled from one prompt have the same."""
    execution_id: str | None = None
    """Execution: the run of an agent that this rollout is a sample of, where compaction, sub-agents or step-wise
    training make several samples of one. Unique within its group. Put all samples of an execution in one ``put_group``.
    None = the rollout is an execution by itself."""
    version: Version | None = None
    """Policy version the rollout was sampled with, or ``(oldest, newest)``; None = unknown, never stale. Where there is
    a column ``versions`` it comes from that."""
    cost: float | None = None
    """Work to train on it, in the cost model's unit, where it does not follow from the length (images), at most 1e100;
    None = ask the cost model."""
    is_padding: bool = False
    """True for a stand-in of weight zero, which the balancer made for a micro-batch that would be empty. Its
    ``loss_mask`` and ``rollout_weights`` are zero in every layout. Never set it yourself."""
    num_tokens: int = field(init=False)
    """L, in tokens."""
    num_loss_tokens: int = field(init=False)
    """Tokens with a non-zero ``loss_mask``, without the first one, which nothing predicts; L - 1 if there is no such
    column; 0 for a padding copy."""

    def __post_init__(self) -> None:
        # the field that an error below is about; a message is formatted only if there is one
        what = "rollout_id"
        try:
            # most rollouts leave most fields out, and most values are plain: a put should not pay for the others
            if (name := plain_name(self.rollout_id)) is not self.rollout_id:
                _put(self, what, name)
            what = "tokens"
            tokens, num_tokens = plain_columns(self.tokens)
            _put(self, what, tokens)
            _put(self, "num_tokens", num_tokens)
            if self.tensors is not _NOTHING:
                what = "tensors"
                _put(self, what, by_name(self.tensors, plain_tensor) or _NOTHING)
            if self.scalars is not _NOTHING:
                what = "scalars"
                _put(self, what, by_name(self.scalars, plain_number) or _NOTHING)
                if not tokens.keys().isdisjoint(self.scalars):
                    what = str(sorted(tokens.keys() & self.scalars.keys()))
                    raise RolloutError("are both token columns and scalars; rename one")
            if self.metadata is not _NOTHING:
                what = "metadata"
                _put(self, what, plain_metadata(self.metadata) or _NOTHING)
            if self.group_id is not None:
                what = "group_id"
                _put(self, what, plain_name(self.group_id))
            if self.execution_id is not None:
                what = "execution_id"
                _put(self, what, plain_name(self.execution_id))
            if self.version is not None:
                what = "version"
                _put(self, what, plain_version(self.version))
            if self.cost is not None:
                what = "cost"
                _put(self, what, plain_cost(self.cost))
            if self.is_padding is not False:
                _put(self, "is_padding", bool(self.is_padding))
            if "versions" in tokens:
                what = "versions"
                if (found := version_of(tokens["versions"])) is not None:
                    if self.version is not None and self.version != found:
                        raise RolloutError(
                            f": the column says {found}, but version is {self.version}. Leave version out where tokens "
                            "have their own"
                        )
                    _put(self, "version", found)
            if not self.is_padding and self.rollout_id.startswith(PADDING_PREFIX):
                what = "rollout_id"
                raise RolloutError(f"must not begin with {PADDING_PREFIX!r}: so the balancer names its padding copies")
            # once, here: every step's denominators are sums of these
            what, mask = "tokens", tokens.get("loss_mask")
            num_loss_tokens = num_tokens - 1 if mask is None else num_nonzero(mask, 1)
            _put(self, "num_loss_tokens", 0 if self.is_padding else num_loss_tokens)
        except RolloutError as error:
            whose = "" if what == "rollout_id" else f"rollout {self.rollout_id!r}: "
            raise RolloutError(f"{whose}{join(what, error)}") from None

    @property
    def min_version(self) -> int | None:
        """Oldest policy version any of its tokens was sampled with; None if unknown."""
        return self.version[0] if isinstance(self.version, tuple) else self.version

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors (columns and ``tensors``), metadata not counted. O(number of columns)."""
        num_bytes: int = 0
        # plain loops: every put comes here
        for tensor in self.tokens.values():
            num_bytes += tensor.nbytes
        for tensor in self.tensors.values():
            num_bytes += tensor.nbytes
        return num_bytes

    @classmethod
    def unchecked(cls, **values: Any) -> Self:
        """A rollout of all its fields, which were checked where it was made, and are read from a header that was."""
        rollout = cls.__new__(cls)
        for name, value in values.items():
            # an empty dict would weigh too much
            _put(rollout, name, _NOTHING if value == {} else value)
        return rollout

    def with_loss_mask(self, column: str) -> Rollout:
        """Rollout with this column called ``loss_mask``: it says which tokens are trained on. Shares the tensors."""
        tokens = {"loss_mask" if name == column else name: values for name, values in self.tokens.items()}
        try:
            return self._changed(tokens=tokens, num_loss_tokens=num_nonzero(tokens["loss_mask"], 1))
        except RolloutError as error:
            raise RolloutError(f"rollout {self.rollout_id!r}: tokens{error}") from None

    def _changed(self, **values: object) -> Self:
        # the rest was checked when it was made: nothing is checked again
        same = copy(self)
        for name, value in values.items():
            _put(same, name, value)
        return same

    def padding_copy(self, rollout_id: str) -> Rollout:
        """A stand-in of weight zero, for a micro-batch that would be empty: one token, zero in every column; scalars
        and metadata as here.

        A rollout with ``tensors`` is copied whole: images belong to the tokens that stand for them.
        """
        copied = {"rollout_id": rollout_id, "execution_id": None, "is_padding": True, "num_loss_tokens": 0}
        # a model counts its images by the tokens that stand for them: neither goes without the other
        if self.tensors:
            tokens = dict(self.tokens)
            if "loss_mask" in tokens:
                tokens["loss_mask"] = torch.zeros_like(tokens["loss_mask"])
            return self._changed(tokens=tokens, **copied)
        tokens = {name: _one_of_zeros(column) for name, column in self.tokens.items()}
        # not a copy of a subclass: there is nothing to fetch, or to join
        own = {one.name: getattr(self, one.name) for one in fields(Rollout)}
        return Rollout.unchecked(**own | copied | {"tokens": tokens, "num_tokens": 1, "cost": None})

    def __repr__(self) -> str:
        told = {name: getattr(self, name) for name in _NOT_TOLD}
        more = "".join(f", {name}={value!r}" for name, value in told.items() if value is not _NOT_TOLD[name])
        return f"Rollout({self.rollout_id!r}, num_tokens={self.num_tokens}, columns={sorted(self.tokens)}{more})"


_NOT_TOLD = {"group_id": None, "execution_id": None, "version": None, "is_padding": False}


def cheapest_to_copy(rollouts: Iterable[Rollout]) -> Rollout:
    """The rollout whose :meth:`Rollout.padding_copy` costs least: one without ``tensors``, else the shortest. The first
    of several, so that a plan that is read back has the same copies."""
    return min(rollouts, key=lambda rollout: rollout.num_tokens if rollout.tensors else 0)


def _one_of_zeros(column: Tensor) -> Tensor:
    """``[1, ...]``. Of a column that lies with its producer, here: there is nothing to fetch."""
    return column.new_zeros((1, *column.shape[1:]), device="cpu" if column.is_meta else column.device)

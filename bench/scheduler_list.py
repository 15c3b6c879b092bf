"""The schedulers that bench/schedulers.py compares: each one is a function here.

To add one, write a function that imports its code and returns its plan, a function of a `Step`, under
`@scheduler(name, where)`. Code in a registry goes to bench/peers.txt, a single file to bench/peers-files.txt. Each is
called as its own trainer calls it; where it takes an estimate of the work, it gets the true one. One that cannot be
imported is reported as not available, and never written anew here.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from micro_batches import CostsOf, Layout
from peer_files import commit_of, load
from peers import Floats, Ints
from verl_drop_in import rows_of

from stream_balancer.planning import PlanKnobs, Waiting, plan_batch
from stream_balancer.planning.arrays import Sync
from stream_balancer.planning.baselines import plan_fifo

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

MAX_SKIPS = 16
"""Of ours: the default."""


@dataclass(frozen=True)
class Step:
    """What a scheduler is shown: the rollouts that wait, oldest first, and what is wanted of it."""

    lengths: Ints
    """[n] tokens."""
    costs: Floats
    """[n] work."""
    groups: Ints
    """[n] group of siblings."""
    skips: Ints
    """[n] steps that left it behind."""
    number: int
    ranks: int
    batch_size: int
    max_tokens: int
    """Of a micro-batch."""
    sync: Sync
    """When the ranks meet."""
    costs_of: CostsOf
    """lengths -> work."""

    def total(self, lengths: Iterable[int]) -> int:
        """Work of rollouts of these lengths."""
        return int(self.costs_of(np.fromiter(lengths, dtype=np.int64)).sum())

    @property
    def whole_costs(self) -> list[int]:
        """[n] as many functions want them."""
        return self.costs.astype(np.int64).tolist()  # type: ignore[no-any-return]


Plan = Callable[[Step], Layout]
"""-> ``[rank][micro_batch]`` -> positions of those that go. A position on several ranks is split evenly over them."""


@dataclass(frozen=True)
class Scheduler:
    name: str
    where: str
    """Version, file and functions."""
    load: Callable[[], Plan]
    shown: float = 1.0
    """Rollouts that it is shown, in batches."""
    in_order: bool = True
    """Rollouts leave in the order in which they came."""
    by_sync: bool = False
    """It plans otherwise where ranks meet at every micro-batch."""
    splits: bool = False
    """It puts a rollout on several ranks, which share its work."""
    alone: bool = False
    """Its trainer runs the rollouts of a micro-batch one after another: the token cap is of each."""
    groups: bool = False
    """Only for streams whose rollouts have siblings."""
    timed: bool = True
    """Its time to plan is that of its trainer."""


SCHEDULERS: list[Scheduler] = []


def scheduler(name: str, where: str, **more: Any) -> Callable[[Callable[[], Plan]], Callable[[], Plan]]:
    def add(function: Callable[[], Plan]) -> Callable[[], Plan]:
        SCHEDULERS.append(Scheduler(name, where, function, **more))
        return function

    return add


# --- ours ------------------------------------------------------------------------------------------------------------


def _own(step: Step, *, fifo: bool = False, group_size: int | None = None) -> Layout:
    knobs = PlanKnobs(
        step.ranks,
        step.batch_size,
        MAX_SKIPS,
        sync=step.sync,
        whole_groups=group_size is not None,
        group_size=group_size,
        max_tokens=step.max_tokens,
    )
    never, always = np.zeros(step.lengths.size, dtype=np.bool_), np.ones(step.lengths.size, dtype=np.bool_)
    waiting = Waiting(step.costs, step.lengths, step.skips, never, step.groups, always)
    plan = (plan_fifo if fifo else plan_batch)(waiting, knobs, num_rollouts=step.batch_size, step=step.number)
    return [[one.tolist() for one in rank] for rank in plan.ranks]


@scheduler("stream_balancer, window 1", "policy='fifo'", by_sync=True)
def _own_fifo() -> Plan:
    return lambda step: _own(step, fifo=True)


@scheduler("stream_balancer, window 2", "the default", by_sync=True, shown=2.0, in_order=False)
def _own_window() -> Plan:
    return _own


@scheduler(
    "stream_balancer, window 2, whole groups", "group_size", by_sync=True, shown=2.0, in_order=False, groups=True
)
def _own_groups() -> Plan:
    return lambda step: _own(step, group_size=int(np.bincount(step.groups - step.groups.min()).max()))


# --- what all ranks do together --------------------------------------------------------------------------------------

Pack = Callable[[Ints, int | None], Sequence[Sequence[int]]]
"""(lengths of a rank, at least so many) -> micro-batches."""


def _agreed(lengths: Ints, shares: Sequence[Sequence[int]], pack: Pack) -> Layout:
    """Each rank packs its own; what the ranks do by an all_reduce is done by asking again for the highest number."""
    held = [np.asarray(share, dtype=np.int64) for share in shares]
    found = [pack(lengths[share], None) for share in held]
    while min(map(len, found)) < (most := max(map(len, found))):
        found = [
            one if len(one) == most else pack(lengths[share], most) for one, share in zip(found, held, strict=True)
        ]
    return [[share[list(one)].tolist() for one in packed] for packed, share in zip(found, held, strict=True)]


def _next_fit(lengths: Ints, max_tokens: int) -> list[list[int]]:
    """One after the other: a new micro-batch when the cap would be passed."""
    packed: list[list[int]] = []
    tokens = max_tokens
    for position, length in enumerate(lengths.tolist()):
        if tokens + length > max_tokens:
            packed.append([])
            tokens = 0
        packed[-1].append(position)
        tokens += length
    return packed


@scheduler("round-robin", "rollout i to rank i mod ranks, then next fit")
def _round_robin() -> Plan:
    def plan(step: Step) -> Layout:
        shares = [list(range(rank, step.lengths.size, step.ranks)) for rank in range(step.ranks)]
        return _cut(step, shares)

    return plan


def _cut(step: Step, shares: Sequence[Sequence[int]]) -> Layout:
    """Of those that know no token cap: every rank cuts its share by next fit."""
    held = [np.asarray(share, dtype=np.int64) for share in shares]
    return [[share[one].tolist() for one in _next_fit(step.lengths[share], step.max_tokens)] for share in held]


# --- others, from their packages -------------------------------------------------------------------------------------


@scheduler(
    "verl 0.9.1",
    "verl/utils/seqlen_balancing.py: get_seqlen_balanced_partitions (equal_size), rearrange_micro_batches",
)
def _verl() -> Plan:
    verl = importlib.import_module("verl.utils.seqlen_balancing")

    def plan(step: Step) -> Layout:
        def pack(lengths: Ints, least: int | None) -> Sequence[Sequence[int]]:
            packed: Sequence[Sequence[int]] = verl.rearrange_micro_batches(
                rows_of(lengths), step.max_tokens, min_num_micro_batch=least
            )[1]
            return packed

        shares = verl.get_seqlen_balanced_partitions(step.whole_costs, step.ranks, equal_size=True)
        return _agreed(step.lengths, shares, pack)

    return plan


@scheduler("AReaL 1.0.4", "areal/utils/seqpack.py: balanced_greedy_partition, ffd_allocate")
def _areal() -> Plan:
    areal = importlib.import_module("areal.utils.seqpack")

    def plan(step: Step) -> Layout:
        def pack(lengths: Ints, least: int | None) -> list[list[int]]:
            packed = areal.ffd_allocate(lengths.tolist(), step.max_tokens, min_groups=least or 1, n_groups_divisor=1)
            return sorted(sorted(map(int, one)) for one in packed)

        return _agreed(step.lengths, areal.balanced_greedy_partition(step.lengths.tolist(), K=step.ranks), pack)

    return plan


@scheduler(
    "OpenRLHF 0.11.2",
    "trainer/ppo_utils/experience.py: balance_experiences; utils/seqlen_balancing.py: "
    "get_minimum_num_micro_batch_size, get_seqlen_balanced_partitions",
)
def _openrlhf() -> Plan:
    experience = importlib.import_module("openrlhf.trainer.ppo_utils.experience")
    balancing = importlib.import_module("openrlhf.utils.seqlen_balancing")

    def plan(step: Step) -> Layout:
        def pack(lengths: Ints, least: int | None) -> Sequence[Sequence[int]]:
            number = least or balancing.get_minimum_num_micro_batch_size(lengths.tolist(), step.max_tokens, 1, 1)
            packed: Sequence[Sequence[int]] = balancing.get_seqlen_balanced_partitions(lengths.tolist(), number, False)
            return packed

        arguments = SimpleNamespace(
            actor=SimpleNamespace(num_nodes=1, num_gpus_per_node=step.ranks),
            ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1),
        )
        rollouts = [SimpleNamespace(total_length=n, position=i) for i, n in enumerate(step.lengths.tolist())]
        with mock.patch.multiple(experience, split_experience_batch=lambda one: [one], make_experience_batch=list):
            shares = experience.balance_experiences(rollouts, arguments)
        return _agreed(step.lengths, [[one.position for one in share] for share in shares], pack)

    return plan


@scheduler(
    "TRL 1.16.0",
    "experimental/async_grpo/async_grpo_trainer.py: TokenBudgetBatcher",
    shown=2.0,
    timed=False,
)
def _trl() -> Plan:
    trainer = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")

    def filled(step: Step, lengths: Sequence[int], budget: int) -> list[list[list[int]]]:
        """[micro_batch][rank] -> positions. One more rollout of the whole budget fits nowhere: it closes the last."""
        rollouts = [
            {"input_ids": torch.full((n,), place), "completion_mask": torch.ones(n), "group_id": place, "place": place}
            for place, n in enumerate([*lengths, budget])
        ]
        batcher = trainer.TokenBudgetBatcher(rollouts, step.ranks, budget, {})
        return [[[one["place"] for one in row.samples] for row in rows] for rows in batcher]

    def plan(step: Step) -> Layout:
        """As many whole micro-batches as first hold `batch_size` rollouts; all of those where two batches fill none.

        Its rows are trees of tokens, which take seconds: 1,024 "tokens" fill one here, and no two share a prefix.
        """
        budget = min(step.max_tokens, 1024)
        lengths = np.ceil(step.lengths / step.max_tokens * budget).astype(np.int64).tolist()
        micro_batches = filled(step, lengths, budget)[:-1] or filled(step, lengths[: step.batch_size], budget)
        rollouts = np.cumsum([sum(map(len, rows)) for rows in micro_batches])
        chosen = micro_batches[: int(np.searchsorted(rollouts, step.batch_size)) + 1]
        return [[rows[rank] for rows in chosen] for rank in range(step.ranks)]

    return plan


# --- others, from single files ---------------------------------------------------------------------------------------

SLIME, ODC, MEGATRON, NEMO_RL, PRIME_RL, TORCHTITAN, TORCHSPEC = (
    "THUDM/slime",
    "sail-sg/odc",
    "NVIDIA/Megatron-LM",
    "NVIDIA-NeMo/RL",
    "PrimeIntellect-ai/prime-rl",
    "pytorch/torchtitan",
    "lightseekorg/TorchSpec",
)


@scheduler(f"slime {commit_of(SLIME)}", "slime/utils/dp_schedule.py: build_dp_schedule, balance_data")
def _slime() -> Plan:
    schedule = load(SLIME, "slime.utils.dp_schedule")

    def plan(step: Step) -> Layout:
        arguments = SimpleNamespace(
            use_dynamic_batch_size=True, max_tokens_per_gpu=step.max_tokens, balance_data=True, balance_by_flops=False
        )
        parallel = {"dp_size": step.ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        size = step.lengths.size
        with mock.patch.object(schedule, "calculate_fwd_flops", lambda lengths, _: step.total(lengths)):
            partitions, micro_batches, _, _ = schedule.build_dp_schedule(
                arguments, parallel, step.lengths.tolist(), global_batch_size=size, rollout_indices=list(range(size))
            )
        return [
            [[partition[local] for local in one] for one in of_rank]
            for partition, of_rank in zip(partitions, micro_batches, strict=True)
        ]

    return plan


@scheduler(
    f"ODC {commit_of(ODC)}",
    "examples/llm_training/packing.py: get_seqlen_balanced_partitions, rearrange_micro_batches (DynamicDiffMicro; "
    "DynamicSameMicro in lockstep)",
    by_sync=True,
)
def _odc() -> Plan:
    packing = load(ODC, "packing", root="examples/llm_training", absent=("args",))

    def plan(step: Step) -> Layout:
        """As its `dynamic_packing`, which every rank calls for itself, does it for all of them."""

        def costs_of(lengths: Sequence[int]) -> list[float]:
            return step.costs_of(np.asarray(lengths)).tolist()  # type: ignore[no-any-return]

        def pack(lengths: Ints, least: int | None) -> Sequence[Sequence[int]]:
            packed: Sequence[Sequence[int]]
            if least is None:
                packed = packing.rearrange_micro_batches(
                    lengths.tolist(), step.max_tokens, same_num_in_dp=False, get_seq_costs_func=costs_of
                )
                return packed
            for number in count(least):  # its loop, which has no least number but that of an all_reduce
                packed = packing.get_seqlen_balanced_partitions(lengths.tolist(), number, False, costs_of)
                if all(lengths[one].sum() <= step.max_tokens for one in packed):
                    break
            return sorted(packed, key=lambda one: -step.total(lengths[one]))

        same = step.sync == "micro_batch"
        shares = packing.get_seqlen_balanced_partitions(step.lengths.tolist(), step.ranks, same, costs_of)
        if same:
            return _agreed(step.lengths, shares, pack)
        held = [np.asarray(share) for share in shares]
        return [[share[one].tolist() for one in pack(step.lengths[share], None)] for share in held]

    return plan


def _megatron(name: str) -> Plan:
    module = load(MEGATRON, "megatron.core.datasets.data_schedule", absent=("transformer_engine",))

    def plan(step: Step) -> Layout:
        found = getattr(module, name)(step.max_tokens, 1, step.ranks, None).get_groups_and_subsamples(
            list(enumerate(step.lengths.tolist()))
        )
        return [[list(of_ranks[rank]) for of_ranks in found] for rank in range(step.ranks)]

    return plan


@scheduler(
    f"Megatron-core {commit_of(MEGATRON)}, packing",
    "megatron/core/datasets/data_schedule.py: DpBalancedScheduler",
)
def _megatron_packing() -> Plan:
    return _megatron("DpBalancedScheduler")


@scheduler(
    f"Megatron-core {commit_of(MEGATRON)}, dynamic CP",
    "megatron/core/datasets/data_schedule.py: DefaultDynamicCPScheduler",
    splits=True,
)
def _megatron_dynamic() -> Plan:
    return _megatron("DefaultDynamicCPScheduler")


@scheduler(
    f"Megatron-core {commit_of(MEGATRON)}, hybrid CP",
    "megatron/core/pipeline_parallel/hybrid_cp_schedule.py: BalancedCPScheduler",
    splits=True,
    alone=True,
)
def _megatron_hybrid() -> Plan:
    schedule = load(MEGATRON, "megatron.core.pipeline_parallel.hybrid_cp_schedule", absent=("transformer_engine",))

    def plan(step: Step) -> Layout:
        ranks = SimpleNamespace(size=lambda: step.ranks)
        rollouts = list(enumerate(step.lengths.tolist()))
        _, found = schedule.BalancedCPScheduler(step.max_tokens, ranks).get_groups_and_subsamples(rollouts, None)
        return [[list(of_ranks[rank]) for of_ranks in found] for rank in range(step.ranks)]

    return plan


@scheduler(
    "verl 0.9.1, dynamic CP",
    "verl/utils/dynamic_cp_scheduler.py: DynamicCPScheduler, with Megatron-core's DefaultDynamicCPScheduler",
    splits=True,
    timed=False,
)
def _verl_dynamic() -> Plan:
    adapter = importlib.import_module("verl.utils.dynamic_cp_scheduler")
    megatron = load(MEGATRON, "megatron.core.datasets.data_schedule", absent=("transformer_engine",))

    def plan(step: Step) -> Layout:
        """Each rank calls it for itself."""
        rows = rows_of(step.lengths)
        of_verl = adapter.DynamicCPScheduler(step.max_tokens, dp_size=step.ranks, cp_size=1)

        def of_rank(rank: int) -> list[list[int]]:
            group = SimpleNamespace(size=lambda: step.ranks, rank=lambda: rank)
            found = of_verl.schedule(rows, group, tp_size=1)
            return [list(one[adapter.DCP_SAMPLE_IDS]) for one in found]

        with mock.patch.object(
            adapter, "get_megatron_dynamic_cp_scheduler_cls", return_value=megatron.DefaultDynamicCPScheduler
        ):
            return [of_rank(rank) for rank in range(step.ranks)]

    return plan


@scheduler(
    f"NeMo-RL {commit_of(NEMO_RL)}",
    "nemo_rl/distributed/batched_data_dict.py: shard_by_batch_size, modified_first_fit_decreasing",
)
def _nemo_rl() -> Plan:
    batched = load(NEMO_RL, "nemo_rl.distributed.batched_data_dict")

    def plan(step: Step) -> Layout:
        packing = {
            "algorithm": "modified_first_fit_decreasing",
            "max_tokens_per_microbatch": step.max_tokens,
            "input_lengths_key": "lengths",
            "input_key": "lengths",
            "sequence_length_pad_multiple": 1,
        }
        rows = {"lengths": torch.from_numpy(step.lengths), "places": torch.arange(step.lengths.size)}
        shards, _ = batched.BatchedDataDict(rows).shard_by_batch_size(step.ranks, sequence_packing_args=packing)
        return [
            [shard["places"][first:last].tolist() for first, last in shard.micro_batch_indices[0]] for shard in shards
        ]

    return plan


@scheduler(
    f"prime-rl {commit_of(PRIME_RL)}",
    "src/prime_rl/trainer/batch.py: packed_samples_into_micro_bs, balanced_partition",
)
def _prime_rl() -> Plan:
    batch = load(PRIME_RL, "prime_rl.trainer.batch", root="src")

    def sample(place: int, length: int) -> Any:
        nothing: list[Any] = []
        return batch.MicroBatch(range(length), nothing, nothing, nothing, nothing, [length], nothing, nothing, [place])

    def packed(content: Any) -> Any:
        """A bin as it is, its tokens not copied."""
        lengths = [len(one.input_ids) for one in content.samples]
        return SimpleNamespace(sequence_lengths=lengths, places=[one.seq_lens[0] for one in content.samples])

    def plan(step: Step) -> Layout:
        samples = [sample(place, length) for place, length in enumerate(step.lengths.tolist())]
        with mock.patch.object(batch, "_materialize_bin", packed):
            bins = batch.packed_samples_into_micro_bs(samples, step.max_tokens, step.ranks, step.total)
        ranks = batch._distribute_group(bins, step.ranks, step.total)
        return [[one.places for one in rank] for rank in ranks]

    return plan


@scheduler(f"torchtitan {commit_of(TORCHTITAN)}", "torchtitan/experiments/rl/components/batcher.py: Batcher")
def _torchtitan() -> Plan:
    module = load(TORCHTITAN, "torchtitan.experiments.rl.components.batcher")

    class Batcher(module.Batcher):  # type: ignore[misc, name-defined]
        """Its rows and its grid, without the copying of tokens."""

        def _pack_training_sample_row(self, training_samples: list[Any]) -> list[Any]:
            return training_samples

        @staticmethod
        def collate(rows: list[list[Any]]) -> list[Any]:
            return [one for row in rows for one in row]

    def plan(step: Step) -> Layout:
        config = SimpleNamespace(
            batch=SimpleNamespace(local_batch_size=1, seq_len=step.max_tokens), per_sample_pad_multiple=None
        )
        batcher = Batcher(config, num_prompts_per_train_step=step.batch_size, dp_degree=step.ranks, pad_id=0)
        rollouts = [SimpleNamespace(token_ids=range(n + 1), place=i) for i, n in enumerate(step.lengths.tolist())]
        grid = batcher._build_microbatch_grid(batcher._assign_training_samples_to_rows(rollouts))
        return [[[one.place for one in of_ranks[rank]] for of_ranks in grid] for rank in range(step.ranks)]

    return plan


@scheduler(
    f"TorchSpec {commit_of(TORCHSPEC)}",
    "torchspec/controller/training_controller.py: _partition_results; then next fit, for it knows no cap",
)
def _torchspec() -> Plan:
    with mock.patch("ray.remote", lambda one: one):
        controllers = load(TORCHSPEC, "torchspec.controller.training_controller")

    def plan(step: Step) -> Layout:
        controller = object.__new__(controllers.AsyncTrainingController)
        controller.dp_size = step.ranks
        shapes = [{"input_ids": (1, length)} for length in step.lengths.tolist()]
        results = [controllers.InferenceOutput("", place, shape) for place, shape in enumerate(shapes)]
        shares = controller._partition_results(results)
        return _cut(step, [[one.mooncake_key for one in share] for share in shares])

    return plan

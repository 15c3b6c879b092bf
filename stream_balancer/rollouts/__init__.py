"""Values that travel: rollouts in, batches out. Frozen values; nothing here waits, decides or sends."""

from stream_balancer.rollouts.batch import Batch, Denominators, MiniBatchSize, RankBatch, Reason
from stream_balancer.rollouts.micro_batch import ExecutionSize, MicroBatch
from stream_balancer.rollouts.rollout import EvictReason, Rollout, cheapest_to_copy
from stream_balancer.values import SUPPORTED_DTYPES, Version

__all__ = [
    "SUPPORTED_DTYPES",
    "Batch",
    "Denominators",
    "EvictReason",
    "ExecutionSize",
    "MicroBatch",
    "MiniBatchSize",
    "RankBatch",
    "Reason",
    "Rollout",
    "Version",
    "cheapest_to_copy",
]

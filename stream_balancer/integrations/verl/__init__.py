"""verl: its partitioner and micro-batch former, its batches in and out, its replay buffer. See docs/verl.md.

Importing this needs no verl; calling does.
"""

from stream_balancer.integrations.verl.jagged import rollouts_from_tensordict, tensordict_from_share
from stream_balancer.integrations.verl.padded import dataproto_from_share, rollouts_from_dataproto
from stream_balancer.integrations.verl.patching import patch, unpatch
from stream_balancer.integrations.verl.seqlen_balancing import get_seqlen_balanced_partitions, rearrange_micro_batches

__all__ = [
    "dataproto_from_share",
    "get_seqlen_balanced_partitions",
    "patch",
    "rearrange_micro_batches",
    "rollouts_from_dataproto",
    "rollouts_from_tensordict",
    "tensordict_from_share",
    "unpatch",
]

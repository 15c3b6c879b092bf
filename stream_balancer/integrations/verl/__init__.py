"""verl: its partitioner and micro-batch former, its replay buffer. See docs/verl.md.

Importing this needs no verl; calling does.
"""

from stream_balancer.integrations.verl.patching import patch
from stream_balancer.integrations.verl.seqlen_balancing import get_seqlen_balanced_partitions, rearrange_micro_batches

__all__ = ["get_seqlen_balanced_partitions", "patch", "rearrange_micro_batches"]

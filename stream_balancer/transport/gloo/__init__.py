"""Ranks over torch.distributed: pairs of processes over gloo, with shared memory on one machine."""

"""The process that hosts the balancer: puts, batches, serving the ranks, journal and checkpoints."""

"""``python -m stream_balancer``: the command ``stream-balancer``. Nothing else."""

from stream_balancer.cli import main

main()

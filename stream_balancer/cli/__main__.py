"""``python -m stream_balancer.cli``."""

from stream_balancer.cli import main

main()

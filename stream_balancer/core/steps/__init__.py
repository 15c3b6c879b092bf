"""Steps in flight: who has what of each, and what is to be done next."""

from stream_balancer.core.steps.ledger import *  # noqa: F403

"""stream_balancer: finished RL rollouts in, every data-parallel rank's balanced share out.

    import stream_balancer as sb

    async with sb.StreamBalancer(sb.BalancerConfig(dp_size=8, batch_size=256)) as balancer:
        await balancer.put(sb.Rollout(tokens={"input_ids": ids}))      # in rollout workers
        async for batch in balancer.batches():                         # in the trainer
            share = batch.ranks[0]

README.md shows the rest; ``help(sb.BalancerConfig)`` explains every knob.
"""

from stream_balancer import planning
from stream_balancer.balancer import Batches, StreamBalancer
from stream_balancer.blocking import BlockingBalancer, blocking
from stream_balancer.config import BalancerConfig
from stream_balancer.connect import BlockingProducer, Producer, connect
from stream_balancer.cost import CostModel, PaddedCost, QuadraticCost, TokenCost, TransformerCost
from stream_balancer.dispatch import serve
from stream_balancer.errors import (
    AlreadyInUseError,
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    ConfigError,
    DuplicateRolloutError,
    EndOfStream,
    RankLostError,
    RolloutError,
    TraceError,
    WireError,
    WouldBlock,
)
from stream_balancer.feed import RankFeed
from stream_balancer.simulate import SimulationReport, simulate
from stream_balancer.trace import Trace, generate_trace, load_trace
from stream_balancer.transport.torch_dist import TorchTransport
from stream_balancer.types import Batch, MicroBatch, RankBatch, Rollout, Statistics

__version__ = "0.1.0"

__all__ = [
    "AlreadyInUseError",
    "BalancerConfig",
    "Batch",
    "Batches",
    "BlockingBalancer",
    "BlockingProducer",
    "BrokenResourceError",
    "BusyResourceError",
    "ClosedResourceError",
    "ConfigError",
    "CostModel",
    "DuplicateRolloutError",
    "EndOfStream",
    "MicroBatch",
    "PaddedCost",
    "Producer",
    "QuadraticCost",
    "RankBatch",
    "RankFeed",
    "RankLostError",
    "Rollout",
    "RolloutError",
    "SimulationReport",
    "Statistics",
    "StreamBalancer",
    "TokenCost",
    "TorchTransport",
    "Trace",
    "TraceError",
    "TransformerCost",
    "WireError",
    "WouldBlock",
    "blocking",
    "connect",
    "generate_trace",
    "load_trace",
    "planning",
    "serve",
    "simulate",
]

"""stream_balancer: finished RL rollouts in, a balanced batch for every data-parallel rank out.

    import stream_balancer as sb

    async with sb.StreamBalancer(sb.BalancerConfig(dp_size=8, batch_size=256)) as balancer:
        await balancer.put(sb.Rollout(tokens={"input_ids": ids}))      # in rollout workers
        async for batch in balancer.batches():                         # in the trainer
            for rank_batch in batch.ranks:                             # one for each data-parallel rank
                ...

README.md shows the rest; ``help(sb.BalancerConfig)`` explains every knob.

A name's module is imported when the name is first used, so that ``stream-balancer --help`` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stream_balancer import planning
    from stream_balancer.config import BalancerConfig
    from stream_balancer.controller.balancer import StreamBalancer
    from stream_balancer.controller.batches import Batches
    from stream_balancer.controller.blocking import BlockingBalancer, blocking
    from stream_balancer.controller.journal import Journal, Recovered
    from stream_balancer.controller.serve import serve
    from stream_balancer.core.observer import Observer
    from stream_balancer.cost import CalibratedCost, CostModel, PaddedCost, QuadraticCost, TokenCost, TransformerCost
    from stream_balancer.errors import (
        AlreadyInUseError,
        BrokenResourceError,
        BusyResourceError,
        ClosedResourceError,
        ConfigError,
        DuplicateRolloutError,
        EndOfStream,
        JournalError,
        RankLostError,
        RolloutError,
        TraceError,
        WireError,
        WouldBlock,
    )
    from stream_balancer.producer.client import BlockingProducer, Producer, connect
    from stream_balancer.rank.barrier import barrier
    from stream_balancer.rank.feed import RankFeed
    from stream_balancer.statistics import Statistics
    from stream_balancer.tools.length_models import generate_trace
    from stream_balancer.tools.simulate import simulate
    from stream_balancer.tools.simulation_report import SimulationReport
    from stream_balancer.tools.trace import Trace, load_trace
    from stream_balancer.tools.tune import tune
    from stream_balancer.tools.tune_report import TuneReport
    from stream_balancer.transport.gloo.torch_dist import TorchTransport
    from stream_balancer.types import Batch, MicroBatch, RankBatch, Rollout

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
    "CalibratedCost",
    "ClosedResourceError",
    "ConfigError",
    "CostModel",
    "DuplicateRolloutError",
    "EndOfStream",
    "Journal",
    "JournalError",
    "MicroBatch",
    "Observer",
    "PaddedCost",
    "Producer",
    "QuadraticCost",
    "RankBatch",
    "RankFeed",
    "RankLostError",
    "Recovered",
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
    "TuneReport",
    "WireError",
    "WouldBlock",
    "barrier",
    "blocking",
    "connect",
    "generate_trace",
    "load_trace",
    "planning",
    "serve",
    "simulate",
    "tune",
]

_NAMES_OF = {
    "controller.balancer": "StreamBalancer",
    "controller.batches": "Batches",
    "controller.blocking": "BlockingBalancer blocking",
    "config": "BalancerConfig",
    "producer.client": "BlockingProducer Producer connect",
    "cost": "CalibratedCost CostModel PaddedCost QuadraticCost TokenCost TransformerCost",
    "controller.serve": "serve",
    "core.observer": "Observer",
    "errors": "AlreadyInUseError BrokenResourceError BusyResourceError ClosedResourceError ConfigError "
    "DuplicateRolloutError EndOfStream JournalError RankLostError RolloutError TraceError WireError "
    "WouldBlock",
    "rank.feed": "RankFeed",
    "controller.journal": "Journal Recovered",
    "tools.simulate": "simulate",
    "tools.simulation_report": "SimulationReport",
    "tools.length_models": "generate_trace",
    "tools.trace": "Trace load_trace",
    "rank.barrier": "barrier",
    "transport.gloo.torch_dist": "TorchTransport",
    "tools.tune": "tune",
    "tools.tune_report": "TuneReport",
    "statistics": "Statistics",
    "types": "Batch MicroBatch RankBatch Rollout",
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
_MODULES = {"planning", *(module.partition(".")[0] for module in _NAMES_OF)} - _MODULE_OF.keys()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

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
    from stream_balancer import planning as planning
    from stream_balancer.client.barrier import barrier as barrier
    from stream_balancer.client.feed import RankFeed as RankFeed
    from stream_balancer.client.producer import BlockingProducer as BlockingProducer
    from stream_balancer.client.producer import Producer as Producer
    from stream_balancer.client.producer import connect as connect
    from stream_balancer.client.step import Step as Step
    from stream_balancer.config import BalancerConfig as BalancerConfig
    from stream_balancer.config import ContextParallel as ContextParallel
    from stream_balancer.config import Groups as Groups
    from stream_balancer.config import Limits as Limits
    from stream_balancer.config import MicroBatches as MicroBatches
    from stream_balancer.config import Staleness as Staleness
    from stream_balancer.config import StepSize as StepSize
    from stream_balancer.core.observer import Observer as Observer
    from stream_balancer.cost import AttentionPairs as AttentionPairs
    from stream_balancer.cost import CalibratedCost as CalibratedCost
    from stream_balancer.cost import CostModel as CostModel
    from stream_balancer.cost import LayerSumCost as LayerSumCost
    from stream_balancer.cost import PaddedCost as PaddedCost
    from stream_balancer.cost import QuadraticCost as QuadraticCost
    from stream_balancer.cost import TokenCost as TokenCost
    from stream_balancer.cost import TransformerCost as TransformerCost
    from stream_balancer.errors import AlreadyInUseError as AlreadyInUseError
    from stream_balancer.errors import BrokenResourceError as BrokenResourceError
    from stream_balancer.errors import BusyResourceError as BusyResourceError
    from stream_balancer.errors import ClosedResourceError as ClosedResourceError
    from stream_balancer.errors import ConfigError as ConfigError
    from stream_balancer.errors import DuplicateRolloutError as DuplicateRolloutError
    from stream_balancer.errors import EndOfStream as EndOfStream
    from stream_balancer.errors import JournalError as JournalError
    from stream_balancer.errors import RankLostError as RankLostError
    from stream_balancer.errors import RefusedError as RefusedError
    from stream_balancer.errors import RolloutError as RolloutError
    from stream_balancer.errors import TraceError as TraceError
    from stream_balancer.errors import WireError as WireError
    from stream_balancer.errors import WouldBlock as WouldBlock
    from stream_balancer.host.balancer import StreamBalancer as StreamBalancer
    from stream_balancer.host.batches import Batches as Batches
    from stream_balancer.host.blocking import BlockingBalancer as BlockingBalancer
    from stream_balancer.host.blocking import blocking as blocking
    from stream_balancer.host.journal import Journal as Journal
    from stream_balancer.host.journal import Recovered as Recovered
    from stream_balancer.host.serve import serve as serve
    from stream_balancer.host.transport import TorchTransport as TorchTransport
    from stream_balancer.statistics import Statistics as Statistics
    from stream_balancer.tools.length_models import generate_trace as generate_trace
    from stream_balancer.tools.simulate import simulate as simulate
    from stream_balancer.tools.simulation_report import SimulationReport as SimulationReport
    from stream_balancer.tools.trace import Trace as Trace
    from stream_balancer.tools.trace import load_trace as load_trace
    from stream_balancer.tools.tune import tune as tune
    from stream_balancer.tools.tune_report import TuneReport as TuneReport
    from stream_balancer.types import Batch as Batch
    from stream_balancer.types import MicroBatch as MicroBatch
    from stream_balancer.types import RankBatch as RankBatch
    from stream_balancer.types import Rollout as Rollout

__version__ = "0.1.0"

_NAMES_OF = {
    "host.balancer": "StreamBalancer",
    "host.batches": "Batches",
    "host.blocking": "BlockingBalancer blocking",
    "config": "BalancerConfig ContextParallel Groups Limits MicroBatches Staleness StepSize",
    "client.producer": "BlockingProducer Producer connect",
    "cost": "AttentionPairs CalibratedCost CostModel LayerSumCost PaddedCost QuadraticCost TokenCost TransformerCost",
    "host.serve": "serve",
    "core.observer": "Observer",
    "errors": "AlreadyInUseError BrokenResourceError BusyResourceError ClosedResourceError ConfigError "
    "DuplicateRolloutError EndOfStream JournalError RankLostError RefusedError RolloutError TraceError "
    "WireError WouldBlock",
    "client.feed": "RankFeed",
    "client.step": "Step",
    "host.journal": "Journal Recovered",
    "tools.simulate": "simulate",
    "tools.simulation_report": "SimulationReport",
    "tools.length_models": "generate_trace",
    "tools.trace": "Trace load_trace",
    "client.barrier": "barrier",
    "host.transport": "TorchTransport",
    "tools.tune": "tune",
    "tools.tune_report": "TuneReport",
    "statistics": "Statistics",
    "types": "Batch MicroBatch RankBatch Rollout",
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
_MODULES = {"planning", *(module.partition(".")[0] for module in _NAMES_OF)} - _MODULE_OF.keys()

__all__ = sorted([*_MODULE_OF, "planning"])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})

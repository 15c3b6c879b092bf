# Written by `python tests/stubs.py`.

from . import cost as cost
from . import errors as errors
from . import planning as planning
from . import rollouts as rollouts
from .client.barrier import barrier as barrier
from .client.feed import RankFeed as RankFeed
from .client.producer import BlockingProducer as BlockingProducer
from .client.producer import Producer as Producer
from .client.producer import connect as connect
from .client.step import Step as Step
from .config import BalancerConfig as BalancerConfig
from .config import Groups as Groups
from .config import MicroBatches as MicroBatches
from .config import Staleness as Staleness
from .core.observer import Observer as Observer
from .host.balancer import StreamBalancer as StreamBalancer
from .host.batches import Batches as Batches
from .host.blocking import BlockingBalancer as BlockingBalancer
from .host.blocking import blocking as blocking
from .host.journal import Recovered as Recovered
from .host.serve import serve as serve
from .host.transport import TorchTransport as TorchTransport
from .rollouts import Batch as Batch
from .rollouts import Rollout as Rollout
from .statistics import Statistics as Statistics
from .tools.length_models import generate_trace as generate_trace
from .tools.simulate import simulate as simulate
from .tools.simulation_report import SimulationReport as SimulationReport
from .tools.trace import Trace as Trace
from .tools.trace import load_trace as load_trace
from .tools.tune import tune as tune
from .tools.tune_report import TuneReport as TuneReport

__version__: str
__all__ = [
    "BalancerConfig",
    "Batch",
    "Groups",
    "MicroBatches",
    "Observer",
    "RankFeed",
    "Rollout",
    "Staleness",
    "StreamBalancer",
    "TorchTransport",
    "barrier",
    "blocking",
    "connect",
    "cost",
    "errors",
    "load_trace",
    "planning",
    "rollouts",
    "serve",
    "simulate",
    "tune",
]

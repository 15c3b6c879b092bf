"""stream_balancer: finished RL rollouts in, a balanced batch for every data-parallel rank out.

    import stream_balancer as sb

    async with sb.StreamBalancer(sb.BalancerConfig(dp_size=8, batch_size=256)) as balancer:
        await balancer.put(sb.Rollout(tokens={"input_ids": ids}))      # in rollout workers
        async for batch in balancer.batches():                         # in the trainer
            for rank_batch in batch.ranks:                             # one for each data-parallel rank
                ...

README.md shows the rest; ``help(sb.BalancerConfig)`` explains every knob.

A name's module is imported when the name is first used, so that ``stream-balancer --help`` does not wait for torch.
Type checkers read ``__init__.pyi``, which ``python tests/stubs.py`` writes from the tables below.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_NAMES_OF = {
    "client.barrier": "barrier",
    "client.feed": "RankFeed",
    "client.producer": "connect",
    "config": "BalancerConfig Groups MicroBatches Staleness",
    "core.observer": "Observer",
    "host.balancer": "StreamBalancer",
    "host.blocking": "blocking",
    "host.serve": "serve",
    "host.transport": "TorchTransport",
    "tools.simulate": "simulate",
    "tools.trace": "load_trace",
    "tools.tune": "tune",
    "rollouts": "Batch Rollout",
}
_MODULES = ("cost", "errors", "planning", "rollouts")
# What these return or take, for annotations; `dir` does not list them.
_MORE_NAMES_OF = {
    "client.producer": "BlockingProducer Producer",
    "client.step": "Step",
    "host.batches": "Batches",
    "host.blocking": "BlockingBalancer",
    "host.journal": "Recovered",
    "statistics": "Statistics",
    "tools.length_models": "generate_trace",
    "tools.simulation_report": "SimulationReport",
    "tools.trace": "Trace",
    "tools.tune_report": "TuneReport",
}

__all__ = sorted([*_MODULES, *" ".join(_NAMES_OF.values()).split()])

_MODULE_OF = {
    name: module for table in (_NAMES_OF, _MORE_NAMES_OF) for module, names in table.items() for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        # errors and cost models were here once
        homes = [] if name.startswith("_") else [import_module(f"{__name__}.{one}") for one in _MODULES]
        hint = "".join(f"; there is {one.__name__}.{name}" for one in homes if hasattr(one, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])

"""What is refused together with shared prefixes."""

from __future__ import annotations

from stream_balancer.config.knobs import Knobs
from stream_balancer.cost import CalibratedCost
from stream_balancer.errors import ConfigError

__all__ = ["check_sharing", "check_sharing_combinations"]


def check_sharing(c: Knobs) -> None:
    """The knob by itself."""
    if not isinstance(c.share_prefixes, bool):
        raise ConfigError(f"share_prefixes must be True or False, not {c.share_prefixes!r}")


def check_sharing_combinations(c: Knobs) -> None:
    """What a plan with shared prefixes does not know of."""
    if not c.share_prefixes:
        return
    unknown = {
        "a padded cost (a shared prefix is not padded)": c.cost.padded,
        "CalibratedCost (it learns from seconds what whole lengths cost)": isinstance(c.cost, CalibratedCost),
        f"sync={c.sync!r} (it evens out ranks, not micro-batches)": c.sync != "step",
        f"counts={c.counts!r} (siblings on one rank are worth more than even counts)": c.counts != "free",
        "speeds (all ranks count as alike)": c.speeds is not None,
        f"mini_batches={c.mini_batches} (siblings would be torn apart)": c.mini_batches > 1,
        f"micro_batch_multiple={c.micro_batch_multiple} (siblings would be torn apart)": c.micro_batch_multiple > 1,
        f"cp_sizes={c.cp_sizes} (a shared prefix lies on one rank)": len(c.cp_sizes) > 1,
    }
    if what := [name for name, given in unknown.items() if given]:
        raise ConfigError(f"share_prefixes does not work with {' and '.join(what)}. Leave one of the two out")

"""The two runs, one after the other, and what came of them."""

from __future__ import annotations

from stream_balancer.demo.options import DemoOptions

__all__ = ["run_demo"]


def run_demo(options: DemoOptions) -> int:
    """Run the demo; the process's exit code. Blocking."""
    raise NotImplementedError

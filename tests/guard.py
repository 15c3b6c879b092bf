"""How long a test waits before it says that something hangs. Nothing is timed by it."""

GUARD_S = 200
"""Real seconds: where five processes import torch on a busy machine of one slow core, a minute has been too short.
A whole test has three times as long (pyproject.toml)."""

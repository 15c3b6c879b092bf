"""Offline: traces, simulation, tuning, plots. No event loop."""

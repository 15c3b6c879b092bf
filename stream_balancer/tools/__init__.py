"""Offline: traces, simulation, tuning, plots; and the recorder, which writes traces. No event loop."""

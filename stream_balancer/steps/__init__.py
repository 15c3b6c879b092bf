"""Steps in flight: the controller's ledger, and one process's side of it. Pure: no clock, no I/O, no thread."""

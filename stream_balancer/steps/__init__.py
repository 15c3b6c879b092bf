"""Steps in flight: the ledger of the controller, and the side of one process. Pure: no clock, no I/O, no thread."""

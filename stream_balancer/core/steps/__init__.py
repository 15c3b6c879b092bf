"""Steps in flight: who has what of each, and what is to be done next. The ledger of steps is in :mod:`.ledger`."""

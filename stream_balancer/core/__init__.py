"""When a batch leaves, and what is known of it: pure. Time is an argument; no event loop, thread, clock or torch."""

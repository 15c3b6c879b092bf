"""One listening socket: who joins, and producers over TCP."""

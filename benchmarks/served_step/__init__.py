"""Where the CPU time of a served step goes, from socket to socket. ``python -m benchmarks.served_step --help``."""

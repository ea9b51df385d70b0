"""The CPU time of a served step by part, from socket to socket. ``python -m benchmarks.served_step --help``."""

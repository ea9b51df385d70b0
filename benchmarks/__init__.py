"""Benchmarks: the cost of the engine and its harness, measured on this machine. ``python -m benchmarks``."""

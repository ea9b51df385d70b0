"""Benchmarks: what the engine and its harness cost, measured on the machine at hand. ``python -m benchmarks``."""

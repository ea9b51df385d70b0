"""The engine on a GPU: parity, where a decode step's time goes, graphs, a peer. ``python -m benchmarks.gpu``."""

"""The executable specification: the engine's decisions, written a second time, and their comparison."""

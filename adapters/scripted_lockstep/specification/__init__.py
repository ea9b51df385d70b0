"""The executable specification: the engine's decisions, written a second time, and the comparison with them."""

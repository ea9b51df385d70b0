"""Scripts on the engine: the run that they drive, in either tier, with its clients, its reset and its ``t``."""

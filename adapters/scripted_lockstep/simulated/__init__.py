"""The simulated device of the engine: its pipeline, its model, its grammars. Pure, as the core is."""

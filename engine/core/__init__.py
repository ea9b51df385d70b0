"""The pure core: typed messages and plans, memory, the scheduler, its audit and its recordings."""

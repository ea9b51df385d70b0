"""The sim tier: scripts over a simulated pipeline and simulated clients, in one process."""

"""The two tiers of scripts: one process with a simulated pipeline, and a real server."""

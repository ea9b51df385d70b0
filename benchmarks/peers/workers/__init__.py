"""Programs that generate without a server, each run by the python of its own environment and asked over its pipes."""

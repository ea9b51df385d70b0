"""Programs that generate without a server, each run by its environment's Python and driven over its pipes."""

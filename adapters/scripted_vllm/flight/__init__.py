"""Flights of vLLM's scheduler: the hooks that record it in its own engine, and its replay in this process."""

"""Flights of SGLang's scheduler: the hooks that record it in its own server, and its replay in this process."""

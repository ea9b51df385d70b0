"""Runs scripts on vLLM's own server: its front end, its engine process, and its busy loop, which stops at our gate."""

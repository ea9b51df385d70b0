"""The checks of an engine after every step and at the end, for scripts, search and replay alike."""

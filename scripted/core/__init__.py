"""What a scheduler must be for the search: the protocol of adapters, schedules, and the actions that all of them know.

Imports nothing of the engine: a scheduler that this project did not write is searched without it.
"""

"""The adapter protocol, schedules, the actions that every adapter has, and runs of schedules.

Imports nothing of the engine: a scheduler of another project is searched without it.
"""

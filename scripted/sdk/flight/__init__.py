"""The flight recorder: a scheduler's inputs and plans, recorded in servers of other projects and replayed.

One format and one reader for every engine. An engine's hooks write frames (``recorder.py``), its adapter implements
``FlightMachine`` (``replay.py``); see docs/flight_recorder.md.
"""

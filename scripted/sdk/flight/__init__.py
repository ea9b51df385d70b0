"""The flight recorder: what a scheduler was given and what it planned, written in other people's servers, and replayed.

One format and one reader for every engine. An engine's hooks write frames (``recorder.py``), its adapter implements
``FlightMachine`` (``replay.py``); docs/flight_recorder.md leads through it.
"""

"""The front end's sessions under the search: answers of several choices over a scheduler that only counts.

Owns the settings, the machine and what a client must be told. It never opens a socket and judges no scheduler.
"""

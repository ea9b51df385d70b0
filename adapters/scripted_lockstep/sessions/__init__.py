"""The front end's sessions under the search: answers of several choices over a scheduler that only counts.

Owns the settings, the machine and the answers that clients must get. It never opens a socket and judges no scheduler.
"""

"""The front end's sessions under the search: replies with several choices, over a scheduler that only counts.

Owns the settings, the machine and the expected replies. It opens no socket and checks no scheduler.
"""

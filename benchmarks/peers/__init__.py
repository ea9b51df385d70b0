"""This server beside others on one checkpoint and one machine. ``python -m benchmarks.peers --help``.

What is asked is asked of all in turns, round by round, and compared within each round.
"""

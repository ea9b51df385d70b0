"""The parts that all processes of a server share: the pipe to the supervisor, the private folder, signals, death
reports.
"""

"""What the commands ``engine`` and ``scripted`` share: exit statuses, files they write, the words for wrong input.

A scheduler of another project is searched with this package and ``scripted`` alone: the engine is not imported.
"""

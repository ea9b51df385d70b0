"""Parts that the commands ``engine`` and ``scripted`` share: exit statuses, output files, errors for wrong input.

Imports neither: a search of another project's scheduler needs this package and ``scripted`` alone.
"""

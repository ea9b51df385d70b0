"""Parts that ``engine`` and ``scripted`` share: exit statuses, whole and output files, errors for wrong input.

Imports neither: a search of another project's scheduler needs this package and ``scripted`` alone.
"""

"""Continuous integration that people drive from a comment or a terminal.

Owns the registration of tests, suites and their partitions, and the slash commands on pull requests. Never imports the
code under test: it reads everything it knows about a test file from the source text.
"""

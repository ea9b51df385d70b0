"""Continuous integration that people drive from a comment or a terminal.

Owns registration of tests, suites and their partitions, and the slash commands on pull requests.
Never imports the code under test: everything it knows about a test file it reads from the source text.
"""

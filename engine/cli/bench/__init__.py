"""A load generator for any OpenAI-compatible server: plans, runs, measures and compares.

Never imports the engine that it measures: it talks to a server only over HTTP.
"""

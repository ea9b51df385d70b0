"""A load generator for any server of the OpenAI protocol: plans, runs, measures and compares.

Never imports the engine that it measures: it knows a server by HTTP alone.
"""

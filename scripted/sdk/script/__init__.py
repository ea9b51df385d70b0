"""Scripts for adapters of the SDK: ``@scripted(adapter=...)``, with ``t``, its verbs, waits, queries, and the report.

A script and a schedule go through the same gate. Nothing here imports the engine.
"""

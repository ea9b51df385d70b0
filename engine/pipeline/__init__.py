"""Pipelines: ``launch`` a microbatch, later take its completion. ``engine.core.scheduler.ports`` has the protocol.

Imports nothing: the scheduler process must not import torch for a pipeline that it does not use.
"""

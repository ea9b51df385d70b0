"""Pipelines: ``launch`` a microbatch, and take its completion later. ``engine.core.scheduler.ports`` has the protocol.

Imports nothing: the scheduler process must not import torch for a pipeline that it does not use.
"""

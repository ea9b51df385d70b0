"""Pipelines: ``launch`` a microbatch, later take its completion. See ``base`` for the protocol.

Nothing is imported here, because the scheduler process must not import torch for a pipeline that it does not use.
"""

"""The model: checkpoints, paged attention, sampling, and the runner that computes one stage's share of a microbatch.

The only package that imports torch, and only where it computes: ``embedded`` and ``checkpoint`` do not.
"""

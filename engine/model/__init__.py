"""The model: checkpoints, paged attention, sampling, and the runner that computes one stage's share of a microbatch.

The only package that imports torch, and only in modules that compute: ``embedded`` and ``checkpoint`` do not.
"""

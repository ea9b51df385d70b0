"""Authenticated TCP between the machines of one engine: the run's secret, its proof, who listens and who connects.

Reads nothing of a peer before that has proved the secret, except the proof itself. Encrypts nothing, pickles nothing.
"""

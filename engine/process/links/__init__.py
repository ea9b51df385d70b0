"""Authenticated TCP between the machines of one engine: the run's secret, its proof, listening, connecting.

Reads nothing but the proof from a peer that has not proved the secret. Neither encrypts nor pickles anything.
"""

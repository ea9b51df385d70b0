"""Authenticated TCP between the machines of one engine: the run's secret, its proof, listening, connecting.

Of a peer that has not proved the secret it reads the proof alone. Encrypts nothing, pickles nothing.
"""

"""Routing policies compared over simulated replicas, in virtual time."""

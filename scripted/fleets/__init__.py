"""Fleets under search: several machines of one adapter, their links and one clock, presented as one machine."""

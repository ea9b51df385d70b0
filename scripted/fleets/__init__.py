"""Fleets under the search: several machines of one adapter, the links between them and one clock, as one machine."""

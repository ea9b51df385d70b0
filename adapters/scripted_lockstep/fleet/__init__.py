"""Fleets under the search: several engines with roles, the links between them and one clock."""

"""Calls of tools in what models write: one parser for each family of models, and which one a model needs."""

"""Plugins that other engines load: light modules that do nothing unless a variable asks for a recording."""

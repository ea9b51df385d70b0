"""Plugins that other engines load: light modules that do nothing unless an environment variable asks to record."""

"""What other engines load as their plugin: light modules that do nothing unless a variable asks for a recording."""

"""What the author of a script touches: ``@scripted``, ``t`` with its verbs, waits and queries, and the state."""

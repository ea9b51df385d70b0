"""The interface of scripts: ``@scripted``, ``t`` with its verbs, waits and queries, and the state."""

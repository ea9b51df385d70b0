"""The mutation score of the pure core: how many small changes of it does each suite notice? ``docs/mutation.md``."""

"""The scheduler process of a server: its live gate, its inbox and outbox, and its main function."""

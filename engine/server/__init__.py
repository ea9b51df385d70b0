"""The processes of a server: launch, placement, supervision, and the scheduler's process."""

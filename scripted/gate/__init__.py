"""The scripted gate: runs scripts between the steps of the scheduler's loop, in either tier."""

"""Processes of a server: started, placed and supervised; and the scheduler's own."""

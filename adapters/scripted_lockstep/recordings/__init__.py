"""Recordings of servers: their replay in this process, and their translation into schedules."""

"""Processes of a server: settings, supervision, the pipes between them, and the gate of production."""
